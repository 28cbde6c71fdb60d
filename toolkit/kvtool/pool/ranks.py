"""The ranks as one client knows them: from the state file, under an epoch, renewed when an answer shows another.

The state file is looked at again when a reply carries another epoch, when a rank cannot be used, and at most four
times a second. So a restarted pool, at other addresses, is found by the clients of the old one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from kvtool.errors import KvtoolError, PoolUnavailable
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.kv.placement import Member, Placement
from kvtool.pool.access import Access, UcxDoor
from kvtool.pool.outside import Outside
from kvtool.pool.state import PoolState

log = logging.getLogger("kvtool.pool")

LOOK_S = 0.25


class Ranks:
    """Live ranks and who owns which key. Thread-safe."""

    def __init__(self, outside: Outside, layout: KVLayout, name: str) -> None:
        """
        Raises:
            Refused: the pool that runs there holds another KV layout; both are in the sentence.
        """
        self._outside, self.now_s = outside, outside.now_s
        self.door = UcxDoor(name, layout)
        self._lock = threading.Lock()
        self._accesses: dict[int, Access] = {}
        self._placement = Placement(0, [])
        self._looked_s = -LOOK_S
        self._stale = True
        try:
            state = outside.look()
        except PoolUnavailable:
            return  # it may start later
        if state is not None:
            self._looked_s, self._stale = self.now_s(), False
            self._adopt(state)

    def all(self) -> list[Access]:
        return list(self._accesses.values())

    @property
    def epoch(self) -> int:
        return self._placement.epoch

    def split(self, keys: Sequence[BlockKey]) -> list[tuple[Access | None, list[int]]]:
        """Each rank that should hold some of `keys`, with their positions, ascending; None when no rank is live."""
        self.refresh()
        with self._lock:
            placement, accesses = self._placement, self._accesses
        parts = placement.split(keys)
        if not parts and keys:
            return [(None, list(range(len(keys))))]
        return [(accesses.get(rank), positions) for rank, positions in parts]

    def saw_epoch(self, epoch: int) -> None:
        if epoch != self._placement.epoch:
            self._stale = True

    def lost(self) -> None:
        """A rank could not be used: the file may know why."""
        self._stale = True

    def refresh(self) -> None:
        """Look for the pool's state again if there is reason to."""
        now_s = self.now_s()
        if not self._stale or now_s - self._looked_s < LOOK_S:
            return
        with self._lock:
            self._looked_s = now_s
            try:
                state = self._outside.look()
            except (OSError, KvtoolError) as error:
                log.debug("no pool state why=%r", str(error))
                return  # stale still: look again soon
            if state is None:
                self._stale = any(not access.link.usable for access in self._accesses.values())
            else:
                self._stale = False
                self._adopt(state)

    def _adopt(self, state: PoolState) -> None:
        """Keep the links to processes that are still in it, open those to new ones, close the rest."""
        kept: dict[int, Access] = {}
        for rank in state.ranks:
            if not rank.alive:
                continue
            known = self._accesses.get(rank.rank)
            if known is not None and (known.state.pid, known.state.started) == (rank.pid, rank.started):
                kept[rank.rank] = known
                continue
            kept[rank.rank] = self._outside.access(rank, bytes.fromhex(state.key), self.door, self.saw_epoch)
        gone = [access for rank, access in self._accesses.items() if kept.get(rank) is not access]
        self._accesses = kept
        self._placement = Placement(
            state.epoch, [Member(a.state.rank, a.state.identity, a.state.weight) for a in kept.values()]
        )
        for access in gone:
            access.close()
        log.info("pool known epoch=%d ranks=%d file=%r", state.epoch, len(kept), self._outside.where)

    def close(self) -> None:
        for access in self.all():
            access.close()
        self.door.close()
