"""Slot memory: how a rank's DRAM segment is laid out, for the rank and for those who map it.

    [header of slot 0][header of slot 1]...   64 bytes each: key 32, generation 8, length 8, checksum 8, unused 8
    [slot 0][slot 1]...                       from the next page on, each on whole pages, so that files can be read
                                              straight into a slot with O_DIRECT

The header says whose bytes are in a slot. Its generation grows before the slot is handed to another writer, so a
reader in place that finds the generation unchanged *after* he used the last byte knows that nobody wrote meanwhile:
the reader's half of a seqlock (Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012).
Headers are written by the rank alone.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from kvtool.kv.record import Stamp

PAGE = 4096
HEADER = struct.Struct("<32sQQQQ")
_GENERATION = struct.Struct("<Q")
_GENERATION_AT, _REST_AT = 32, 40
_REST = struct.Struct("<QQ")
_NO_KEY = bytes(32)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def slot_offset(slot: int, slots: int, slot_size: int) -> int:
    """Where slot `slot` begins in a segment of `slots` slots."""
    return _pages(slots * HEADER.size) + slot * _pages(slot_size)


class SlotMemory:
    """`slots` slots of `slot_size` bytes in `view`, which stays the caller's."""

    def __init__(self, view: memoryview, slots: int, slot_size: int) -> None:
        self.slots, self.slot_size = slots, slot_size
        self.stride = _pages(slot_size)
        self.data_at = _pages(slots * HEADER.size)
        if view.nbytes < self.data_at + slots * self.stride:
            raise ValueError(
                f"{slots} slots of {slot_size} bytes need {self.data_at + slots * self.stride} bytes of memory, "
                f"got {view.nbytes}"
            )
        self.view = view
        words = np.frombuffer(view, dtype="<u8", count=slots * HEADER.size // 8)
        self.headers: npt.NDArray[np.uint64] = words.reshape(slots, HEADER.size // 8)
        """Of every slot, live: key in words 0-3, generation, length, checksum."""
        self.generations: npt.NDArray[np.uint64] = self.headers[:, 4]

    @staticmethod
    def size(slots: int, slot_size: int) -> int:
        """Bytes that `slots` slots need."""
        return _pages(slots * HEADER.size) + slots * _pages(slot_size)

    @staticmethod
    def slots_in(size: int, slot_size: int) -> int:
        """How many slots fit into `size` bytes, headers and all."""
        slots = size // (_pages(slot_size) + HEADER.size)
        while slots and SlotMemory.size(slots, slot_size) > size:
            slots -= 1
        return slots

    def slot(self, slot: int, length: int) -> memoryview:
        """The first `length` bytes of a slot."""
        at = self.data_at + slot * self.stride
        return self.view[at : at + length]

    def stamp(self, stamp: Stamp) -> None:
        """Write a header. A new generation first, alone: from there on nobody takes the old bytes for whole. The key
        last: who finds it finds the rest."""
        at = stamp.slot * HEADER.size
        _GENERATION.pack_into(self.view, at + _GENERATION_AT, stamp.generation)
        _REST.pack_into(self.view, at + _REST_AT, stamp.length, stamp.checksum)
        self.view[at : at + 32] = stamp.key or _NO_KEY

    def header_bytes(self, slot: int) -> bytes:
        """A copy of a header as it stands."""
        at = slot * HEADER.size
        return bytes(self.view[at : at + HEADER.size])

    def header(self, slot: int) -> tuple[bytes, int, int, int]:
        """(key, generation, length, checksum) as it stands."""
        key, generation, length, checksum, _ = HEADER.unpack_from(self.view, slot * HEADER.size)
        return key, generation, length, checksum
