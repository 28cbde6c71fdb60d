"""The decode worker: a continuous batch over one engine, fed from the pool.

A request gets KV memory for its prompt and all its tokens, pulls the prompt's blocks while the batch runs on, has what
is missing recomputed between decode steps (by the prefill path, in chunks, within a share of the time), and then joins
the batch by feeding its last prompt token at position n - 1. A lost block is thereby a slow request and nothing else.
Without a pool the same path computes everything: one process, the same tokens.

What happens after the last token, for the conversation's next turn, is in `serve.backlog`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.clock import Clock
from kvtool.engine.base import DecodeStep, Engine
from kvtool.engine.sampling import sample
from kvtool.errors import Cancelled, EngineFull, KvtoolError, RequestRefused
from kvtool.pool.base import Pool
from kvtool.serve.backlog import BacklogWorker
from kvtool.serve.check import capacity_tokens, check_room
from kvtool.serve.decode_job import DecodeJob, hits_of
from kvtool.serve.gate import Mean
from kvtool.serve.handoff import Handoff
from kvtool.serve.keys import prompt_keys
from kvtool.serve.options import DecodeOptions
from kvtool.serve.put import Staged
from kvtool.serve.request import Event, Finish, OnEvent, Request, Usage
from kvtool.serve.text import Decoder, Step, TextStream
from kvtool.serve.turns import BESIDE_SHARE, FIRM_S, Share, admission_order, is_batch, next_chunk, together


class DecodeWorker(BacklogWorker[DecodeJob]):
    """See the module. `tokenizer` None: no stop strings, and nothing is held back."""

    role = "decode"

    def __init__(
        self,
        engine: Engine,
        tokenizer: Decoder | None = None,
        pool: Pool | None = None,
        namespace: str = "default",
        options: DecodeOptions | None = None,
        *,
        clock: Clock | None = None,
        close_pool: bool = False,
    ) -> None:
        self._options = options or DecodeOptions()
        self._tokenizer = tokenizer
        self._filling = Share(self._options.recompute_share)
        self._company = Share(BESIDE_SHARE)
        self._step_rate = Mean()
        super().__init__(engine, pool, namespace, self._options, clock=clock, close_pool=close_pool)
        self._thread.start()

    def submit(
        self,
        request: Request,
        on_event: OnEvent,
        handoff: Handoff | None = None,
        on_prompt_put: Callable[[], None] | None = None,
    ) -> None:
        """Take a request; `handoff` is what prefill returned, None where the prompt was not prefilled elsewhere.

        `on_prompt_put`, with `put_prompts`: called once, from any thread of the worker, when the blocks of the prompt
        are in the pool or dropped; not where the request ends before that.

        Never raises for the request's faults: `on_event` gets its one, final event, then from within this call.
        """

        def check() -> None:
            check_room(request, self._engine, capacity_tokens(request, self._engine))
            if request.stop and self._tokenizer is None:
                raise RequestRefused(f"{request.request_id}: stop strings need a tokenizer, this worker has none")

        def make(now_s: float) -> DecodeJob:
            keys = prompt_keys(request, self._engine, self._namespace)
            job = DecodeJob(request, on_event, handoff, keys, TextStream(self._tokenizer, request.stop), now_s)
            job.on_prompt_put = on_prompt_put
            return job

        try:
            self._accept(request, make, check)
        except KvtoolError as error:
            self._count("refused")
            usage = Usage(prompt_tokens=len(request.tokens))
            event = Event(request.request_id, 0, (), finish=Finish.ERROR, usage=usage, error=error)
            self._call(f"on_event request={request.request_id}", lambda: on_event(event))
            return
        self._wake.set()

    # The engine's thread.

    def _turn(self, now_s: float) -> bool:
        with self._lock:
            jobs = list(self._jobs.values())
        self._advance_all(jobs, now_s)
        batch = self._beside.may_run(any(job.urgent for job in jobs), now_s)
        self._admit(jobs, now_s, batch)
        running = [job for job in jobs if job.stage == "running"]
        for job in running:
            self._put_prompt(job)
        online = [job for job in running if not is_batch(job)]
        rows = self._rows(running, online, batch, now_s)
        if rows:
            self._step(rows)
        else:
            self._filling.forgive()
            self._canonicalising.forgive()
        batch = batch and (not online or self._company.may_run())
        filled = self._fill([job for job in jobs if batch or not is_batch(job)], alone=not online)
        tidied = not filled and not any(job.stage == "filling" for job in jobs) and self._tidy()
        return bool(rows) or filled or tidied

    def _rows(self, running: list[DecodeJob], online: list[DecodeJob], batch: bool, now_s: float) -> list[DecodeJob]:
        """Who takes part in the next step. `online`: those of `running` that are no batch requests."""
        if not online:
            self._company.forgive()
        batch = batch and self._company.may_run()
        rows = together(online, [job for job in running if is_batch(job)], batch, self._options.batch_max)
        if len(rows) > len(online):
            self._beside.ran(now_s)
        for job in rows:
            job.served_at_s = now_s
        return rows

    def _advance(self, job: DecodeJob, now_s: float) -> None:
        error = self._overdue(job, now_s)
        if job.task is not None:
            if not job.task.done.is_set():
                late = now_s >= job.task.due_at_s
                assert self._puller is not None
                if not (late or error) or not self._puller.give_up(job.task):
                    return
                job.task = None
            self._pulled(job)
        if error is not None:
            self._stop(job, error)
        elif job.stage == "filling" and job.left <= 0:
            self._join(job, now_s)

    def _admit(self, jobs: list[DecodeJob], now_s: float, batch: bool) -> None:
        """`batch`: may batch requests begin. They have rows of their own, since they need not take part in a step."""
        there = [job for job in jobs if job.stage in ("pulling", "filling", "running")]
        admitted = {kind: sum(is_batch(job) == kind for job in there) for kind in (False, True)}
        for job in admission_order((job for job in jobs if job.stage == "waiting"), now_s):
            kind, old = is_batch(job), now_s - job.arrived_at_s >= FIRM_S
            if admitted[kind] >= self._options.batch_max or (kind and not (batch or old)):
                continue
            if not self._make_room(job, jobs, now_s):
                if kind and not old:
                    continue
                return
            job.firm = kind and old
            admitted[kind] += 1
            job.usage.seconds["queue"] = now_s - job.arrived_at_s
            job.served_at_s = now_s
            self._start(job, now_s)

    def _make_room(self, job: DecodeJob, jobs: list[DecodeJob], now_s: float) -> bool:
        """Open the job's sequence; finished requests give up their memory for it, oldest first, and then batch requests
        for an online one."""
        while True:
            try:
                self._open(job, capacity_tokens(job.request, self._engine), now_s)
                return True
            except EngineFull:
                if not self._drop_oldest() and (is_batch(job) or not self._give_way(jobs)):
                    return False

    def _start(self, job: DecodeJob, now_s: float) -> None:
        job.stage = "filling"
        handoff = job.handoff
        empty = handoff is not None and handoff.blocks == 0 and handoff.tail == 0
        if self._puller is not None and not empty:
            assert job.sequence is not None
            drop = job.keys.tail if handoff is not None else None
            job.task = self._puller.pull(job.id, job.sequence, job.keys.all, drop)
            if job.task is not None:
                job.stage = "pulling"
        if job.stage == "filling" and job.left <= 0:
            self._join(job, now_s)

    def _pulled(self, job: DecodeJob) -> None:
        assert job.sequence is not None
        task, job.task, job.stage = job.task, None, "filling"
        if task is None or not task.pulled.blocks:
            return
        pulled = task.pulled
        job.pulled_blocks = min(pulled.blocks, len(job.keys.keys))
        job.at = job.sequence.length = min(job.keys.covered(pulled.blocks), job.end)
        job.usage.path_bytes, job.usage.seconds["fetch"] = pulled.path_bytes, pulled.seconds
        job.usage.hit_tokens = hits_of(job.handoff, pulled.by_tier[: job.pulled_blocks], self._block_tokens)

    def _fill(self, jobs: list[DecodeJob], alone: bool) -> bool:
        """Recompute one chunk of what could not be pulled, if the batch can spare the time. `alone`: no online stream
        waits for its next token meanwhile."""
        if not self._filling.may_run():
            return False
        job = next_chunk((job for job in jobs if job.stage == "filling"), self._clock.now_s())
        if job is None:
            return False
        try:
            seconds = self._compute(job, job.request.tokens, self._chunk_end(job, self._options.chunk_tokens))
        except Exception as error:
            self._stop(job, self._engine_error(job, "recomputing the prompt", error))
            return True
        job.usage.seconds["prefill"] = job.usage.seconds.get("prefill", 0.0) + seconds
        self._filling.spent(seconds)
        if is_batch(job) and not alone:
            self._company.spent(seconds)
        if job.left <= 0:
            self._join(job, self._clock.now_s())
        return True

    def _join(self, job: DecodeJob, now_s: float) -> None:
        hits = sum(job.usage.hit_tokens.values())
        job.usage.computed_tokens = len(job.request.tokens) - hits
        job.usage.seconds["join"] = now_s - job.arrived_at_s
        job.stage = "running"
        if self._options.put_prompts and self._putter is not None and job.request.publish:
            job.prompt_from = job.pulled_blocks
        elif job.on_prompt_put is not None:
            self._call(f"on_prompt_put request={job.id}", job.on_prompt_put)

    def _put_prompt(self, job: DecodeJob) -> None:
        """Stage what there is room for of the prompt's blocks. What prefill made before the first step is canonical."""
        if job.prompt_from is None or job.sequence is None or self._putter is None:
            return
        keys, start = job.keys.keys, job.prompt_from
        end = min(len(keys), job.at // self._block_tokens, start + self._putter.room)
        last = end >= min(len(keys), job.at // self._block_tokens)
        batch = Staged(job.id, self._clock.now_s())
        for index in range(start, end):
            self._putter.stage(batch, job.sequence, index, keys[index], job.keys.parent(index))
        job.prompt_from = None if last else end
        done = job.on_prompt_put if last else None
        if batch.puts:
            self._count("prompt_blocks_put", len(batch.puts))
            self._putter.send(batch, lambda batch: done() if done else None)
        elif done:
            self._call(f"on_prompt_put request={job.id}", done)

    def _step(self, running: list[DecodeJob]) -> None:
        began_s = time.perf_counter()
        for job, logits in self._logits(running):
            self._emit(job, logits)
        seconds = time.perf_counter() - began_s
        self._step_rate.add(len(running), seconds)
        self._count("steps")
        self._filling.earned(seconds)
        self._canonicalising.earned(seconds)
        batch = sum(is_batch(job) for job in running)
        if not batch:
            self._company.earned(seconds)
        elif batch < len(running):
            self._company.spent(seconds * batch / len(running))

    def _logits(self, running: list[DecodeJob]) -> list[tuple[DecodeJob, npt.NDArray[np.float32]]]:
        """One step of the batch. If it fails, each is tried alone, and only those that fail again are lost: a step that
        is repeated writes the same KV to the same position."""
        steps = []
        for job in running:
            assert job.sequence is not None
            steps.append(DecodeStep(job.sequence, job.last_token, job.position))
        try:
            rows = self._engine.decode(steps)
        except Exception as error:
            if len(running) == 1:
                self._stop(running[0], self._engine_error(running[0], "a decode step", error))
                return []
            self._count("steps_split")
            return [pair for job in running for pair in self._logits([job])]
        return list(zip(running, rows, strict=True))

    def _emit(self, job: DecodeJob, logits: npt.NDArray[np.float32]) -> None:
        """Draw the token, and send what it sets free."""
        if job.finished:
            return
        request, step = job.request, None
        try:
            token = sample(logits, request.sampling, job.position)
            job.usage.seconds.setdefault("ttft", self._clock.now_s() - job.arrived_at_s)
            if token in self._engine.eos_token_ids and not request.ignore_eos:
                self._finish(job, Finish.STOP, job.text.flush())
                return
            job.generated.append(token)
            self._count("generated_tokens")
            step = job.text.push(token)
            if step is not None and step.stopped:
                self._finish(job, Finish.STOP, step)
                return
            last = len(job.generated) == request.max_tokens or job.position + 1 == self._engine.context_tokens_max
            if last and step is None:
                step = job.text.flush()
        except Exception as error:
            self._stop(job, self._engine_error(job, "drawing a token", error))
            return
        if last and step is not None and not job.text.held:
            self._finish(job, Finish.LENGTH, step)
            return
        if step is not None:
            self._send(job, Event(job.id, job.sent, step.tokens, step.context, step.cut_chars))
        if last:
            self._finish(job, Finish.LENGTH, job.text.flush())

    def _send(self, job: DecodeJob, event: Event) -> None:
        job.sent += len(event.tokens)
        self._call(f"on_event request={job.id}", lambda: job.on_event(event))

    def _finish(self, job: DecodeJob, finish: Finish, step: Step) -> None:
        if self._claim(job, finish.value):
            self._last(job, finish, step.tokens, step.context, step.cut_chars)
        self._retire(job, job.generated)

    # The end of a request, on any thread.

    def _end(self, job: DecodeJob, error: KvtoolError) -> None:
        cancelled = isinstance(error, Cancelled)
        if self._claim(job, "cancelled" if cancelled else "failed"):
            finish = Finish.CANCELLED if cancelled else Finish.ERROR
            self._last(job, finish, error=None if cancelled else error)

    def _last(
        self,
        job: DecodeJob,
        finish: Finish,
        tokens: tuple[int, ...] = (),
        context: tuple[int, ...] = (),
        cut_chars: int = 0,
        error: KvtoolError | None = None,
    ) -> None:
        job.stage = "over"
        job.usage.completion_tokens = len(job.generated)
        job.usage.seconds["total"] = self._clock.now_s() - job.arrived_at_s
        self._send(job, Event(job.id, job.sent, tokens, context, cut_chars, finish, job.usage, error))

    def _waits(self, job: DecodeJob) -> bool:
        return job.stage == "waiting"

    def status(self) -> dict[str, Any]:
        status = super().status()
        with self._lock:
            stages = [job.stage for job in self._jobs.values()]
        status |= {stage: stages.count(stage) for stage in ("pulling", "filling", "running")}
        status["backlog"] = len(self._backlog)
        status["rates"]["decode_tokens_s"] = self._step_rate.value
        return status
