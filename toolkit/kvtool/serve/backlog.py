"""What a finished request leaves to the conversation's next turn.

The KV that decoding made is not canonical, and only canonical KV may go to the pool. A finished request therefore keeps
its sequence for a while: the positions from its last prompt token on are computed again by the prefill path, in chunks,
and the whole blocks that the pool may not know are staged for it. All of this has the lowest priority: nobody waits for
it, it takes a small share of a busy engine's time in pieces of one block or so, and its memory goes to whoever needs
it, oldest first. An answer that the pool knows already, as when a prompt is asked again, is not computed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

from kvtool.clock import Clock
from kvtool.engine.base import Engine
from kvtool.kv.block import BlockKey, block_keys
from kvtool.pool.base import Pool
from kvtool.serve.keys import PromptKeys
from kvtool.serve.options import DecodeOptions
from kvtool.serve.pull import Task
from kvtool.serve.put import Staged
from kvtool.serve.request import Request
from kvtool.serve.turns import Share, is_batch
from kvtool.serve.worker import Job, Worker

_STAGE_BLOCKS = 16
"""Blocks that are staged in one go."""


class FinishedJob(Job):
    """`pulled_blocks`: leading blocks that came from the pool. Once finished: `tokens` is prompt and answer, `put_from`
    the next block to stage."""

    def __init__(self, request: Request, keys: PromptKeys, now_s: float) -> None:
        super().__init__(request, now_s)
        self.keys = keys
        self.pulled_blocks = self.put_from = 0
        self.tokens: tuple[int, ...] = request.tokens
        self.turn_keys: list[BlockKey] = []


J = TypeVar("J", bound=FinishedJob)


class BacklogWorker(Worker[J]):
    """A worker whose ended requests may hold their sequences until their blocks are on the way to the pool."""

    def __init__(
        self,
        engine: Engine,
        pool: Pool | None,
        namespace: str,
        options: DecodeOptions,
        *,
        clock: Clock | None,
        close_pool: bool,
    ) -> None:
        self._decode_options = options
        self._canonicalising = Share(options.canonicalise_share)
        self._backlog: deque[J] = deque()
        super().__init__(
            engine,
            pool,
            namespace,
            options.pool,
            queue_max=options.queue_max,
            staging_blocks_max=options.staging_blocks_max,
            clock=clock,
            close_pool=close_pool,
        )

    def _keeps(self, job: J) -> bool:
        return job in self._backlog

    def _retire(self, job: J, generated: Sequence[int]) -> None:
        """Keep the sequence for a while if it has blocks that the pool may not know, else give it back."""
        job.tokens = (*job.request.tokens, *generated)
        job.end = len(job.tokens) // self._block_tokens * self._block_tokens
        job.put_from = job.pulled_blocks
        has_next = self._decode_options.canonicalise and job.request.publish and not is_batch(job)
        wanted = has_next and job.end > job.put_from * self._block_tokens
        if self._putter is None or not wanted or self._gate.rests(self._clock.now_s()):
            self._release(job)
            return
        job.at = min(len(job.request.tokens) - 1, job.end)
        job.turn_keys = block_keys(job.keys.seed, job.tokens, self._block_tokens)
        if self._puller is not None:
            job.task = self._puller.match(job.id, job.turn_keys, lambda task: None)
        self._backlog.append(job)
        if len(self._backlog) > self._decode_options.backlog_max:
            self._drop_oldest()

    def _drop_oldest(self) -> bool:
        if not self._backlog:
            return False
        self._release(self._backlog.popleft())
        self._count("backlog_dropped")
        return True

    def _tidy(self) -> bool:
        """One chunk of work for the oldest finished request: compute canonical KV, or stage blocks for the pool."""
        if not self._backlog or not self._canonicalising.may_run():
            return False
        job, began_s = self._backlog[0], time.perf_counter()
        if job.task is not None and not self._matched(job, job.task):
            return False
        try:
            over = False
            if job.put_from == len(job.turn_keys):
                over = True
            elif job.left > 0:
                self._compute(job, job.tokens, self._chunk_end(job, self._decode_options.tidy_tokens))
            elif self._putter is not None and self._putter.room == 0:
                return False  # come again when the put thread has given staging back
            else:
                over = self._stage(job)
        except Exception as error:  # nobody waits for this answer: forget it
            self._engine_error(job, "canonicalising", error)
            self._count("backlog_failed")
            over = True
        if over:
            self._backlog.popleft()
            self._release(job)
        self._canonicalising.spent(time.perf_counter() - began_s)
        return True

    def _matched(self, job: J, task: Task) -> bool:
        """Whether it is known by now what the pool has; leading blocks that it has are not put again."""
        assert self._puller is not None
        if not task.done.is_set() and not (self._clock.now_s() >= task.due_at_s and self._puller.give_up(task)):
            return False
        job.task, job.put_from = None, max(job.put_from, task.matched if task.done.is_set() else 0)
        return True

    def _stage(self, job: J) -> bool:
        """Stage the next blocks for which there is room. True: all are on their way."""
        assert self._putter is not None and job.sequence is not None
        count = min(_STAGE_BLOCKS, len(job.turn_keys) - job.put_from, self._putter.room)
        keys = job.turn_keys
        batch = Staged(job.id, self._clock.now_s())
        for index in range(job.put_from, job.put_from + count):
            self._putter.stage(batch, job.sequence, index, keys[index], keys[index - 1] if index else None)
        job.put_from += count
        self._putter.send(batch, lambda batch: self._wake.set())
        self._count("turn_blocks_put", count)
        return job.put_from == len(job.turn_keys)
