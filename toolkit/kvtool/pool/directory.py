"""The directory of a rank: which block is in which slot, in shared memory, for those who map it.

A client on the same node that has a rank's segment mapped finds blocks here without a message: the rank alone writes,
any number of clients read, and nobody locks. What it says is a hint; the slot's header (`pool.memory`) says whose bytes
are really there, and the block's checksum says whether they are whole.

    [words of the head, one page][bucket 0][bucket 1]...     behind the slots; 8 words a bucket, one cache line

    head    magic, buckets, incarnation of the rank, heartbeat (ns on the node's monotonic clock), blocks not listed
    word    fingerprint 32 bits, filed 1, transient 1, slot + 1 in 30 (0: in no slot, only in a file); 0: nothing

A key has two buckets and stands in either. Nothing is ever moved to make room, so a reader never misses a block that is
being moved; at the load that `size` allows both buckets are full for fewer than one block in a million, and then the
block is not listed and the count says so: as long as it is not 0, absence here proves nothing. The same goes for keys
that somebody chose to collide.

A rank that is dead or hung stops the heartbeat, and is not believed any more after `TRUST_S`. What a client copied
before that is checked like everything else.

**Reading a slot without a lease** is the reader's half of a seqlock: take a copy of the header, copy the block, look at
the header again. Its writer (the rank) stores the new generation before it tells anybody of the slot, and the one who
then writes the block has heard of it by a message; so a reader whose copy has one byte of the new block sees the new
generation in his second look, on x86, where stores are seen in their order and loads are done in theirs. On machines
that promise less the copy's checksum, which is seeded with the key, still fails. A use is told to the rank later.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtool.errors import ProtocolError
from kvtool.kv.block import KEY_SIZE, BlockKey
from kvtool.kv.record import IN_FILE, NOWHERE, Whereabouts
from kvtool.pool.memory import HEADER, PAGE, SlotMemory

TRUST_S = 1.0
MAGIC = 0x4B565F4449520001  # "KV_DIR", version 1
WAYS = 8
LOAD_MAX = 0.6
_MAGIC_AT, _BUCKETS_AT, _INCARNATION_AT, _BEAT_AT, _UNLISTED_AT = range(5)
_HEAD_WORDS = PAGE // 8
_SLOT_MASK, _TRANSIENT, _FILED = 2**30 - 1, 1 << 30, 1 << 31
_MASK = 2**64 - 1
_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_LAST = 0xFF51AFD7ED558CCD
_MIX_ROW = np.array(_MIX, dtype=np.uint64)
_32, _LAST_WORD, _LOW, _SLOT_WORD = np.uint64(32), np.uint64(_LAST), np.uint64(2**32 - 1), np.uint64(_SLOT_MASK)
_WAYS_COLUMN = np.arange(WAYS, dtype=np.int64)
_KEY = struct.Struct("<QQQQ")

Words = npt.NDArray[np.uint64]


def _places(key: BlockKey, buckets: int) -> tuple[int, int, int]:
    """(fingerprint, first word of each of the two buckets), words counted behind the head."""
    a, b, c, d = _KEY.unpack(key)
    mixed = (a * _MIX[0] + b * _MIX[1] + c * _MIX[2] + d * _MIX[3]) & _MASK
    mixed ^= mixed >> 32
    mixed = (mixed * _LAST) & _MASK
    second = ((mixed * _MIX[0]) & _MASK) >> 32
    return mixed >> 32, ((mixed & 0xFFFFFFFF) * buckets >> 32) * WAYS, (second * buckets >> 32) * WAYS


def _places_of(keys: Words, buckets: np.uint64) -> tuple[Words, npt.NDArray[np.int64]]:
    """`_places` of all rows of `keys` at once: fingerprints [n], words of both buckets [n, 2 * WAYS]."""
    mixed = (keys * _MIX_ROW).sum(axis=1, dtype=np.uint64)
    mixed ^= mixed >> _32
    mixed *= _LAST_WORD
    starts = np.empty((len(keys), 2, 1), dtype=np.uint64)
    starts[:, 0, 0] = (mixed & _LOW) * buckets >> _32
    starts[:, 1, 0] = ((mixed * _MIX_ROW[0]) >> _32) * buckets >> _32
    words = starts.astype(np.int64) * WAYS + _WAYS_COLUMN
    return mixed >> _32, words.reshape(len(keys), 2 * WAYS)


def buckets_for(entries: int) -> int:
    return max(8, int(entries / (LOAD_MAX * WAYS)) + 1)


def directory_size(entries: int) -> int:
    """Bytes that a directory of `entries` blocks takes."""
    size = buckets_for(entries) * WAYS * 8
    return PAGE + -(-size // PAGE) * PAGE


def slots_under(cap: int, slot_size: int, file_slots: int) -> int:
    """How many DRAM slots fit into `cap` bytes, headers and directory and all."""
    slots = SlotMemory.slots_in(cap, slot_size)
    while slots and segment_size(slots, slot_size, file_slots) > cap:
        over = segment_size(slots, slot_size, file_slots) - cap
        slots = max(0, slots - max(1, over // (2 * (slot_size + PAGE))))
    return slots


def segment_size(slots: int, slot_size: int, file_slots: int) -> int:
    """Bytes of a rank's segment: slots with their headers, then the directory of what is in them and in the files."""
    return SlotMemory.size(slots, slot_size) + directory_size(slots + file_slots)


