"""A rank on the same node, used without a message: its blocks found in its directory and copied under the reader's half
of a seqlock (`pool.directory`), several at a time, by two threads where that pays.

What cannot be vouched for here is left to the rank: blocks that are only in its files, a header that changed while the
bytes were copied, a checksum that does not fit. So nothing here is ever the reason of a miss, only a quicker way to a
hit; and nothing here can be a wrong hit, as copies are checked against key and checksum.

The rank must hear which blocks are used, or it would evict the wrong ones. Uses are collected and told in one message
without an answer, once there are `USES_MAX` or the oldest is `USES_S` old; what a client did last before it fell silent
is not told, which makes these blocks look a little older than they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvtool.errors import ProtocolError
from kvtool.kv.block import BlockKey
from kvtool.pool.base import Got, Path, Tier
from kvtool.pool.buffers import Room
from kvtool.pool.directory import DirectoryReader, Spot, Spots
from kvtool.pool.halves import in_halves
from kvtool.pool.memory import SlotMemory
from kvtool.transfer.checksum import checksum

USES_MAX, USES_S = 256, 0.02
FEW = 6
"""Up to here one look a key is quicker than one look for all."""


class Nearby:
    """`memory`: the rank's slots, mapped for reading, and `region` what is behind them. `tell`: sends uses to the rank;
    must not wait long. Thread-safe."""

    def __init__(
        self,
        memory: SlotMemory,
        region: memoryview,
        incarnation: int,
        now_s: Callable[[], float],
        tell: Callable[[Sequence[tuple[int, int]]], None],
    ) -> None:
        """
        Raises:
            ProtocolError: no directory is there, or that of another incarnation.
        """
        self._memory, self._now_s, self._tell = memory, now_s, tell
        self.generations = memory.generations
        self._directory = DirectoryReader(region, memory, incarnation)
        self._lock = threading.Lock()
        self._uses: list[tuple[int, int]] = []
        self._uses_since_s = 0.0

    @property
    def epoch(self) -> int:
        """Of the pool, as the rank last knew it."""
        return self._directory.epoch

    @property
    def ask(self) -> bool:
        """Puts must be the rank's business from the start: it writes through."""
        return self._directory.ask

    def match(self, keys: Sequence[BlockKey]) -> int | None:
        """How many leading `keys` are resident there; None: the rank must be asked."""
        if not keys or not self._directory.trusted(self._now_s()):
            return None
        if len(keys) == 1 and self._directory.find(keys[0]) is not None:
            return 1
        spots = self._directory.look(keys)
        return spots.count if spots.sure else None

    def has(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """Which of `keys` are resident there; None: the rank must be asked."""
        if not keys or not self._directory.trusted(self._now_s()):
            return None
        spots = self._directory.look(keys)
        flags: list[bool] = spots.there.tolist()
        return flags if spots.all_sure else None

    def holds(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of `keys` are in DRAM, and there to stay: no put of them has anything to do. Counts as a use."""
        if self._directory.ask or not self._directory.trusted(self._now_s()):
            return [False] * len(keys)
        if len(keys) <= FEW:
            spots = [self._directory.find(key) for key in keys]
            there = [spot is not None and not spot.transient for spot in spots]
            self._used([(s.slot, s.facts[0]) for s in spots if s is not None and not s.transient])
            return there
        found = self._directory.look(keys)
        lasting = found.in_dram & ~found.transient
        self._used(_uses(found, np.flatnonzero(lasting)))
        flags: list[bool] = lasting.tolist()
        return flags

    def get(self, keys: Sequence[BlockKey], rooms: Sequence[Room], leading: bool) -> Sequence[Got | None]:
        """Copy what is in DRAM into `rooms`; None where the rank must be asked. `leading`: only the run from the first,
        and the answer may be shorter than `keys`."""
        if not self._directory.trusted(self._now_s()):
            return ()
        if len(keys) <= FEW:
            return self._get_few(keys, rooms, leading)
        spots = self._directory.look(keys)
        end = len(keys)
        if leading and not spots.in_dram.all():
            end = int(spots.in_dram.argmin())
        chosen = [at for at, there in enumerate(spots.in_dram[:end].tolist()) if there]
        got: list[Got | None] = [None] * end
        self._copy(keys, rooms, spots, chosen, got)
        copied = [at for at in chosen if got[at] is not None]
        self._used(_uses(spots, np.array(copied[::-1], dtype=np.int64)))  # the first of a prefix is the last to go
        return got

    def get_one(self, key: BlockKey, room: Room) -> Got | None:
        """`get`, for a block that comes alone."""
        spot = self._directory.find(key) if self._directory.trusted(self._now_s()) else None
        got = None if spot is None else self._get_one(key, room, spot)
        if got is not None and spot is not None:
            self._used([(spot.slot, spot.facts[0])])
        return got

    def views(
        self, keys: Sequence[BlockKey], whole: bool, lease: Callable[[Sequence[tuple[int, int]]], None]
    ) -> list[tuple[int, int, memoryview]] | None:
        """(slot, generation, bytes) of the leading run of `keys`, checked and in place; None: the rank must be asked.
        `whole`: only if it is all of them. `lease` is told before they are looked at, and keeps them where they are.

        Raises:
            Unavailable: from `lease`.
        """
        if not keys or not self._directory.trusted(self._now_s()):
            return None
        spots = self._directory.look(keys)
        count = spots.count
        if not spots.sure or not spots.in_dram[:count].all() or (whole and count < len(keys)):
            return None
        slots, facts = spots.slots[:count].tolist(), spots.rows[:count, 4:7].tolist()
        if not count:
            return []
        lease([(slot, generation) for slot, (generation, _, _) in zip(slots, facts, strict=True)])
        found = []
        for at, (slot, (generation, length, wanted)) in enumerate(zip(slots, facts, strict=True)):
            data = self._memory.slot(slot, min(length, self._memory.slot_size)).toreadonly()
            if checksum(data, keys[at]) != wanted or not self._directory.same(slot, spots.rows[at]):
                return None
            found.append((slot, generation, data))
        return found

    def flush(self) -> None:
        """Tell the rank of the uses so far."""
        with self._lock:
            uses, self._uses = self._uses, []
        if uses:
            self._tell(uses)

    # How

    def _get_few(self, keys: Sequence[BlockKey], rooms: Sequence[Room], leading: bool) -> list[Got | None]:
        got: list[Got | None] = []
        uses = []
        for key, room in zip(keys, rooms, strict=True):
            spot = self._directory.find(key)
            one = None if spot is None else self._get_one(key, room, spot)
            if one is None and leading:
                break
            got.append(one)
            if spot is not None and one is not None:
                uses.append((spot.slot, spot.facts[0]))
        self._used(uses[::-1])
        return got

    def _get_one(self, key: BlockKey, room: Room, spot: Spot) -> Got | None:
        _, length, wanted = spot.facts
        if not 0 < length <= min(room.size, self._memory.slot_size):
            return None
        found = room.fill(self._memory.slot(spot.slot, length), key)
        if found != wanted or not self._directory.still(spot):
            return None
        return Got(length, Tier.DRAM, Path.SHM)

    def _copy(
        self, keys: Sequence[BlockKey], rooms: Sequence[Room], spots: Spots, chosen: list[int], got: list[Got | None]
    ) -> None:
        """Into `got`, at the positions `chosen`."""
        size = len(chosen) * self._memory.slot_size
        in_halves(chosen, size, lambda some: self._copy_some(keys, rooms, spots, some, got))

    def _copy_some(
        self,
        keys: Sequence[BlockKey],
        rooms: Sequence[Room],
        spots: Spots,
        chosen: Sequence[int],
        got: list[Got | None],
    ) -> None:
        if not chosen:
            return
        facts = spots.rows[list(chosen), 4:7].tolist()
        for at, slot, (_, length, wanted) in zip(chosen, spots.slots[list(chosen)].tolist(), facts, strict=True):
            room = rooms[at]
            if 0 < length <= min(room.size, self._memory.slot_size):
                found = room.fill(self._memory.slot(slot, length), keys[at])
                if found == wanted and self._directory.same(slot, spots.rows[at]):
                    got[at] = Got(length, Tier.DRAM, Path.SHM)

    def _used(self, uses: Sequence[tuple[int, int]]) -> None:
        if not uses:
            return
        now_s = self._now_s()
        with self._lock:
            if not self._uses:
                self._uses_since_s = now_s
            self._uses += uses
            due = len(self._uses) >= USES_MAX or now_s - self._uses_since_s >= USES_S
        if due:
            self.flush()


def _uses(spots: Spots, positions: np.ndarray) -> list[tuple[int, int]]:  # type: ignore[type-arg]
    return list(zip(spots.slots[positions].tolist(), spots.rows[positions, 4].tolist(), strict=True))


def nearby(
    memory: SlotMemory,
    region: memoryview,
    incarnation: int,
    now_s: Callable[[], float],
    tell: Callable[[Sequence[tuple[int, int]]], None],
) -> Nearby | None:
    """None where the rank has no directory that can be read."""
    try:
        return Nearby(memory, region, incarnation, now_s, tell)
    except ProtocolError:
        return None
