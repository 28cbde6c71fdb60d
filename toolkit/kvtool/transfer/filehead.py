"""What block files say about themselves: the head of the file, and the header of each record.

Both are little-endian and end in the xxh3_64 of what is before, so a half-written one is no header. A record's header
says all that a restart must know of its block: key, parent, length, checksum, how long and how firmly it is wanted, and
a generation that grows with every write to the file. Only its checksum over the payload proves that the payload is
there. The same record (one header page, then the payload) is what the tiers below the files hold.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvtool.kv.block import KEY_SIZE

PAGE = 4096
"""Size of a header, and alignment of everything in the file: what every disk's O_DIRECT takes."""
FORMAT = 2

_TEXT_SIZE = 240
_HEAD = struct.Struct(f"<16sQQ32s32s{_TEXT_SIZE}sQ")  # magic, slot size, slots, fingerprint, key check, layout, xxh3
_HEAD_MAGIC = b"kvtool blocks %d\0" % FORMAT
HEAD_SIZE = _HEAD.size
_RECORD = struct.Struct(f"<8sQ{KEY_SIZE}s{KEY_SIZE}sQQdBBBB16sQ16sQQ")
_RECORD_MAGIC = b"kvblock%d" % FORMAT
_NO_KEY, _NO_TAG = bytes(KEY_SIZE), bytes(16)
_FOR_GOOD = -1.0
SEALED = 1
"""Flag: the payload is encrypted; `sealed_with` and `tag` say how."""


class Kept(NamedTuple):
    """How a block is wanted, in a header. `until_s`: when that ends on the wall clock; None for good."""

    priority: int = 35
    until_s: float | None = None
    pin: int = 0
    copies: int = 0


KEPT_DEFAULT = Kept()


class SlotHeader(NamedTuple):
    """What a slot says it holds."""

    key: bytes
    size: int
    checksum: int
    """Of the payload as it was given, under the key."""
    generation: int = 0
    parent: bytes | None = None
    kept: Kept = KEPT_DEFAULT
    flags: int = 0
    sealed_with: bytes = _NO_TAG
    """Salt of the key that this payload is encrypted with."""
    nonce: int = 0
    tag: bytes = _NO_TAG
    stored: int = 0
    """Checksum of the payload as it is on the disk; the same as `checksum` unless it is encrypted."""

    def pack(self) -> bytes:
        kept = self.kept
        return _sealed(
            _RECORD,
            _RECORD_MAGIC,
            self.size,
            self.key,
            self.parent or _NO_KEY,
            self.checksum,
            self.generation,
            _FOR_GOOD if kept.until_s is None else kept.until_s,
            kept.priority,
            kept.pin,
            kept.copies,
            self.flags,
            self.sealed_with,
            self.nonce,
            self.tag,
            self.stored,
        )

    @classmethod
    def unpack(cls, page: memoryview | bytes) -> SlotHeader | None:
        """The header at the start of `page`; None when there is no whole one."""
        raw = bytes(page[: _RECORD.size])
        if len(raw) < _RECORD.size or raw[:8] != _RECORD_MAGIC or not _whole(raw):
            return None
        fields = _RECORD.unpack(raw)
        _, size, key, parent, sum_, generation, until_s, priority, pin, copies, *rest, _ = fields
        kept = Kept(priority, None if until_s == _FOR_GOOD else until_s, pin, copies)
        return cls(key, size, sum_, generation, None if parent == _NO_KEY else parent, kept, *rest)

    def differs(self, key: bytes, size: int, generation: int | None) -> str:
        """What is not as wanted, in words; "" when all is. A `generation` of None is any."""
        if self.key != key:
            return f"block {self.key.hex()[:8]}"
        if self.size != size:
            return f"{self.size} bytes where {size} were asked for"
        if generation is not None and self.generation != generation:
            return f"generation {self.generation} where {generation} was asked for"
        return ""


class FileHead(NamedTuple):
    """What a file holds: records of up to `slot_size` bytes of one KV layout. `key_check` is empty without encryption.

    `slots` is how many there were when it was last opened.
    """

    slot_size: int
    slots: int
    fingerprint: str = ""
    layout: str = ""
    key_check: str = ""

    def pack(self) -> bytes:
        return _sealed(
            _HEAD,
            _HEAD_MAGIC,
            self.slot_size,
            self.slots,
            self.fingerprint.encode(),
            self.key_check.encode(),
            self.layout.encode()[:_TEXT_SIZE],
        )

    @classmethod
    def unpack(cls, raw: bytes) -> FileHead | None:
        """None when it is not whole, or no head of this format."""
        if not is_ours(raw) or not _whole(raw[:HEAD_SIZE]):
            return None
        _, slot_size, slots, fingerprint, check, layout, _ = _HEAD.unpack(raw[:HEAD_SIZE])
        return cls(slot_size, slots, _text(fingerprint), _text(layout), _text(check))

    def __str__(self) -> str:
        of = f" of {self.layout} (fingerprint {self.fingerprint})" if self.fingerprint else ""
        return f"blocks of up to {self.slot_size} bytes{of}{', encrypted' if self.key_check else ''}"


def is_ours(raw: bytes) -> bool:
    """Whether a file that begins so is a block file of this format, whole or damaged."""
    return len(raw) >= HEAD_SIZE and raw[:16] == _HEAD_MAGIC


def page_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


def put_header(page: memoryview, header: SlotHeader | None) -> memoryview:
    """Fill an aligned page with `header`, or with zeros."""
    raw = header.pack() if header is not None else b""
    page[:PAGE] = raw + bytes(PAGE - len(raw))
    return page[:PAGE]


def rest_of(views: list[memoryview], done: int) -> list[memoryview]:
    """`views` without their first `done` bytes."""
    if not done:
        return views
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(view[done:] if done else view)
        done = max(0, done - view.nbytes)
    return rest


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _sealed(layout: struct.Struct, *fields: object) -> bytes:
    packed = layout.pack(*fields, 0)
    return packed[:-8] + xxhash.xxh3_64_intdigest(packed[:-8]).to_bytes(8, "little")


def _whole(raw: bytes) -> bool:
    return xxhash.xxh3_64_intdigest(raw[:-8]) == int.from_bytes(raw[-8:], "little")