class Directory:
    """The rank's side: the only writer. `view` is the region behind the slots, zeroed."""

    def __init__(self, view: memoryview, entries: int, incarnation: int = 0) -> None:
        self._words = view[: directory_size(entries)].cast("Q")
        self._buckets = buckets_for(entries)
        self._unlisted: set[BlockKey] = set()
        self._words[_BUCKETS_AT], self._words[_INCARNATION_AT] = self._buckets, incarnation
        self._words[_MAGIC_AT] = MAGIC

    @property
    def unlisted(self) -> int:
        """Blocks that are there and not listed."""
        return len(self._unlisted)

    def beat(self, now_s: float) -> None:
        """The rank is alive at `now_s`. Call at least every `TRUST_S` / 3."""
        self._words[_BEAT_AT] = int(now_s * 1e9)

    def place(self, at: Whereabouts) -> None:
        """List a block anew, or take it off the list."""
        fingerprint, one, two = _places(at.key, self._buckets)
        word = _word(fingerprint, at)
        words, was, free, room = self._words, at.was + 1, -1, 0
        for start in (_HEAD_WORDS + one, _HEAD_WORDS + two):
            bucket = words[start : start + WAYS].tolist()
            if at.was != NOWHERE:
                for way, found in enumerate(bucket, start):
                    if found & _SLOT_MASK == was and found >> 32 == fingerprint and found:
                        words[way] = word
                        return
            if bucket.count(0) > room:  # the emptier one: what keeps both from ever being full
                room, free = bucket.count(0), start + bucket.index(0)
        if word and room:
            words[free] = word
        self._list_missing(at.key, bool(word) and not room)

    def _list_missing(self, key: BlockKey, missing: bool) -> None:
        if missing:
            self._unlisted.add(key)
        else:
            self._unlisted.discard(key)
        self._words[_UNLISTED_AT] = len(self._unlisted)


def _word(fingerprint: int, at: Whereabouts) -> int:
    if at.slot == NOWHERE:
        return 0
    flags = (_FILED if at.slot == IN_FILE else 0) | (_TRANSIENT if at.transient else 0)
    return fingerprint << 32 | flags | (at.slot + 1)


@dataclass(frozen=True, slots=True)
class Spot:
    """One block found in a slot: `header` is a copy of what stood there before its bytes were looked at."""

    slot: int
    header: bytes
    transient: bool

    @property
    def facts(self) -> tuple[int, int, int]:
        """(generation, length, checksum)"""
        _, generation, length, checksum, _ = HEADER.unpack(self.header)
        return generation, length, checksum


