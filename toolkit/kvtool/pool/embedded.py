"""The pool in one process: the same rules as a rank, no MPI, no sockets. For library users, tests and batch jobs.

Thread-safe: one lock around the rules, which take microseconds; bytes are filled, hashed and moved outside it. What is
due by the clock ends at the start of every call: without calls there is nobody whom a late ending could hurt.

A move between the tiers may end while it is being started, in the same thread. What came of it waits until everything
else that the rules wanted done is done: rules must not hear of a move's end in the middle of carrying out its batch.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pathlib
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvtool.clock import Clock, SystemClock
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.kv.policy import AUTO
from kvtool.kv.record import Grant, Granted, Hit, Holding, Want
from kvtool.kv.store import Store
from kvtool.pool.base import (
    BlockView,
    Cancelling,
    GetResult,
    Got,
    Outcome,
    Path,
    PoolCounts,
    Put,
    PutResult,
    Tier,
    finished,
    hit_of,
    leading_run,
)
from kvtool.pool.buffers import Room, rooms_of
from kvtool.pool.filetier import WRITE, Flush, close_file
from kvtool.pool.filling import BATCH, fill_room, outcome_of, refusal
from kvtool.pool.halves import in_halves
from kvtool.pool.memory import SlotMemory
from kvtool.pool.reading import Counting, Held, Placed, PoolRead
from kvtool.pool.tiers import Event, Tiers
from kvtool.pool.verbs import Verbs, lengths_match
from kvtool.pool.wire import join_keys
from kvtool.transfer.checksum import checksum

RECHECK_S = 0.02
DURABLE_WAIT_S, FLUSH_S = 1.0, 5.0
_OWNER = 1


class EmbeddedPool(Verbs):
    """A `pool.base.Pool` of `dram_size` bytes of memory and `file_size` bytes of files in `file_dir`.

    `file_path`: a block file that outlives this pool, with what it holds; else a temporary one in `file_dir` that is
    gone at `close`. `write` and `evict` are as in `PoolConfig`. Budgets are real seconds; leases follow
    `clock`.

    Raises:
        ValueError: not room for one block.
        Refused: the disk has no room for `file_size`, or `file_path` holds something else.
    """

    def __init__(
        self,
        layout: KVLayout,
        dram_size: int,
        file_size: int = 0,
        file_dir: pathlib.Path | None = None,
        clock: Clock | None = None,
        *,
        lease_term_s: float = 10.0,
        reserve_term_s: float = 10.0,
        file_path: pathlib.Path | None = None,
        write: str = "back",
        evict: str = AUTO,
    ) -> None:
        self.layout = layout
        self._clock = clock or SystemClock()
        slots = SlotMemory.slots_in(dram_size, layout.block_size)
        file_slots = file_slots_in(file_size, layout.block_size)
        if write not in WRITE:
            raise ValueError(f"write: wanted {' or '.join(WRITE)}, found {write}")
        through = write == "through"
        self._store = Store(slots, layout.block_size, file_slots, lease_term_s, reserve_term_s, through, evict)
        self._map = mmap.mmap(-1, SlotMemory.size(slots, layout.block_size))
        self._memory = SlotMemory(memoryview(self._map), slots, layout.block_size)
        self._changed = threading.Condition()
        self._reads = itertools.count(1)
        self._counting = Counting(layout.block_tokens)
        self._closed = self._carrying = False
        self._events: deque[Event] = deque()
        self._file_dir = file_dir
        self._temporary: pathlib.Path | None = None
        self._tiers = Tiers(self._store, self._memory, None, self._post)
        if file_slots and file_path is not None:
            from kvtool.transfer.files import BlockFile

            size, mark = layout.block_size, layout.fingerprint
            self._tiers.files = BlockFile(file_path, size, file_slots, fingerprint=mark, layout=str(layout))
            self._tiers.recover(self._clock.now_s())
        elif file_slots:
            self._open_temporary(file_slots)

    def _open_temporary(self, slots: int) -> None:
        from kvtool.transfer.files import BlockFile

        directory = self._file_dir or pathlib.Path(tempfile.gettempdir())
        handle, name = tempfile.mkstemp(prefix="kvtool-embedded-", suffix=".blocks", dir=directory)
        os.close(handle)
        self._temporary = pathlib.Path(name)
        try:
            self._tiers.files = BlockFile(self._temporary, self.layout.block_size, slots, fresh=True)
        except BaseException:
            self._temporary.unlink(missing_ok=True)
            raise

    def _copy(
        self, positions: Sequence[int], hits: Sequence[Hit], rooms: Sequence[Room], got: list[Got | None]
    ) -> None:
        """Each hit into the room of its position, by two threads where that pays."""

        def some(items: Sequence[tuple[int, Hit]]) -> None:
            for position, hit in items:
                got[position] = self._copied(hit, rooms[position])

        in_halves(list(zip(positions, hits, strict=False)), sum(hit.length for hit in hits), some)

    def match(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        with self._changed:
            if self._closed:
                return 0
            self._tick()
            return self._store.match(keys)

    def exists(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> list[bool]:
        with self._changed:
            if self._closed:
                return [False] * len(keys)
            self._tick()
            return [bool(there) for there in self._store.has(keys)]

    def read(self, keys: Sequence[BlockKey], budget_s: float = 2.0, *, cancel: Cancelling | None = None) -> PoolRead:
        until_s = time.monotonic() + budget_s
        hits, held, reason = self._lease(keys, until_s, cancel)
        blocks = self._verified(hits)
        self._counting.read(blocks, len(keys), reason if len(blocks) == len(hits) else "corrupt")
        return PoolRead(blocks, [Placed(held, hit.slot, hit.generation) for hit in hits[: len(blocks)]], [held])

    def get_into(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        budget_s: float = 2.0,
        *,
        leading: bool = True,
        cancel: Cancelling | None = None,
    ) -> GetResult:
        lengths_match(keys, buffers)
        rooms, until_s = rooms_of(buffers), time.monotonic() + budget_s
        got: list[Got | None] = [None] * len(keys)
        left, reason = list(range(len(keys))), "absent"
        if not leading:
            left = self._there(keys)
        most = len(left)
        while left:
            some = left[:most]
            hits, held, reason = self._lease([keys[position] for position in some], until_s, cancel)
            self._copy(some, hits, rooms, got)
            tried = (got[position] for position in some[: len(hits)])
            copied = [one is not None and one.hit for one in tried]
            whole = sum(copied)
            if leading and whole < len(hits):
                whole = copied.index(False)
                for position in left[whole + 1 :]:  # nothing behind a miss counts
                    got[position] = None
            held.release()
            left, all_there = left[len(hits) :], len(hits) == len(some)
            if (whole < len(hits) and leading) or not (all_there or (reason == "full" and len(some) > 1)):
                break
            most = 2 * most if all_there else max(1, len(some) // 4)  # what is leased holds room too
        result = finished(got, reason if leading else "absent")
        self._counting.got(result)
        return GetResult(result, leading_run(result))

    def _there(self, keys: Sequence[BlockKey]) -> list[int]:
        """Where `keys` are that are resident, those in memory first: they should not wait for a file."""
        with self._changed:
            if self._closed:
                return []
            self._tick()
            there = [position for position, is_there in enumerate(self._store.has(keys)) if is_there]
            return sorted(there, key=lambda position: self._store.filed(keys[position]))

    def _copied(self, hit: Hit, room: Room) -> Got:
        if hit.length > room.size:
            return Got(reason="too_small")
        if room.fill(self._memory.slot(hit.slot, hit.length), hit.key) != hit.checksum:
            self._corrupt(hit)
            return Got(reason="corrupt")
        return hit_of(hit.length, hit.filed, Path.EMBEDDED)

    def _lease(
        self, keys: Sequence[BlockKey], until_s: float, cancel: Cancelling | None = None
    ) -> tuple[list[Hit], Held, str]:
        """The leading run of `keys` under a lease, and why it ends."""
        if cancel is not None and cancel.is_set():
            return [], Held(0.0, self._clock.now_s, None, lambda: None), "cancelled"
        with self._changed:
            if self._closed:
                return [], Held(0.0, self._clock.now_s, None, lambda: None), "rank_down"
            now_s = self._tick()
            read_id = (_OWNER, next(self._reads))
            wait_s = max(0.0, until_s - time.monotonic())
            reading = self._store.begin_read(read_id, list(keys), now_s, wait_s=wait_s)
            moved = self._carry_out()
            deadline_s = now_s + self._store.leases.term_s
            while not (reading.done or self._closed) and (moved or self._changed.wait(until_s - time.monotonic())):
                self._store.advance(reading, self._clock.now_s())
                moved = self._carry_out()
            late = not reading.done
            hits = self._store.finish_read(reading, self._clock.now_s())
            held = Held(deadline_s, self._clock.now_s, self._memory.generations, lambda: self._release(read_id))
        return hits, held, "timeout" if late else "full" if reading.full else "absent"

    def _verified(self, hits: Sequence[Hit]) -> list[BlockView]:
        """The leading blocks whose bytes are theirs; one that is not is quarantined."""
        blocks = []
        for hit in hits:
            data = self._memory.slot(hit.slot, hit.length).toreadonly()
            if checksum(data, hit.key) != hit.checksum:
                self._corrupt(hit)
                break
            blocks.append(BlockView(hit.key, data, Tier.FILE if hit.filed else Tier.DRAM, Path.EMBEDDED))
        return blocks

    def _corrupt(self, hit: Hit) -> None:
        with self._changed:
            self._store.corrupt(hit.key, hit.slot, hit.generation, self._clock.now_s())
            self._settled()

    def write(
        self, blocks: Sequence[Put], budget_s: float = 2.0, *, cancel: Cancelling | None = None
    ) -> list[PutResult]:
        until_s = time.monotonic() + budget_s
        join_keys([block.key for block in blocks])
        results: list[PutResult] = []
        for at in range(0, len(blocks), BATCH):
            some = blocks[at : at + BATCH]
            if cancel is not None and cancel.is_set():
                results += [PutResult(Outcome.FAILED, reason="cancelled")] * len(some)
            else:
                results += self._write(some, until_s)
        self._counting.put(results, [block.size for block in blocks], Path.EMBEDDED)
        return results

    def _write(self, blocks: Sequence[Put], until_s: float) -> list[PutResult]:
        results: list[PutResult | None] = [None] * len(blocks)
        left = list(range(len(blocks)))
        while left:
            wants = [Want(b.key, b.size, b.parent, b.transient_s, b.retention) for b in (blocks[at] for at in left)]
            with self._changed:
                if self._closed:
                    return [result or PutResult(Outcome.REFUSED, reason="the pool is closed") for result in results]
                answers = self._store.reserve(_OWNER, wants, self._tick())
                self._carry_out()
                why = self._store.why_full() if any(answer.grant is Grant.FULL for answer in answers) else ""
            again, granted = [], []
            for at, answer in zip(left, answers, strict=True):
                if answer.grant is Grant.GRANTED:
                    granted.append((at, answer))
                elif answer.grant is Grant.WAIT:
                    again.append(at)
                else:
                    results[at] = refusal(answer, blocks[at].size, self.layout.block_size, why)
            for at, result in self._fill(blocks, granted):
                results[at] = result
            left = again
            if left and not granted and not self._wait_for_room(until_s):
                for at in left:
                    results[at] = PutResult(Outcome.REFUSED, reason="no slot came free within the budget of this put")
                left = []
        return [result for result in results if result is not None]

    def _fill(self, blocks: Sequence[Put], granted: Sequence[tuple[int, Granted]]) -> list[tuple[int, PutResult]]:
        written: list[tuple[int, Granted, int]] = []
        try:
            for at, grant in granted:
                block = blocks[at]
                room = self._memory.slot(grant.slot, block.size)
                written.append((at, grant, fill_room(block, room)))
        finally:
            with self._changed:
                now_s = self._clock.now_s()
                for _, grant in granted[len(written) :]:  # only when `fill` raised
                    self._store.abort(_OWNER, grant.slot, grant.generation, now_s)
                commits = [(grant.slot, grant.generation, sum_) for _, grant, sum_ in written]
                committing = self._store.commit_all(_OWNER, commits, now_s)
                self._settled()
                self._changed.wait_for(lambda: committing.done or self._closed, DURABLE_WAIT_S)
        results = [outcome_of(commit, Path.EMBEDDED) for commit in committing.results]
        return [(at, result) for (at, _, _), result in zip(written, results, strict=True)]

    def _wait_for_room(self, until_s: float) -> bool:
        """Until something may have changed; False when the time is up."""
        with self._changed:
            left_s = until_s - time.monotonic()
            self._changed.wait(min(left_s, RECHECK_S))
            return left_s > 0

    def drop(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        with self._changed:
            if self._closed:
                return 0
            count = self._store.drop(keys, self._tick())
            self._settled()
            return count

    def delete(self, keys: Sequence[BlockKey], budget_s: float = 2.0) -> int:
        with self._changed:
            if self._closed:
                return 0
            deleting = self._store.delete(keys, self._tick())
            self._settled()
            self._changed.wait_for(lambda: deleting.done or self._closed, min(budget_s, DURABLE_WAIT_S))
            return deleting.count

    def alive(self) -> bool:
        return not self._closed

    def counts(self) -> PoolCounts:
        return self._counting.snapshot()

    def audit(self) -> list[Holding]:
        """Everything that is held now, one line a kind, oldest of each."""
        with self._changed:
            return self._store.audit(self._tick())

    def close(self) -> None:
        """Stop the file tier: reads are misses and puts are refused from now on. Views that are still held stay
        readable. A file that outlives the pool is given what only memory held, within a few seconds."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            if self._tiers.files is not None and self._temporary is None:
                self._flush()
        files = self._tiers.files
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            if files is not None:
                files.close()
        elif files is not None:
            close_file(files)

    def _flush(self) -> None:
        flush, until_s = Flush(self._store), time.monotonic() + FLUSH_S
        while not flush.step(self._clock.now_s()):
            moved, left_s = self._carry_out(), until_s - time.monotonic()
            if left_s <= 0 or (not moved and not self._changed.wait(left_s)):
                return

    def _release(self, read_id: tuple[int, int]) -> None:
        with self._changed:
            self._store.release(read_id, self._clock.now_s())
            self._settled()

    def _tick(self) -> float:
        now_s = self._clock.now_s()
        if not self._closed:
            self._store.tick(now_s)
            self._carry_out()
        return now_s

    def _settled(self) -> None:
        self._carry_out()
        self._changed.notify_all()

    def _carry_out(self) -> bool:
        """Do what the rules want done, then tell them what came of it; whether anything did."""
        moved, self._carrying = False, True
        try:
            self._tiers.carry_out()
            while self._events:
                moved = True
                self._events.popleft()(self._clock.now_s())
                self._tiers.carry_out()
        finally:
            self._carrying = False
        if moved:
            self._changed.notify_all()
        return moved

    def _post(self, event: Event) -> None:
        with self._changed:
            self._events.append(event)
            if not self._carrying:  # else this thread is in the midst of it
                self._settled()


def file_slots_in(file_size: int, slot_size: int) -> int:
    """How many slots a file tier of `file_size` bytes has; 0 switches it off."""
    if not file_size:
        return 0
    from kvtool.transfer.files import BlockFile

    return BlockFile.slots_under(file_size, slot_size)
