"""The mover: carries out the copies that a rank wants made, as an ordinary client of the other ranks.

One background thread, started with the first copy. It writes a block straight into the other rank's slot where that is
mapped, and by whatever way a client has elsewhere, within a budget that ends before the lease on its source does. What
it wrote is checked against the checksum that the block came with, so bytes that went bad or were overwritten here are
never committed there. A block that is in a file only is read into memory of the mover's own, and not into a slot.

What came of a copy is handed back to whoever submitted it, one outcome a block; a rank that does not answer is a copy
to be tried again.
"""

from __future__ import annotations

import functools
import logging
import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import BlockCorrupt, KvtoolError
from kvtool.kv.copying import Copy, CopyOf, Outcome, Why
from kvtool.kv.layout import KVLayout
from kvtool.kv.retention import Pin
from kvtool.kv.source import Source
from kvtool.pool import base, wire
from kvtool.pool.access import Access, UcxDoor
from kvtool.pool.client import PoolClient
from kvtool.pool.memory import PAGE, SlotMemory
from kvtool.pool.outside import Outside
from kvtool.pool.state import PoolState, RankState
from kvtool.transfer.checksum import copy_checksum

if TYPE_CHECKING:
    from kvtool.transfer.files import BlockFile

log = logging.getLogger("kvtool.pool")

BUDGET_S = 2.0
STAGING_SIZE = 8 * 2**20
"""For blocks on their way to a rank that cannot be mapped, or 16 blocks."""
FAR_MAX = 4
"""Ranks at once that there is such staging for."""
BOUNCE_SIZE = 8 * 2**20
"""For blocks on their way from a file, or one block."""
STOP_S = 1.0
_OUTCOMES = {
    base.Outcome.STORED: Outcome.STORED,
    base.Outcome.DUPLICATE: Outcome.THERE,
    base.Outcome.REFUSED: Outcome.NO_ROOM,
    base.Outcome.FAILED: Outcome.RETRY,
}

Done = Callable[[list[Outcome]], None]


class _Spoiled(Exception):
    """A source does not hold its block any more."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class Toward(Outside):
    """A pool of one rank: whatever is put there goes to that rank, as a copy of `rank`'s."""

    staging_size = STAGING_SIZE

    def __init__(self, state: PoolState, to: RankState, layout: KVLayout, name: str) -> None:
        super().__init__(Path(), layout, "auto", name)
        self.where, self._to = to.identity, to
        self._state: PoolState | None = replace(state, ranks=[replace(to, weight=1.0)])
        self.reached: Access | None = None

    def look(self) -> PoolState | None:
        state, self._state = self._state, None
        return state

    def access(self, rank: RankState, key: bytes, door: UcxDoor, on_epoch: Callable[[int], None]) -> Access:
        self.reached = super().access(rank, key, door, on_epoch)
        return self.reached


@dataclass(frozen=True)
class _Way:
    """To one process of another rank."""

    to: RankState
    outside: Toward
    client: PoolClient

    @property
    def far(self) -> bool:
        """Whether blocks go there by staging memory."""
        return self.outside.reached is not None and self.outside.reached.path is not base.Path.SHM

    def leads_to(self, to: RankState) -> bool:
        return (self.to.pid, self.to.started) == (to.pid, to.started)


