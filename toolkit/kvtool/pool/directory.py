"""The directory of a rank: which block is in which slot, in shared memory, for those who map it.

A client on the same node that has a rank's segment mapped finds blocks here without a message: the rank alone writes,
any number of clients read, and nobody locks. What it says is a hint; the slot's header (`pool.memory`) says whose bytes
are really there, and the block's checksum says whether they are whole.

    [words of the head, one page][bucket 0][bucket 1]...     behind the slots; 8 words a bucket, one cache line

    head    magic, buckets, incarnation of the rank, heartbeat (ns on the node's monotonic clock), blocks not listed,
            epoch of the pool, 1 where a put of what is there must ask the rank all the same
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
_MAGIC_AT, _BUCKETS_AT, _INCARNATION_AT, _BEAT_AT, _UNLISTED_AT, _EPOCH_AT, _ASK_AT = range(7)
_HEAD_WORDS = PAGE // 8
_SLOT_MASK, _TRANSIENT, _FILED = 2**30 - 1, 1 << 30, 1 << 31
_MASK = 2**64 - 1
_MIX = (
    (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    (0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD, 0xA0761D6478BD642F),
    (0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3),
    (0x1D8E4E27C47D124F, 0xEB44ACCAB455D165, 0x9FB21C651E98DF25),
)
"""Odd factors of the key's four words, for the fingerprint and each bucket: keys are hashes themselves, and need no
more than to be folded."""
_MIX_PRINT = np.array(_MIX, dtype=np.uint64)[:, :1].copy()
_MIX_BUCKETS = np.array(_MIX, dtype=np.uint64)[:, 1:].copy()
_32, _SLOT_WORD, _FILED_WORD = np.uint64(32), np.uint64(_SLOT_MASK), np.uint64(_FILED)
_NOTHING, _ALL_FOUR = np.uint64(0), np.uint32(0x01010101)
_KEY = struct.Struct("<QQQQ")

Words = npt.NDArray[np.uint64]


def _places(key: BlockKey, buckets: int) -> tuple[int, int, int]:
    """(fingerprint, first word of each of the two buckets), words counted behind the head."""
    a, b, c, d = _KEY.unpack(key)
    (a0, a1, a2), (b0, b1, b2), (c0, c1, c2), (d0, d1, d2) = _MIX
    return (
        ((a * a0 + b * b0 + c * c0 + d * d0) & _MASK) >> 32,
        (((a * a1 + b * b1 + c * c1 + d * d1) & _MASK) >> 32) * buckets // 2**32 * WAYS,
        (((a * a2 + b * b2 + c * c2 + d * d2) & _MASK) >> 32) * buckets // 2**32 * WAYS,
    )


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

    def __init__(self, view: memoryview, entries: int, incarnation: int = 0, ask: bool = False) -> None:
        """`ask`: a put of a block that is there has still something to do, such as to write it to its file."""
        self._words = view[: directory_size(entries)].cast("Q")
        self._buckets = buckets_for(entries)
        self._unlisted: set[BlockKey] = set()
        self._words[_BUCKETS_AT], self._words[_INCARNATION_AT] = self._buckets, incarnation
        self._words[_ASK_AT] = ask
        self._words[_MAGIC_AT] = MAGIC

    @property
    def unlisted(self) -> int:
        """Blocks that are there and not listed."""
        return len(self._unlisted)

    def beat(self, now_s: float, epoch: int = 0) -> None:
        """The rank is alive at `now_s`, in a pool of this epoch. Call at least every `TRUST_S` / 3."""
        self._words[_EPOCH_AT] = epoch
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
    """Some keys, as found. `there`: which are resident, the leading `count` of them; `sure`: the one behind those is
    not, and `all_sure`: none of the others is. Those that are `in_dram` stand in `slots` under the headers `rows`."""

    there: npt.NDArray[np.bool_]
    count: int
    sure: bool
    unlisted: int
    in_dram: npt.NDArray[np.bool_]
    slots: npt.NDArray[np.int64]
    rows: Words
    words: Words

    @property
    def all_sure(self) -> bool:
        return not (self.unlisted or self.words[~self.there].any())

    @property
    def transient(self) -> npt.NDArray[np.bool_]:
        flags: npt.NDArray[np.bool_] = (self.words & np.uint64(_TRANSIENT)) != 0
        return flags


class DirectoryReader:
    """A client's side. `view`: the region behind the slots of `memory`, mapped. Thread-safe, and never waits."""

    def __init__(self, view: memoryview, memory: SlotMemory, incarnation: int = 0) -> None:
        """
        Raises:
            ProtocolError: no directory there, or that of another incarnation of the rank.
        """
        self._memory = memory
        self._head = view[:PAGE].cast("Q")
        buckets = self._head[_BUCKETS_AT] if len(view) > PAGE else 0
        if not buckets or self._head[_MAGIC_AT] != MAGIC or not 0 < buckets * WAYS * 8 <= len(view) - PAGE:
            raise ProtocolError("no directory in the rank's memory that this kvtool can read; restart the pool with it")
        if self._head[_INCARNATION_AT] != incarnation:
            raise ProtocolError(
                f"the directory is that of incarnation {self._head[_INCARNATION_AT]} of the rank, wanted {incarnation}"
            )
        self._buckets, self._factor = buckets, np.uint64(buckets)
        self._words = view[PAGE : PAGE + buckets * WAYS * 8].cast("Q")
        self._table: Words = np.frombuffer(self._words, dtype=np.uint64).reshape(buckets, WAYS)

    @property
    def epoch(self) -> int:
        return int(self._head[_EPOCH_AT])

    @property
    def ask(self) -> bool:
        return bool(self._head[_ASK_AT])

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

    def look(self, keys: Sequence[BlockKey]) -> Spots:
        """Where `keys` are, all at once. About 40 us for 256."""
        rows: Words = np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, KEY_SIZE // 8)
        fingerprints = (rows @ _MIX_PRINT) >> _32
        buckets = (((rows @ _MIX_BUCKETS) >> _32) * self._factor) >> _32
        found = self._table.take(buckets.view(np.int64), axis=0, mode="clip").reshape(-1, 2 * WAYS)
        same = found.view(np.uint32)[:, 1::2] == fingerprints.astype(np.uint32)
        at = same.argmax(axis=1) + np.arange(0, same.size, 2 * WAYS)
        words = found.ravel().take(at) * same.ravel().take(at)
        slots = (words & _SLOT_WORD).view(np.int64) - 1
        headers = self._memory.headers.take(slots, axis=0, mode="clip")
        in_dram = ((headers[:, : KEY_SIZE // 8] == rows).view(np.uint32).ravel() == _ALL_FOUR) & (slots >= 0)
        there = in_dram | ((words & _FILED_WORD) != _NOTHING)
        end = int(there.argmin())
        count = len(keys) if there[end] else end
        unlisted = self._head[_UNLISTED_AT]
        sure = count == len(keys) or not (words[count] or unlisted)
        return Spots(there, count, bool(sure), unlisted, in_dram, slots, headers, words)

    def same(self, slot: int, row: Words) -> bool:
        """`still`, for a block of `look`."""
        return self._memory.header_bytes(slot) == row.tobytes()