@dataclass(frozen=True, slots=True)
class Spots:
    """The leading run of some keys: `count` are resident, the first `in_dram` of them in DRAM slots without a gap,
    under the headers `rows`. `sure`: the key behind the run is not resident."""

    count: int
    in_dram: int
    sure: bool
    slots: npt.NDArray[np.int64]
    rows: Words


class DirectoryReader:
    """A client's side. `view`: the region behind the slots of `memory`, mapped. Thread-safe, and never waits."""

    def __init__(self, view: memoryview, memory: SlotMemory, incarnation: int = 0) -> None:
        """
        Raises:
            ProtocolError: no directory there, or that of another incarnation of the rank.
        """
        self._memory = memory
        self._head = view[:PAGE].cast("Q")
        buckets = self._head[_BUCKETS_AT]
        if self._head[_MAGIC_AT] != MAGIC or not 0 < buckets * WAYS * 8 <= len(view) - PAGE:
            raise ProtocolError("no directory in the rank's memory that this kvtool can read; restart the pool with it")
        if self._head[_INCARNATION_AT] != incarnation:
            raise ProtocolError(
                f"the directory is that of incarnation {self._head[_INCARNATION_AT]} of the rank, wanted {incarnation}"
            )
        self._buckets, self._factor = buckets, np.uint64(buckets)
        self._words = view[PAGE : PAGE + buckets * WAYS * 8].cast("Q")
        self._table: Words = np.frombuffer(self._words, dtype=np.uint64)

    def trusted(self, now_s: float) -> bool:
        """Whether the rank was alive within the last `TRUST_S`; `now_s` on the node's monotonic clock."""
        return bool(now_s - self._head[_BEAT_AT] * 1e-9 < TRUST_S)

    def find(self, key: BlockKey) -> Spot | None:
        """A block that is in DRAM. About 3 us."""
        fingerprint, one, two = _places(key, self._buckets)
        for start in (one, two):
            for word in self._words[start : start + WAYS].tolist():
                if word >> 32 == fingerprint and word & _SLOT_MASK:
                    slot = (word & _SLOT_MASK) - 1
                    header = self._memory.header_bytes(slot)
                    if header.startswith(key):
                        return Spot(slot, header, bool(word & _TRANSIENT))
        return None

    def still(self, spot: Spot) -> bool:
        """Whether nothing was written to its slot since it was found. Ask after the last byte was copied."""
        return self._memory.header_bytes(spot.slot) == spot.header

    def run(self, keys: Sequence[BlockKey]) -> Spots:
        """The leading run of `keys` that is resident. About 40 us for 256 keys."""
        rows: Words = np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, KEY_SIZE // 8)
        fingerprints, places = _places_of(rows, self._factor)
        words = self._table.take(places, mode="clip")
        ways = ((words >> _32) == fingerprints[:, None]).argmax(axis=1)
        word = words[np.arange(len(rows)), ways]
        slots = (word & _SLOT_WORD).astype(np.int64) - 1
        headers = self._memory.headers.take(slots, axis=0, mode="clip")
        listed = (word >> _32 == fingerprints) & (word != 0)
        in_dram = listed & (headers[:, : KEY_SIZE // 8] == rows).all(axis=1) & (slots >= 0)
        resident = in_dram | (listed & (slots < 0))
        count = _leading(resident)
        sure = count == len(keys) or (not listed[count] and not self._head[_UNLISTED_AT])
        return Spots(count, min(count, _leading(in_dram)), bool(sure), slots, headers)

    def still_run(self, spots: Spots, count: int) -> int:
        """How many of the first `count` blocks are in their slots as they were found: `still`, leading."""
        same = (self._memory.headers[spots.slots[:count]] == spots.rows[:count]).all(axis=1)
        return _leading(same)


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())
