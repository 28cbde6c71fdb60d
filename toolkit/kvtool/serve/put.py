"""Blocks from a sequence into the pool, behind the engine's back.

The engine's thread copies finished blocks into staging buffers between two chunks; a thread of its own writes them to
the pool. The copy costs under a percent of computing the block, and frees the sequence from the pool's pace: a put that
stalls holds staging memory, never KV blocks. Staging is bounded; when it is full, blocks are dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtool.clock import Clock
from kvtool.engine.base import Engine, SequenceKV
from kvtool.kv.block import BlockKey
from kvtool.pool.base import Outcome, Pool, Put, PutResult
from kvtool.serve.gate import FetchGate
from kvtool.serve.options import PoolOptions

log = logging.getLogger(__name__)


@dataclass
class Staged:
    """A batch of blocks on its way; `results` are there once `then` is called."""

    owner: str
    at_s: float
    puts: list[Put] = field(default_factory=list)
    buffers: list[bytearray] = field(default_factory=list)
    results: list[PutResult] = field(default_factory=list)
    over: bool = False


class Putter:
    def __init__(
        self, engine: Engine, pool: Pool, gate: FetchGate, options: PoolOptions, blocks_max: int, clock: Clock
    ) -> None:
        self._engine, self._pool, self._gate, self._options, self._clock = engine, pool, gate, options, clock
        self._size = engine.layout.block_size
        self._blocks_max, self._made = blocks_max, 0
        self._spare: list[bytearray] = []
        self._lock = threading.Lock()
        self._held: dict[int, Staged] = {}
        self._queue: queue.SimpleQueue[tuple[Staged, Callable[[Staged], None]] | None] = queue.SimpleQueue()
        self.outcomes: dict[str, int] = {}
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="kvtool-put", daemon=True)
        self._thread.start()

    def stage(
        self,
        batch: Staged,
        sequence: SequenceKV,
        index: int,
        key: BlockKey,
        parent: BlockKey | None,
        transient_s: float | None = None,
    ) -> bool:
        """Copy block `index` of `sequence` into `batch`. On the engine's thread. False: no staging left, dropped."""
        buffer = self._take()
        if buffer is None:
            self.dropped += 1
            return False
        self._engine.export_block(sequence, index, memoryview(buffer))
        batch.buffers.append(buffer)

        def fill(slot: memoryview) -> None:
            if batch.over:  # the buffer may hold another block by now
                raise RuntimeError("the pool came for a block's bytes after its put had ended")
            slot[:] = buffer

        batch.puts.append(Put(key, self._size, fill, parent, transient_s))
        return True

    def send(self, batch: Staged, then: Callable[[Staged], None]) -> None:
        """Write `batch` in the put thread, then call `then` there. The buffers go back whatever happens."""
        with self._lock:
            self._held[id(batch)] = batch
        self._queue.put((batch, then))

    @property
    def room(self) -> int:
        """How many blocks can be staged now."""
        with self._lock:
            return self._blocks_max - self._made + len(self._spare)

    def discard(self, batch: Staged) -> None:
        """Give back the buffers of a batch that is not sent after all."""
        with self._lock:
            batch.over = True
            self._spare.extend(batch.buffers)
            batch.buffers = []

    def held(self) -> list[Staged]:
        with self._lock:
            return list(self._held.values())

    def close(self, timeout_s: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _take(self) -> bytearray | None:
        with self._lock:
            if self._spare:
                return self._spare.pop()
            if self._made >= self._blocks_max:
                return None
            self._made += 1
        return bytearray(self._size)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            batch, then = item
            batch.results = self._write(batch.puts)
            for result in batch.results:
                self.outcomes[result.outcome.value] = self.outcomes.get(result.outcome.value, 0) + 1
            self.discard(batch)
            with self._lock:
                del self._held[id(batch)]
            try:
                then(batch)
            except Exception:
                log.exception("after a put owner=%s", batch.owner)

    def _write(self, puts: list[Put]) -> list[PutResult]:
        began_at_s, budget_s = self._clock.now_s(), self._options.put_budget_s
        if not self._gate.passes(began_at_s):
            return [PutResult(Outcome.FAILED, reason="the pool rests after waits in vain")] * len(puts)
        try:
            if not self._pool.alive():
                self._gate.failed(began_at_s)
                return [PutResult(Outcome.FAILED, reason="no rank answers")] * len(puts)
            results = self._pool.write(puts, budget_s)
        except Exception as error:  # the pool promises not to raise; a broken promise is a failed put
            log.warning("put failed blocks=%d error=%r", len(puts), error)
            self._gate.failed(self._clock.now_s())
            return [PutResult(Outcome.FAILED, reason=repr(error))] * len(puts)
        stored = any(result.outcome in (Outcome.STORED, Outcome.DUPLICATE) for result in results)
        if not stored and self._clock.now_s() - began_at_s >= budget_s:
            self._gate.failed(self._clock.now_s())
        else:
            self._gate.answered()
        return results


def stored_run(results: list[PutResult]) -> int:
    """How many leading blocks of a batch are in the pool."""
    for index, result in enumerate(results):
        if result.outcome not in (Outcome.STORED, Outcome.DUPLICATE):
            return index
    return len(results)
