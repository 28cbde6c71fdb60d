"""What block files say about themselves: the head of the file, and the header of each slot.

Both are little-endian and end in the xxh3_64 of what is before, so a half-written one is no header. A slot's header
names the block's key, length, checksum and generation; only its checksum over the payload proves that the payload is
there.
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

import xxhash

from kvtool.kv.block import KEY_SIZE

PAGE = 4096
"""Size of a header, and alignment of everything in the file: what every disk's O_DIRECT takes."""

_HEAD = struct.Struct("<16sQQQ")  # magic and version, slot size, slots, xxh3
_HEAD_MAGIC = b"kvtool blocks 1\0"
HEAD_SIZE = _HEAD.size
_SLOT = struct.Struct(f"<8sQ{KEY_SIZE}sQQQ")  # magic, length, key, checksum, generation, xxh3
_SLOT_MAGIC = b"kvblock1"


class SlotHeader(NamedTuple):
    """What a slot says it holds."""

    key: bytes
    size: int
    checksum: int
    generation: int

    def pack(self) -> bytes:
        return _sealed(_SLOT, _SLOT_MAGIC, self.size, self.key, self.checksum, self.generation)

    @classmethod
    def unpack(cls, page: memoryview) -> SlotHeader | None:
        """The header at the start of `page`; None when there is no whole one."""
        raw = bytes(page[: _SLOT.size])
        magic, size, key, checksum, generation, _ = _SLOT.unpack(raw)
        header = cls(key, size, checksum, generation)
        return header if magic == _SLOT_MAGIC and raw == header.pack() else None

    def differs(self, key: bytes, size: int, generation: int | None) -> str:
        """What is not as wanted, in words; "" when all is. A `generation` of None is any."""
        if self.key != key:
            return f"block {self.key.hex()[:8]}"
        if self.size != size:
            return f"{self.size} bytes where {size} were asked for"
        if generation is not None and self.generation != generation:
            return f"generation {self.generation} where {generation} was asked for"
        return ""


def pack_head(slot_size: int, slots: int) -> bytes:
    """The head of a file of that shape."""
    return _sealed(_HEAD, _HEAD_MAGIC, slot_size, slots)


def shape_of(head: bytes) -> str:
    """The shape that a file's head tells, in words."""
    if len(head) < HEAD_SIZE or head[:16] != _HEAD_MAGIC:
        return "something that is no block file"
    _, slot_size, slots, _ = _HEAD.unpack(head)
    return f"{slots} slots of {slot_size} bytes"


def page_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def page_of(header: SlotHeader | None) -> memoryview:
    """An aligned page with `header`, or of zeros."""
    page = memoryview(mmap.mmap(-1, PAGE))
    if header is not None:
        raw = header.pack()
        page[: len(raw)] = raw
    return page


def rest_of(views: list[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:] if done else view)
        done = max(0, done - view.nbytes)
    return rest


def _sealed(layout: struct.Struct, *fields: object) -> bytes:
    packed = layout.pack(*fields, 0)
    return packed[:-8] + xxhash.xxh3_64_intdigest(packed[:-8]).to_bytes(8, "little")
