"""Outbox: blocks that are owed to other ranks, and which of them go now.

Bounded in blocks and bytes in flight, in bytes a second and in how many may wait; one batch a rank at a time, the most
urgent first, ranks in turn. A rank that does not answer is tried again ever more slowly, its blocks given up one by one
in the end. A block is owed to a rank once, however often anybody asks for it.

Pure rules: time is an argument, `Copy` goes out, and what came of it comes back by `ended`.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from kvtool.kv.block import BlockKey
from kvtool.kv.copying import Copy, CopyCounts, CopyLimits, CopyOf, Outcome, Why


@dataclass(slots=True)
class Owed:
    """One block owed to one rank."""

    block: CopyOf
    why: Why
    tries: int = 0


@dataclass
class _Target:
    """Another rank. A key is in one of `queues`, in `later` or in `flying`."""

    queues: tuple[dict[BlockKey, Owed], ...] = field(default_factory=lambda: tuple({} for _ in Why))
    later: dict[BlockKey, Owed] = field(default_factory=dict)
    flying: dict[BlockKey, Owed] = field(default_factory=dict)
    not_before_s: float = 0.0
    failures: int = 0

    def owes(self, key: BlockKey) -> bool:
        return key in self.later or key in self.flying or any(key in queue for queue in self.queues)

    @property
    def count(self) -> int:
        return sum(map(len, self.queues)) + len(self.later)

    def first(self) -> dict[BlockKey, Owed] | None:
        """The most urgent queue that has something in it."""
        return next((queue for queue in self.queues if queue), None)


class Outbox:
    """What one rank owes to all others. `counts` is shared with whoever reports them."""

    def __init__(self, limits: CopyLimits, counts: CopyCounts) -> None:
        self.limits, self.counts = limits, counts
        self.pending = self.flying = self.bytes_flying = 0
        """Blocks that wait, and blocks and bytes that are in flight."""
        self._targets: dict[int, _Target] = {}
        self._flights: dict[int, tuple[Copy, float]] = {}
        self._later: list[tuple[float, int, BlockKey]] = []  # (due, rank, key)
        self._number = 0
        self._paced_until_s = self._trickled_s = float("-inf")

    @property
    def empty(self) -> bool:
        return not self.pending and not self._flights

    @property
    def room(self) -> int:
        """How many blocks more may be owed; those in flight may come back."""
        return self.limits.pending_max - self.pending - self.flying

    def flights(self) -> list[tuple[Copy, float]]:
        """Everything in flight, with the time it left."""
        return list(self._flights.values())

    def keep(self, ranks: Container[int]) -> None:
        """Nothing is owed to others than `ranks` any more."""
        for rank in [rank for rank in self._targets if rank not in ranks]:
            self.pending -= self._targets.pop(rank).count

    def owe(self, rank: int, block: CopyOf, why: Why, now_s: float, due_s: float = 0.0) -> bool:
        """Have `block` go to `rank`, not before `due_s`. False when too many wait already."""
        target = self._targets.setdefault(rank, _Target())
        if target.owes(block.key):
            return True
        if self.room <= 0:
            self.counts.overflowed += 1
            return False
        self.pending += 1
        self._wait(rank, target, Owed(block, why), due_s, now_s)
        return True

    def ended(self, number: int, outcomes: Sequence[Outcome], now_s: float) -> list[tuple[Owed, Outcome]]:
        """A `Copy` ended; those of its blocks that will not be tried again, and why. Empty for a rank that is gone."""
        copy, _ = self._flights.pop(number)
        self.bytes_flying -= sum(block.length for block in copy.blocks)
        self.flying -= len(copy.blocks)
        target, over = self._targets.get(copy.to), []
        for block, outcome in zip(copy.blocks, outcomes, strict=True):
            self._count(block, outcome)
            owed = target.flying.pop(block.key, None) if target is not None else None
            if target is None or owed is None:
                continue
            if outcome is not Outcome.RETRY or not self._again(copy.to, target, owed, now_s):
                over.append((owed, outcome))
        if target is not None:
            failed = all(outcome is Outcome.RETRY for outcome in outcomes)
            target.failures = target.failures + 1 if failed else 0
            target.not_before_s = now_s + self._backoff(target.failures) if failed else 0.0
        return over

    def pump(self, now_s: float, busy: bool) -> list[Copy]:
        """What goes now. `busy`: foreground requests wait."""
        while self._later and self._later[0][0] <= now_s:
            _, rank, key = heapq.heappop(self._later)
            target = self._targets.get(rank)
            owed = target.later.pop(key, None) if target is not None else None
            if target is not None and owed is not None:
                target.queues[owed.why][key] = owed
        blocks_max = self.limits.batch_max
        if busy:
            if self._flights or now_s - self._trickled_s < self.limits.trickle_s:
                return []
            blocks_max = 1
        copies = []
        for rank, target in self._targets.items():
            copy = self._next(rank, target, blocks_max, now_s)
            if copy is not None:
                copies.append(copy)
                self._trickled_s = now_s
                if busy:
                    break
        for copy in copies:  # who was served goes to the end of the line
            self._targets[copy.to] = self._targets.pop(copy.to)
        return copies

    def next_due_s(self, now_s: float, busy: bool) -> float | None:
        """When `pump` has something to do next, unless an event comes before; None when there is nothing."""
        due = [self._later[0][0]] if self._later else []
        for target in self._targets.values():
            queue = target.first()
            if queue is not None and not target.flying and self._fits(next(iter(queue.values())).block.length):
                trickle_s = self._trickled_s + self.limits.trickle_s if busy else now_s
                due += [] if busy and self._flights else [max(trickle_s, target.not_before_s, self._paced_until_s)]
        return min(due, default=None)

    # How

    def _wait(self, rank: int, target: _Target, owed: Owed, due_s: float, now_s: float) -> None:
        key = owed.block.key
        if due_s > now_s:
            target.later[key] = owed
            heapq.heappush(self._later, (due_s, rank, key))
        else:
            target.queues[owed.why][key] = owed

    def _next(self, rank: int, target: _Target, blocks_max: int, now_s: float) -> Copy | None:
        """The next batch for one rank, if it may go now."""
        queue = target.first()
        if queue is None or target.flying or now_s < max(target.not_before_s, self._paced_until_s):
            return None
        blocks_max = min(blocks_max, self.limits.blocks_max - self.flying)
        taken: list[Owed] = []
        size = 0
        for owed in queue.values():
            length = owed.block.length
            over = self.bytes_flying + size + length > self.limits.bytes_max if taken else not self._fits(length)
            if len(taken) >= blocks_max or over:
                break
            taken.append(owed)
            size += length
        if not taken:
            return None
        for owed in taken:
            target.flying[owed.block.key] = queue.pop(owed.block.key)
        self.pending -= len(taken)
        self.bytes_flying += size
        self.flying += len(taken)
        self._paced_until_s = max(self._paced_until_s, now_s) + size / self.limits.rate
        self._number += 1
        copy = Copy(self._number, rank, taken[0].why, tuple(owed.block for owed in taken))
        self._flights[copy.number] = copy, now_s
        return copy

    def _fits(self, size: int) -> bool:
        """Whether so many bytes more may be in flight; the first block always may, however large."""
        limits = self.limits
        within = self.bytes_flying + size <= limits.bytes_max and self.flying < limits.blocks_max
        return within or not self._flights

    def _again(self, rank: int, target: _Target, owed: Owed, now_s: float) -> bool:
        owed.tries += 1
        if owed.tries >= self.limits.tries_max:
            self.counts.gave_up += 1
            return False
        self.pending += 1
        self._wait(rank, target, owed, now_s + self._backoff(owed.tries), now_s)
        return True

    def _backoff(self, tries: int) -> float:
        return min(self.limits.backoff_s * 2.0 ** min(tries, 20), self.limits.backoff_max_s)

    def _count(self, block: CopyOf, outcome: Outcome) -> None:
        counts = self.counts
        counts.stored += outcome is Outcome.STORED
        counts.there += outcome is Outcome.THERE
        counts.no_room += outcome is Outcome.NO_ROOM
        counts.gone += outcome is Outcome.GONE
        counts.damaged += outcome is Outcome.DAMAGED
        counts.retried += outcome is Outcome.RETRY
        counts.bytes += block.length if outcome is Outcome.STORED else 0
