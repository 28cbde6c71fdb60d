"""The copier: what a rank's rules of replication want, done by its mover.

Tells the rules which blocks came and who is there, hands copies to the mover with a lease on what they read, and hands
back what came of them. All of it on the rank's loop; only the mover is elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvtool.kv.block import BlockKey
from kvtool.kv.copying import Copy, CopyOf, Outcome, Why
from kvtool.kv.hot import HotBlocks, Near
from kvtool.kv.record import Holding
from kvtool.kv.replicate import Replicator
from kvtool.kv.source import Source
from kvtool.pool import wire
from kvtool.pool.loop import Connection
from kvtool.pool.mover import Mover
from kvtool.pool.state import PoolState, RankState
from kvtool.pool.tiers import Event, Tiers
from kvtool.pool.wire import Message

log = logging.getLogger("kvtool.pool")

OWNER = 0
"""Of the leases under which blocks are copied; clients count from 1."""


class Copier:
    """`post` has an event of the tiers happen on the loop; `sender` says whose copies a client puts, if it does."""

    def __init__(
        self,
        rules: Replicator,
        tiers: Tiers,
        mover: Mover,
        post: Callable[[Event], None],
        sender: Callable[[int], int | None],
    ) -> None:
        self.rules, self.mover = rules, mover
        self._tiers, self._store, self._post, self._sender = tiers, tiers.store, post, sender
        self._state: PoolState | None = None
        self._ranks: dict[int, RankState] = {}
        self._host = ""
        self.hot = HotBlocks()
        tiers.arrivals = []

    def view(self, state: PoolState, now_s: float) -> None:
        """The pool as it is now."""
        self._state = state
        self._ranks = {rank.rank: rank for rank in state.ranks if rank.alive}
        mine = self._ranks.get(self.rules.rank)
        self._host = "" if mine is None else mine.host
        placement = state.placement()
        self.hot.view(state.epoch, placement.members, {rank.rank: rank.host for rank in self._ranks.values()})
        self.rules.view(placement, {rank.rank: rank.incarnation for rank in self._ranks.values()}, now_s)

    def tick(self, now_s: float, busy: bool) -> float | None:
        """Take in what came, and begin what may go now; when to come again."""
        arrivals = self._tiers.arrivals
        if arrivals:
            self._tiers.arrivals = []
            self._entered(arrivals, now_s)
        elif self.rules.idle:
            return None
        for copy in self.rules.pump(now_s, busy):
            self._begin(copy, now_s)
        return self.rules.next_due_s(now_s, busy)

    def announced(self, connection: Connection, message: Message, now_s: float) -> None:
        """What a connection puts from here on are copies of another rank's."""
        connection.copies_for = wire.unpack_copying(message.body)

    def elsewhere(self, host: str) -> bool:
        """Whether that is another host than this rank's."""
        return host not in ("", self._host)

    def read(self, host: str, blocks: Sequence[CopyOf], now_s: float) -> list[Near]:
        """Somebody on `host` was given `blocks`: which of them are nearer to him, by position. Those that he and
        others there read often are copied there."""
        if not self.elsewhere(host):
            return []
        keys, lengths = [block.key for block in blocks], {block.key: block.length for block in blocks}
        for key, rank in self.hot.read(host, keys, now_s):
            self.rules.near(CopyOf(key, lengths[key], self.hot.limits.ttl_s), rank, now_s)
        return self.hot.hints(host, keys, now_s)

    def close(self) -> None:
        self.mover.close()

    def status(self) -> dict[str, Any]:
        """What is owed to other ranks; all 0 when every block is where it belongs, as often as it is wanted."""
        rules = self.rules
        left = rules.left + len(self._tiers.arrivals or ())
        return {
            "owed": rules.outbox.pending,
            "flying": rules.outbox.flying,
            "flying_bytes": rules.outbox.bytes_flying,
            "homeless": rules.homeless,
            "left": left,
            "leaving": rules.leaving,
            "empty": rules.leaving and left == 0,
            "near": self.hot.near,
            "counts": asdict(rules.counts),
        }

    def audit(self, now_s: float) -> list[Holding]:
        """Copies in flight, each bounded by the mover's budget, and those near readers elsewhere, by their time."""
        held = []
        if flights := self.rules.outbox.flights():
            oldest_s = min(since_s for _, since_s in flights)
            held.append(Holding("copy", sum(len(copy.blocks) for copy, _ in flights), OWNER, now_s - oldest_s))
        if near := self.hot.left_s(now_s):
            held.append(Holding("near copy", len(near), OWNER, self.hot.limits.ttl_s - min(near), min(near)))
        return held

    # How

    def _entered(self, keys: Sequence[BlockKey], now_s: float) -> None:
        by_sender: dict[int | None, list[BlockKey]] = {}
        for key in keys:
            by_sender.setdefault(self._sender(self._store.writer(key)), []).append(key)
        for sender, theirs in by_sender.items():
            self.rules.entered(self._store.wanted(theirs), now_s, sender)

    def _begin(self, copy: Copy, now_s: float) -> None:
        read = (OWNER, copy.number)
        sources: Sequence[Source | None] = self._store.lend(read, [block.key for block in copy.blocks], now_s)
        to = self._ranks.get(copy.to)
        if to is None or self._state is None or not any(sources):
            self._ended(copy, [Outcome.GONE] * len(sources), now_s)
            return

        def done(outcomes: list[Outcome]) -> None:
            def event(now_s: float) -> list[Any]:
                self._ended(copy, outcomes, now_s, sources)
                return []

            self._post(event)

        self.mover.submit(copy, sources, self._state, to, done)

    def _ended(
        self, copy: Copy, outcomes: Sequence[Outcome], now_s: float, sources: Sequence[Source | None] = ()
    ) -> None:
        read = (OWNER, copy.number)
        held = self._store.leases.has(read) and self._store.release(read, now_s)
        for source, outcome in zip(sources, outcomes, strict=False):
            if outcome is Outcome.DAMAGED and source is not None:
                self._damaged(source, held, now_s)
        self.rules.ended(copy, outcomes, now_s)
        if copy.why is Why.NEAR:
            for block, outcome in zip(copy.blocks, outcomes, strict=True):
                self.hot.copied(block.key, copy.to, outcome in (Outcome.STORED, Outcome.THERE), now_s)

    def _damaged(self, source: Source, held: bool, now_s: float) -> None:
        """The mover found bytes that are not the block's. `held`: its lease lasted, so nobody had written over them."""
        if source.slot < 0:
            self._store.file_damaged(source.key, source.file_slot, source.record, now_s)
        elif held and self._store.corrupt(source.key, source.slot, source.generation, now_s):
            log.warning("corrupt block found by its copy key=%s slot=%d", source.key.hex()[:16], source.slot)
