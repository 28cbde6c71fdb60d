"""A client of the pool: match, read and write over all ranks, each call within its budget.

Keys are placed by rendezvous hashing, so a batch becomes one message for each rank that owns some of it; all are sent
before the first answer is waited for. On the same node blocks are read in place and written in place; elsewhere they
go by UCX, one transfer a rank. Every block is checked against its key and checksum before it is handed out; one that
fails is reported, quarantined by its rank, and a miss.

What could not be had in time is a miss with its reason, never an error: a dead rank at once, a hung one after the
budget of one call and at once from then on, until it answers.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TypeVar

from kvtool.errors import KvtoolError, SpecRefused
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.pool import wire
from kvtool.pool.access import Access
from kvtool.pool.base import BlockView, Path, PoolCounts, Put, PutResult, Tier
from kvtool.pool.link import RankSlow
from kvtool.pool.memory import SlotMemory
from kvtool.pool.outside import Outside
from kvtool.pool.putting import ANSWER_SHARE, Putting
from kvtool.pool.ranks import Ranks
from kvtool.pool.reading import Counting, Held, Placed, PoolRead
from kvtool.pool.wire import Cut, Found, Op
from kvtool.transfer.checksum import checksum

ALIVE_S = 1.0
PROBE_S = 0.25
_CUTS = {Cut.ABSENT: "absent", Cut.LATE: "timeout", Cut.FULL: "full"}
_T = TypeVar("_T")


@dataclass
class _Part:
    """One rank's share of a batch: which keys, at which positions, and what came of it."""

    access: Access
    memory: SlotMemory | None
    """As it was when the call began: a rank that dies meanwhile is let go of by other threads."""
    positions: list[int] = field(default_factory=list)
    keys: list[BlockKey] = field(default_factory=list)
    request: int = 0
    number: int = 0
    sent_s: float = 0.0
    failed: str = ""
    found: Found | None = None


@dataclass
class _Run:
    """The leading run of a batch so far: positions before `cut`, and why it ends there."""

    cut: int
    reason: str = "absent"

    def end(self, position: int, reason: str) -> None:
        if position < self.cut:
            self.cut, self.reason = position, reason