class Mover:
    """`memory` and `files` are the rank's own. `outside` makes the way to another rank; a simulation gives its own."""

    def __init__(
        self,
        rank: int,
        layout: KVLayout,
        memory: SlotMemory,
        files: BlockFile | None,
        budget_s: float = BUDGET_S,
        outside: Callable[[PoolState, RankState, KVLayout, str], Toward] = Toward,
    ) -> None:
        self.rank, self._layout, self._memory, self._files = rank, layout, memory, files
        self._budget_s, self._outside = budget_s, outside
        self._ways: dict[int, _Way] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, copy: Copy, sources: Sequence[Source | None], state: PoolState, to: RankState, done: Done) -> None:
        """Have `carry` run in the background; `done` is called in the mover's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtool-mover", daemon=True)
            self._thread.start()
        self._jobs.put(lambda: done(self.carry(copy, sources, state, to)))

    def carry(self, copy: Copy, sources: Sequence[Source | None], state: PoolState, to: RankState) -> list[Outcome]:
        """Make one copy, within the budget for each group of its blocks."""
        outcomes = [Outcome.GONE if source is None else Outcome.RETRY for source in sources]
        if self._closed:
            return outcomes
        try:
            way = self._way(state, to)
            for group in self._groups(sources):
                self._carry(way, copy, group, sources, outcomes)
        except KvtoolError as error:
            log.info("copy failed to=%d blocks=%d why=%r", to.rank, len(copy.blocks), str(error))
        except Exception:
            log.exception("copy failed to=%d blocks=%d", to.rank, len(copy.blocks))
        if Outcome.RETRY in outcomes:
            self._leave(to.rank)
        return outcomes

    def close(self) -> None:
        """Stop after what is under way. Again is a no-op."""
        self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(STOP_S)
        for way in self._ways.values():
            way.client.close()
        self._ways = {}

    # How

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job()

    def _way(self, state: PoolState, to: RankState) -> _Way:
        way = self._ways.pop(to.rank, None)
        if way is None or not way.leads_to(to):
            if way is not None:
                way.client.close()
            far = [rank for rank, known in self._ways.items() if known.far]
            for rank in far[: max(0, len(far) - FAR_MAX + 1)]:  # the one not used for longest first
                self._ways.pop(rank).client.close()
            name = f"copies of rank {self.rank}"
            outside = self._outside(state, to, self._layout, name)
            client = PoolClient(Path(), self._layout, client_name=name, outside=outside)
            way = _Way(to, outside, client)
        self._ways[to.rank] = way
        return way

    def _leave(self, rank: int) -> None:
        """After a failed transfer: hang up, which tells the rank that nobody writes any more into what was reserved.
        A client would see to that with its next call, and there may be none. Mapped memory is written by the call
        itself, and a rank that hangs is known as that by its link."""
        way = self._ways.get(rank)
        if way is not None and way.far:
            way.client.close()
            del self._ways[rank]

    def _groups(self, sources: Sequence[Source | None]) -> list[list[int]]:
        """Positions of what is copied together: everything in slots, and as much from files as the bounce holds."""
        slots, groups, size = [], list[list[int]](), BOUNCE_SIZE
        for at, source in enumerate(sources):
            if source is None:
                continue
            if source.slot >= 0:
                slots.append(at)
                continue
            if not groups or size + source.length > BOUNCE_SIZE:
                groups.append([])
                size = 0
            groups[-1].append(at)
            size += source.length
        return [slots, *groups] if slots else groups

    def _carry(
        self, way: _Way, copy: Copy, group: list[int], sources: Sequence[Source | None], outcomes: list[Outcome]
    ) -> None:
        views: dict[int, memoryview] = {}
        for at in group:
            source = sources[at]
            assert source is not None
            if source.slot >= 0:
                views[at] = self._memory.slot(source.slot, source.length)
        if not views:
            views = self._from_file(group, sources, outcomes)
        puts, positions = [], list(views)
        for at in positions:
            source = sources[at]
            assert source is not None
            puts.append(_put(at, source, views[at], copy.blocks[at]))
        if not puts:
            return
        try:
            results = self._write(way, copy.why, puts)
        except _Spoiled as spoiled:
            outcomes[spoiled.at] = Outcome.DAMAGED
            return
        for at, result in zip(positions, results, strict=True):
            outcomes[at] = _OUTCOMES[result.outcome]

    def _write(self, way: _Way, why: Why, puts: list[base.Put]) -> list[base.PutResult]:
        access = way.outside.reached
        if access is None:
            return [base.PutResult(base.Outcome.FAILED, reason="no way to the rank")] * len(puts)
        access.link.connect(time.monotonic() + self._budget_s)
        access.link.tell(wire.Op.COPYING, wire.pack_copying(self.rank, why))
        return way.client.write(puts, self._budget_s)

    def _from_file(
        self, group: list[int], sources: Sequence[Source | None], outcomes: list[Outcome]
    ) -> dict[int, memoryview]:
        """Blocks read into memory of our own, by position; those that cannot be read are left out."""
        if self._files is None:
            return {}
        stride = -(-self._layout.block_size // PAGE) * PAGE
        room = memoryview(mmap.mmap(-1, len(group) * stride))  # lives as long as a read that came too late needs it
        views, reads = dict[int, memoryview](), list[tuple[int, Future[object]]]()
        for number, at in enumerate(group):
            source = sources[at]
            assert source is not None
            views[at] = room[number * stride : number * stride + source.length]
            read = self._files.read(source.file_slot, views[at], source.key, generation=source.record)
            reads.append((at, read))  # type: ignore[arg-type]
        until_s = time.monotonic() + self._budget_s
        for at, future in reads:
            try:
                future.result(max(0.0, until_s - time.monotonic()))
            except BlockCorrupt:
                outcomes[at] = Outcome.DAMAGED
                del views[at]
            except (KvtoolError, NotInTime):
                del views[at]
        return views


def _put(at: int, source: Source, view: memoryview, block: CopyOf) -> base.Put:
    retention = (
        source.retention if block.ttl_s is None else replace(source.retention, priority=0, pin=Pin.NONE, copies=1)
    )
    fill = functools.partial(_fill, at, source, view)
    return base.Put(source.key, source.length, fill, source.parent, block.ttl_s, retention)


def _fill(at: int, source: Source, view: memoryview, room: memoryview) -> None:
    if copy_checksum(room, view, source.key) != source.checksum:
        raise _Spoiled(at)
