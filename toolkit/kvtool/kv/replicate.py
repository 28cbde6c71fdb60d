"""Replication: which blocks of a rank go to which other ranks, and when.

A block that is wanted `copies` times belongs on the first that many ranks of its rendezvous order, its *owners*. Every
rank sees to its own blocks by two rules, and keeps nothing about a block once that is done:

* A block that was put here is owed to each of its other owners. So is one that was put here by a client who did not
  know yet that it belongs elsewhere, and every block of a rank that drains, which owns nothing any more.
* When ranks come or go all blocks are looked through, a few at a time, and one whose owners changed is owed to all of
  them: to those who are new, and to the others too, as whoever was copying it may have been lost, or relieved of it.

A copy is an offer: a rank that has the block says so and nothing moves. So no rank must know what another holds, a copy
is never made twice, an offer too many costs a few bytes, and whatever was forgotten here is put right by looking again.
Of several holders the first makes the offers at once and the others a little later, when there is nothing left to do.

Copies are background: what goes when is for `kv.outbox` to say. A rank that could not be reached, or more copies than
may wait, lead to another look through all blocks later. Near copies are asked for by `kv.hot`. For the order in which
ranks own a block, and how little of it moves, see `kv.placement`.

Pure rules: events in, `Copy` out; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvtool.kv.block import BlockKey
from kvtool.kv.copying import Catalog, Copy, CopyCounts, CopyLimits, CopyOf, Outcome, Wanted, Why
from kvtool.kv.outbox import Outbox
from kvtool.kv.placement import Placement
from kvtool.kv.retention import COPIES_MAX

LIMITS = CopyLimits()
SCAN_STEP = 512
"""Blocks looked through at once: well below a millisecond."""
PAST_MAX = 8
"""Views that came and went before all blocks were looked through; after more, every block is offered again."""


class Replicator:
    """What rank `rank` owes to others. `copies_default`: of blocks that do not say how often they are wanted."""

    def __init__(self, rank: int, catalog: Catalog, limits: CopyLimits = LIMITS, copies_default: int = 1) -> None:
        self.rank, self.limits, self.copies_default = rank, limits, copies_default
        self.counts = CopyCounts()
        self.outbox = Outbox(limits, self.counts)
        self._catalog = catalog
        self._placement = Placement(0, [])
        self._live: Mapping[int, int] = {}
        self._past: list[tuple[Placement, Mapping[int, int]]] | None = None  # views since all blocks were seen right
        self._rest: Sequence[BlockKey] | None = None  # still to be looked through
        self._rest_at = 0
        self._suspects: set[int] = set()
        self._homeless: set[BlockKey] = set()
        self._look_at_s: dict[int, float] = {}  # rank -> when to look for what it lacks
        self._looks: dict[int, int] = {}

    # Events

    def view(self, placement: Placement, live: Mapping[int, int], now_s: float) -> None:
        """Who owns what from now on; `live`: the incarnation of every rank that answers, draining ones included."""
        now, new = (self._placement.epoch, self._placement.members), (placement.epoch, placement.members)
        if new == now and dict(live) == dict(self._live):
            return
        if self._past is not None:
            self._past.append((self._placement, self._live))
            if len(self._past) > PAST_MAX:
                self._past = None
        self._placement, self._live = placement, dict(live)
        taking = {member.rank for member in placement.members}
        self.outbox.keep(taking)
        for rank in [rank for rank in self._look_at_s if rank not in taking]:
            del self._look_at_s[rank]
        self._scan()

    def entered(self, blocks: Sequence[Wanted], now_s: float, sender: int | None = None) -> None:
        """Blocks came in for good: from clients, or from rank `sender`, who as an owner sees to their other copies."""
        if not self._others:
            return
        for block, owners in zip(blocks, self._owners(blocks), strict=True):
            if sender in owners and self.rank in owners:
                continue
            for rank in owners:
                if rank not in (self.rank, sender):
                    self._owe(rank, CopyOf(block.key, block.length), Why.PUT, now_s)

    def near(self, block: CopyOf, rank: int, now_s: float) -> None:
        """Readers close to `rank` want a copy there."""
        if rank != self.rank and any(member.rank == rank for member in self._placement.members):
            self.outbox.owe(rank, block, Why.NEAR, now_s)

    def ended(self, copy: Copy, outcomes: Sequence[Outcome], now_s: float) -> None:
        """A `Copy` ended, with one outcome for each of its blocks."""
        for owed, outcome in self.outbox.ended(copy.number, outcomes, now_s):
            if owed.why is Why.NEAR or outcome not in (Outcome.NO_ROOM, Outcome.RETRY):
                continue
            self._homeless.add(owed.block.key)
            if outcome is Outcome.RETRY or self.leaving:  # a full pool stays full until ranks come or go
                self._look_later(copy.to, now_s)
        if Outcome.RETRY not in outcomes:
            self._looks.pop(copy.to, None)

    def pump(self, now_s: float, busy: bool = False) -> list[Copy]:
        """What to copy now. `busy`: foreground requests wait."""
        self._look_through(now_s)
        return self.outbox.pump(now_s, busy)

    # What there is

    @property
    def quiet(self) -> bool:
        """Nothing is owed, in flight or still to be looked through."""
        return self.outbox.empty and self._rest is None

    @property
    def idle(self) -> bool:
        """Nothing is to be done before the next event, not even later. Asked after every message of every client."""
        return self._rest is None and not self._look_at_s and self.outbox.empty

    @property
    def leaving(self) -> bool:
        """This rank owns nothing, so that all of its blocks belong elsewhere."""
        return bool(self._placement.members) and all(member.rank != self.rank for member in self._placement.members)

    @property
    def left(self) -> int:
        """Blocks of a leaving rank that are not safe elsewhere yet; those that nobody has room for are in it."""
        unseen = len(self._rest) - self._rest_at if self._rest is not None else 0
        return unseen + self.outbox.pending + self.outbox.flying + len(self._homeless)

    @property
    def homeless(self) -> int:
        """Blocks that another rank had no room for, or could not be reached for, when it was last asked."""
        return len(self._homeless)

    def next_due_s(self, now_s: float, busy: bool = False) -> float | None:
        """When `pump` has something to do next, unless an event comes before; None when there is nothing."""
        due = list(self._look_at_s.values())
        if self._rest is not None and self.outbox.pending < self._low:
            due.append(now_s)
        outbox_due_s = self.outbox.next_due_s(now_s, busy)
        return min([*due, *([] if outbox_due_s is None else [outbox_due_s])], default=None)

    # How

    @property
    def _others(self) -> bool:
        return any(member.rank != self.rank for member in self._placement.members)

    @property
    def _low(self) -> int:
        return max(1, self.limits.pending_max // 2)

    def _owners(self, blocks: Sequence[Wanted], placement: Placement | None = None) -> list[tuple[int, ...]]:
        """Owners of each of `blocks`, under the view of now or another one."""
        placement = placement or self._placement
        owners: list[tuple[int, ...]] = [()] * len(blocks)
        for copies in {block.copies for block in blocks}:
            at = [position for position, block in enumerate(blocks) if block.copies == copies]
            found = placement.owners_of_all([blocks[position].key for position in at], copies or self.copies_default)
            for position, them in zip(at, found, strict=True):
                owners[position] = them
        return owners

    def _owe(self, rank: int, block: CopyOf, why: Why, now_s: float, due_s: float = 0.0) -> None:
        if not self.outbox.owe(rank, block, why, now_s, due_s):
            self._look_later(rank, now_s)

    def _look_later(self, rank: int, now_s: float) -> None:
        """Look for what `rank` lacks, ever later if it goes on like that."""
        if rank not in self._look_at_s:
            looks = self._looks[rank] = self._looks.get(rank, -1) + 1
            wait_s = self.limits.leave_s if self.leaving else self.limits.rescan_s * 2.0 ** min(looks, 20)
            self._look_at_s[rank] = now_s + min(wait_s, self.limits.rescan_max_s)

    def _scan(self) -> None:
        """Look through all blocks from the start: a look that was under way had an older view."""
        self._rest, self._rest_at = self._catalog.catalog(), 0
        self._homeless.clear()
        self.counts.scans += 1

    def _look_through(self, now_s: float) -> None:
        """A few blocks on, if there is room for what they owe."""
        due = [rank for rank, at_s in self._look_at_s.items() if at_s <= now_s]
        if due:
            for rank in due:
                del self._look_at_s[rank]
            self._suspects.update(due)
            self._scan()
        if self._rest is None or self.outbox.pending >= self._low:
            return
        room = self.outbox.room // COPIES_MAX
        step = self._rest[self._rest_at : self._rest_at + max(1, min(SCAN_STEP, room))]
        self._rest_at += len(step)
        if self._others:
            self._look_at(self._catalog.wanted(step), now_s)
        if self._rest_at >= len(self._rest):
            self._rest, self._past = None, []
            self._suspects.clear()

    def _look_at(self, blocks: Sequence[Wanted], now_s: float) -> None:
        past = [(self._owners(blocks, placement), live) for placement, live in self._past or ()]
        for at, (block, new) in enumerate(zip(blocks, self._owners(blocks), strict=True)):
            ranks, turn = self._owed_now(new, [(owners[at], live) for owners, live in past])
            for rank in ranks:
                due_s = now_s + turn * self.limits.stagger_s if turn else 0.0
                self._owe(rank, CopyOf(block.key, block.length), Why.MEND, now_s, due_s)

    def _owed_now(
        self, new: tuple[int, ...], past: Sequence[tuple[tuple[int, ...], Mapping[int, int]]]
    ) -> tuple[list[int], int]:
        """Of a block with `new` owners, and others under past views: to whom it must be offered, and how many holders
        go first."""
        ranks: Iterable[int] = self._suspects.intersection(new)
        turn = 0
        for old, live in past:
            left = [rank for rank in old if rank in self._live and self._live[rank] == live.get(rank)]
            turn = left.index(self.rank) if self.rank in left else len(left)
            if len(left) < len(old) or set(new) != set(old):
                ranks = new
        if self._past is None:
            ranks = new
        return sorted(rank for rank in ranks if rank != self.rank), turn