class PoolClient:
    """A `pool.base.Pool` over the ranks that `state_file` names. Thread-safe, and without threads of its own.

    `path`: "auto" (shared memory where it can be, else UCX), "shm" or "ucx". No pool running yet is no error. `outside`
    replaces the machine's clock and network (see `outside`); `state_file` and `path` then mean nothing.

    Raises:
        Refused: the pool that runs there holds another KV layout; both are in the sentence.
    """

    def __init__(
        self,
        state_file: FilePath,
        layout: KVLayout,
        *,
        path: str = "auto",
        client_name: str = "client",
        outside: Outside | None = None,
    ) -> None:
        if path not in ("auto", "shm", "ucx"):
            raise SpecRefused(f"pool.path: wanted auto, shm or ucx, found {path!r}")
        self.layout = layout
        outside = outside or Outside(FilePath(state_file), layout, path, client_name)
        self._now_s = outside.now_s
        self._ranks = Ranks(outside, layout, client_name)
        self._counting = Counting()
        self._numbers = itertools.count(1)
        self._probing = threading.Lock()
        self._probed_s, self._alive = -ALIVE_S, False

    def match(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        deadline_s = self._now_s() + budget_s
        run = _Run(len(keys))
        parts = self._split(keys, run, deadline_s)
        self._ask(parts, Op.MATCH, lambda part: b"".join(part.keys), deadline_s)
        for part in parts:
            count = self._answer(part, wire.unpack_count, deadline_s) or 0
            if count < len(part.keys):
                run.end(part.positions[count], part.failed or "absent")
        return run.cut

    def read(self, keys: Sequence[BlockKey], budget_s: float = 2.0) -> PoolRead:
        deadline_s = self._now_s() + budget_s
        wait_s = budget_s * ANSWER_SHARE
        answers_by_s = deadline_s - budget_s * (1 - ANSWER_SHARE) / 2  # time to fetch from those who do answer
        run = _Run(len(keys))
        parts = self._split(keys, run, deadline_s)
        self._ask(parts, Op.LOOKUP, lambda part: wire.pack_lookup(part.number, wait_s, part.keys), deadline_s)
        for part in parts:
            part.found = self._answer(part, wire.unpack_found, answers_by_s)
            count = len(part.found.hits) if part.found is not None else 0
            if count < len(part.keys):
                cut = "absent" if part.found is None else _CUTS[part.found.cut]
                run.end(part.positions[count], part.failed or cut)
        found: dict[int, tuple[BlockView, Placed]] = {}
        helds: list[Held] = []
        for part in parts:
            if part.found is not None:
                self._fetch(part, part.found, run, found, helds, deadline_s)
        blocks = [found[position][0] for position in range(run.cut)]
        self._count(blocks, len(keys), run)
        return PoolRead(blocks, [found[position][1] for position in range(run.cut)], helds)

    def write(self, blocks: Sequence[Put], budget_s: float = 2.0) -> list[PutResult]:
        results = Putting(self._ranks, self.layout, blocks, self._now_s() + budget_s).run()
        self._counting.put(results, [block.size for block in blocks], Path.SHM)
        return results

    def drop(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        deadline_s = self._now_s() + budget_s
        parts = self._group(keys, _Run(len(keys)), deadline_s, whole=False)
        self._ask(parts, Op.DROP, lambda part: b"".join(part.keys), deadline_s)
        return sum(self._answer(part, wire.unpack_count, deadline_s) or 0 for part in parts)

    def alive(self) -> bool:
        now_s = self._now_s()
        self._ranks.refresh()
        if any(a.link.connected and now_s - a.link.heard_s < ALIVE_S and a.link.usable for a in self._ranks.all()):
            return True
        if now_s - self._probed_s < ALIVE_S or not self._probing.acquire(blocking=False):
            return self._alive
        try:
            self._probed_s = now_s
            self._alive = any(self._probe(access) for access in self._ranks.all())
            if not self._alive:
                self._ranks.lost()
        finally:
            self._probing.release()
        return self._alive

    def counts(self) -> PoolCounts:
        return self._counting.snapshot()

    def close(self) -> None:
        """Leave the pool; its ranks end our leases. Views in place must not be used any more."""
        self._ranks.close()

    # How

    def _probe(self, access: Access) -> bool:
        try:
            if access.link.usable:
                access.link.call(Op.PING, b"", self._now_s() + PROBE_S)
                return True
        except KvtoolError:
            pass
        return False

    def _split(self, keys: Sequence[BlockKey], run: _Run, deadline_s: float) -> list[_Part]:
        """The leading keys by rank, up to the first that no usable rank holds."""
        return self._group(keys, run, deadline_s, whole=True)

    def _group(self, keys: Sequence[BlockKey], run: _Run, deadline_s: float, whole: bool) -> list[_Part]:
        """`keys` by rank; those of ranks that cannot be asked are missing, and so is all behind them when `whole`."""
        parts = []
        for access, mine in self._ranks.split(keys):
            if whole and mine[0] >= run.cut:
                continue
            if access is None or not self._reachable(access, deadline_s):
                run.end(mine[0], "rank_down")
                self._ranks.lost()
                continue
            parts.append(_Part(access, access.memory, mine, [], number=next(self._numbers)))
        for part in parts:
            if whole and part.positions[-1] >= run.cut:
                part.positions = part.positions[: bisect.bisect_left(part.positions, run.cut)]
            part.keys = list(map(keys.__getitem__, part.positions))
        return [part for part in parts if part.keys]

    def _reachable(self, access: Access, deadline_s: float) -> bool:
        try:
            return access.link.usable and access.open(deadline_s) is not None
        except KvtoolError:
            return False

    def _ask(self, parts: Sequence[_Part], op: Op, body: Callable[[_Part], bytes], deadline_s: float) -> None:
        for part in parts:
            part.sent_s = self._now_s()
            try:
                part.request = part.access.link.start(op, body(part), deadline_s, part.number)
            except KvtoolError as error:
                self._note(part, error)

    def _answer(self, part: _Part, unpack: Callable[[bytes], _T], deadline_s: float) -> _T | None:
        if not part.request:
            return None
        try:
            return unpack(part.access.link.finish(part.request, deadline_s))
        except KvtoolError as error:
            self._note(part, error)
            return None

    def _note(self, part: _Part, error: KvtoolError) -> None:
        part.failed = "timeout" if isinstance(error, RankSlow) else "rank_down"
        self._ranks.lost()

    def _fetch(
        self,
        part: _Part,
        hits: Found,
        run: _Run,
        found: dict[int, tuple[BlockView, Placed]],
        helds: list[Held],
        deadline_s: float,
    ) -> None:
        """Verify one rank's blocks before the cut, in place or after copying them here."""
        access = part.access
        release = functools.partial(access.link.tell, Op.RELEASE, wire.pack_numbers([part.number]))
        count = sum(position < run.cut for position in part.positions[: len(hits.hits)])
        memory = part.memory
        if memory is not None:
            held = Held(part.sent_s + hits.term_s, self._now_s, memory.generations, release)
            views: Sequence[memoryview] = [
                memory.slot(slot, length).toreadonly() for slot, length, *_ in hits.hits[:count]
            ]
        else:
            copied = sum(view.path is Path.UCX for view, _ in found.values())
            views, held = self._copy(part, hits, count, copied, run, deadline_s)
            release()
        helds.append(held)
        path = Path.UCX if memory is None else Path.SHM
        for position, key, view, hit in zip(part.positions, part.keys, views, hits.hits, strict=False):
            slot, _, generation, wanted, filed = hit
            if checksum(view, key) != wanted:
                run.end(position, self._failed_check(part, held, key, slot, generation))
                break
            block = BlockView(key, view, Tier.FILE if filed else Tier.DRAM, path)
            found[position] = (block, Placed(held, slot, generation))

    def _failed_check(self, part: _Part, held: Held, key: BlockKey, slot: int, generation: int) -> str:
        """Bytes that are not the block's: because the lease lapsed, or because the block is corrupt."""
        if self._now_s() >= held.deadline_s:
            return "lapsed"
        part.access.link.tell(Op.CORRUPT, wire.pack_corrupt(key, slot, generation))
        return "corrupt"

    def _copy(
        self, part: _Part, hits: Found, count: int, copied: int, run: _Run, deadline_s: float
    ) -> tuple[Sequence[memoryview], Held]:
        """Blocks by UCX into staging, which is held until the read is released; `copied` of this read are in it."""
        access, door = part.access, self._ranks.door
        door.look_after()
        lapses_at_s = part.sent_s + hits.term_s
        nothing = Held(lapses_at_s, self._now_s, None, lambda: None)
        if not count:
            return [], nothing
        if part.access.path is not Path.UCX:  # its memory was unmapped under us
            run.end(part.positions[0], "rank_down")
            return [], nothing
        try:
            room = door.blocks - copied  # waiting for more would be waiting for ourselves
            if count > room:
                run.end(part.positions[room], "full")
                count = room
            if not count:
                return [], nothing
            ranges = [(access.offset(slot), length) for slot, length, *_ in hits.hits[:count]]
            staged = door.reader.read(access.peer, ranges, deadline_s)
        except KvtoolError as error:
            run.end(part.positions[0], "timeout" if self._now_s() >= deadline_s else "rank_down")
            self._note(part, error)
            return [], nothing
        return [view.toreadonly() for view in staged], Held(lapses_at_s, self._now_s, None, staged.release)

    def _count(self, blocks: Sequence[BlockView], wanted: int, run: _Run) -> None:
        self._counting.read(blocks)
        missed = wanted - len(blocks)
        if run.reason in ("corrupt", "lapsed") and missed:
            self._counting.missed(run.reason, 1)
            self._counting.missed("absent", missed - 1)
        else:
            self._counting.missed(run.reason, missed)
