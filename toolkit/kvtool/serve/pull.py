"""Blocks from the pool into a sequence, while the engine works on others.

A pull runs in a thread of its own: read under leases, import, then ask which of the imported blocks were whole all
along; only those count. The engine's thread may give a pull up as long as it has not begun to import, after its budget
or when its request ends; a pull that is given up never touches the sequence. So even a pool that breaks its promise to
answer in time costs no more than the budget, and what was not had is recomputed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvtool.clock import Clock
from kvtool.engine.base import Engine, SequenceKV
from kvtool.kv.block import BlockKey
from kvtool.pool.base import Pool, Read
from kvtool.serve.gate import FetchGate
from kvtool.serve.options import PoolOptions

log = logging.getLogger(__name__)

_GRACE_S = 0.25
"""Over the budget that the pool was given: after it the worker stops believing that an answer comes."""


@dataclass
class Pulled:
    """`blocks`: leading blocks that are whole in the sequence. Counts are of those."""

    blocks: int = 0
    by_tier: list[str] = field(default_factory=list)
    """The tier of each."""
    path_bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Task:
    """One call to the pool in another thread. `due_at_s`: when the worker may give it up."""

    def __init__(self, owner: str, began_at_s: float, due_at_s: float) -> None:
        self.owner = owner
        self.began_at_s, self.due_at_s = began_at_s, due_at_s
        self.done = threading.Event()
        self.matched = 0
        self.pulled = Pulled()
        self._lock = threading.Lock()
        self._abandoned = self._committed = False

    def commit(self) -> bool:
        """By the task's thread, before it touches anything of the worker's. False: it was given up."""
        with self._lock:
            self._committed = not self._abandoned
            return self._committed

    def abandon(self) -> bool:
        """By the worker. True: the task will touch nothing any more. False: it is at it, and soon done."""
        with self._lock:
            if not self._committed:
                self._abandoned = True
            return self._abandoned


class Puller:
    """A worker's threads that ask the pool. `wake` is called when a task is done."""

    def __init__(
        self, engine: Engine, pool: Pool, gate: FetchGate, options: PoolOptions, clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._engine, self._pool, self._gate, self._options = engine, pool, gate, options
        self._clock, self._wake = clock, wake
        self._threads = ThreadPoolExecutor(options.fetch_threads, thread_name_prefix="kvtool-pull")
        self._running: dict[int, Task] = {}
        self.abandoned = 0

    def match(self, owner: str, keys: Sequence[BlockKey], then: Callable[[Task], None]) -> Task | None:
        """Ask how many leading `keys` are resident, and call `then` in the pull thread. None: better not to ask."""
        now_s = self._clock.now_s()
        if not keys or not self._gate.passes(now_s):
            return None
        budget_s = self._gate.match_budget_s(len(keys))
        task = Task(owner, now_s, now_s + budget_s + _GRACE_S)
        return task if self._start(task, lambda: self._match(task, keys, budget_s, then)) else None

    def pull(
        self, owner: str, sequence: SequenceKV, keys: Sequence[BlockKey], drop: BlockKey | None = None
    ) -> Task | None:
        """Import the leading resident run of `keys` into blocks 0, 1, ... of `sequence`, then forget `drop`.

        None: the breaker is open, or recomputing is faster.
        """
        now_s = self._clock.now_s()
        if not self._gate.worth_fetching(len(keys)) or not self._gate.passes(now_s):
            return None
        budget_s = self._gate.fetch_budget_s(len(keys))
        task = Task(owner, now_s, now_s + budget_s + _GRACE_S)
        return task if self._start(task, lambda: self._pull(task, sequence, keys, budget_s, drop)) else None

    def give_up(self, task: Task) -> bool:
        if not task.abandon():
            return False
        if self._clock.now_s() >= task.due_at_s:
            self._gate.failed(self._clock.now_s())
            self.abandoned += 1
        return True

    def running(self) -> list[Task]:
        """Calls that have not returned, those given up included."""
        return list(self._running.copy().values())

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, task: Task, work: Callable[[], None]) -> bool:
        def run() -> None:
            try:
                work()
            except Exception as error:  # the pool promises not to raise; a broken promise is a miss
                log.warning("pool call failed error=%r", error)
                self._gate.failed(self._clock.now_s())
            finally:
                self._running.pop(id(task), None)
                task.done.set()
                self._wake()

        self._running[id(task)] = task
        try:
            self._threads.submit(run)
        except RuntimeError:  # closing
            self._running.pop(id(task), None)
            return False
        return True

    def _match(self, task: Task, keys: Sequence[BlockKey], budget_s: float, then: Callable[[Task], None]) -> None:
        if self._reachable():
            task.matched = min(max(self._pool.match(keys, budget_s), 0), len(keys))
            self._judge(task, budget_s, task.matched > 0)
        if task.commit():
            then(task)

    def _pull(
        self, task: Task, sequence: SequenceKV, keys: Sequence[BlockKey], budget_s: float, drop: BlockKey | None
    ) -> None:
        if not self._reachable():
            return
        began_at_s = self._clock.now_s()
        with self._pool.read(keys, budget_s) as read:
            self._judge(task, budget_s, len(read.blocks) > 0)
            if not task.commit():
                return
            imported = self._import(sequence, keys, read)
            whole = min(imported, max(read.whole(), 0)) if imported else 0
            pulled = Pulled(whole, seconds=self._clock.now_s() - began_at_s)
            for view in read.blocks[:whole]:
                pulled.by_tier.append(view.tier.value)
                size = pulled.path_bytes.get(view.path.value, 0) + len(view.data)
                pulled.path_bytes[view.path.value] = size
            task.pulled = pulled
            self._gate.fetch_bytes_s.add(whole * self._engine.layout.block_size, pulled.seconds)
        if drop is not None:
            task.done.set()
            self._wake()
            self._pool.drop([drop])

    def _import(self, sequence: SequenceKV, keys: Sequence[BlockKey], read: Read) -> int:
        for index, view in enumerate(read.blocks):
            if view.key != keys[index] or len(view.data) != self._engine.layout.block_size:
                log.error("pool gave another block than asked index=%d bytes=%d", index, len(view.data))
                return index
            self._engine.import_block(sequence, index, view.data)
        return len(read.blocks)

    def _reachable(self) -> bool:
        """In a pull thread, since it may probe a rank."""
        alive = self._pool.alive()
        if not alive:
            self._gate.failed(self._clock.now_s())
        return alive

    def _judge(self, task: Task, budget_s: float, got: bool) -> None:
        """Tell the gate: nothing had after the whole budget is a wait in vain; anything else is an answer."""
        now_s = self._clock.now_s()
        if not got and now_s - task.began_at_s >= budget_s:
            self._gate.failed(now_s)
        else:
            self._gate.answered()
