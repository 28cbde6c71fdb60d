"""The ranks as one client knows them: from the state file, under an epoch, renewed when an answer shows another; and
the route of a batch of keys through their owners.

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
from kvtool.kv.placement import Placement
from kvtool.pool.access import Access, UcxDoor
from kvtool.pool.hints import Hints
from kvtool.pool.outside import Outside
from kvtool.pool.state import PoolState
from kvtool.pool.wire import join_keys

log = logging.getLogger("kvtool.pool")

LOOK_S = 0.25

Share = tuple[Access | None, list[int]]
"""A rank, and the positions in a batch that it is asked about, ascending; None: no rank can be asked."""


class Ranks:
    """Live ranks and who owns which key. Thread-safe."""

    def __init__(self, outside: Outside, layout: KVLayout, name: str, eager: bool = True) -> None:
        """`eager`: look for the pool at once.

        Raises:
            Refused: the pool that runs there holds another KV layout; both are in the sentence.
        """
        self._outside, self.now_s = outside, outside.now_s
        self.door = UcxDoor(name, layout, outside.staging_size)
        self._lock = threading.Lock()
        self._accesses: dict[int, Access] = {}
        self._placement = Placement(0, [])
        self.hints = Hints()
        self.term_s, self.copies = 10.0, 1
        self.namespaces: dict[str, int] = {}
        self._looked_s = -LOOK_S
        self._stale = True
        if not eager:
            return
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

    def split(self, keys: Sequence[BlockKey]) -> list[Share]:
        """Each rank that should hold some of `keys`, with their positions, ascending; None when no rank is live."""
        self.refresh()
        with self._lock:
            placement, accesses = self._placement, self._accesses
        parts = placement.split(keys)
        if not parts and keys:
            return [(None, list(range(len(keys))))]
        return [(accesses.get(rank), positions) for rank, positions in parts]

    def simple(self, reading: bool) -> bool:
        """Whether each key has one rank to ask, and that is its owner."""
        self.refresh()
        return self.copies <= 1 and (not reading or (self._placement.elders is None and not self.hints))

    def orders(self, keys: Sequence[BlockKey], reading: bool) -> list[list[Access]]:
        """Whom to ask about each key. To read: a rank that is hinted at, its owners, the nearest first, and whoever
        was its owner of late. To write: its owners, in the order of placement."""
        self.refresh()
        with self._lock:
            placement, accesses, copies = self._placement, self._accesses, self.copies
        made: dict[tuple[int, ...], list[Access]] = {}
        found, now_s = [], self.now_s()
        candidates = placement.readers_of_all(keys, copies) if reading else placement.owners_of_all(keys, copies)
        for key, ranks in zip(keys, candidates, strict=True):
            order = made.get(ranks)
            if order is None:
                order = made[ranks] = [accesses[rank] for rank in ranks if rank in accesses]
                if reading and copies > 1:
                    order[:copies] = sorted(order[:copies], key=_near)
            near = self.hints.rank_near(key, now_s) if reading and self.hints else None
            hinted = None if near is None else accesses.get(near)
            if hinted is not None:
                order = [hinted, *(access for access in order if access is not hinted)]
            found.append(order)
        return found

    def named(self, name: int | str) -> Access | None:
        """The live rank of that number or identity."""
        self.refresh()
        return next((a for a in self.all() if name in (a.state.rank, a.state.identity)), None)

    def breakers(self) -> tuple[dict[str, str], dict[str, int]]:
        """What is not asked now, and how often each was so."""
        states, breaks, now_s = {}, {}, self.now_s()
        for access in self.all():
            name = access.state.identity
            if access.link.broken:
                states[name] = "open"
            breaks[name] = access.link.breaks
            for kind, breaker in (("ucx", access.transfers), ("file", access.files)):
                if (state := breaker.state(now_s)) != "closed":
                    states[f"{name} {kind}"] = state
                breaks[f"{name} {kind}"] = breaker.breaks
        return states, {name: count for name, count in breaks.items() if count}

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
                known.state = known.link.state = rank  # its weight, or the incarnation that it goes on under
                kept[rank.rank] = known
                continue
            kept[rank.rank] = self._outside.access(rank, bytes.fromhex(state.key), self.door, self.saw_epoch)
        gone = [access for rank, access in self._accesses.items() if kept.get(rank) is not access]
        self._accesses = kept
        self.term_s, self.copies, self.namespaces = state.lease_term_s, max(1, state.copies), state.namespaces
        self._placement = state.placement()
        for access in gone:
            access.close()
        log.info("pool known epoch=%d ranks=%d file=%r", state.epoch, len(kept), self._outside.where)

    def close(self) -> None:
        for access in self.all():
            access.close()
        self.door.close()

    def abandon(self) -> None:
        """In a child process: let go of the parent's connections, and say nothing to anybody."""
        for access in self.all():
            access.link.abandon()


def _near(access: Access) -> tuple[bool, bool, int]:
    """Who to read from first: who can be asked at all, whose memory is mapped, who has least to do for us."""
    return not access.link.usable, access.link.ucx, access.link.asked


class Route:
    """Whom to ask about each key of a batch, one owner after the other. `at`: that rank and nobody else. `simple`:
    there is one rank to ask about each."""

    def __init__(
        self, ranks: Ranks, keys: Sequence[BlockKey], at: int | str | None = None, reading: bool = True
    ) -> None:
        """
        Raises:
            ValueError: something among `keys` is no key.
        """
        join_keys(keys)
        self._orders: list[list[Access]] | None = None
        self._turns: list[int] = []
        self._first: list[Share] = []
        if at is not None:
            self._first = [(ranks.named(at), list(range(len(keys))))]
        elif ranks.simple(reading):
            self._first = ranks.split(keys)
        else:
            self._orders, self._turns = ranks.orders(keys, reading), [0] * len(keys)

    @property
    def simple(self) -> bool:
        return self._orders is None

    def first(self) -> list[Share]:
        if self._orders is None:
            return self._first
        positions = range(len(self._orders))
        nobody = [position for position in positions if not self._orders[position]]
        return self.next(positions) + ([(None, nobody)] if nobody else [])

    def next(self, positions: Sequence[int]) -> list[Share]:
        """The next owner of each of `positions` that has one more."""
        shares: dict[int, tuple[Access, list[int]]] = {}
        if self._orders is not None:
            for position in positions:
                order, turn = self._orders[position], self._turns[position]
                if turn < len(order):
                    self._turns[position] = turn + 1
                    shares.setdefault(id(order[turn]), (order[turn], []))[1].append(position)
        return list(shares.values())

    def back(self, positions: Sequence[int]) -> None:
        """What `next` gave for `positions` last was not used after all."""
        for position in positions:
            self._turns[position] -= 1

    def more(self, position: int) -> bool:
        return self._orders is not None and self._turns[position] < len(self._orders[position])
