"""The prefill worker: prompts in, canonical KV into the pool, a hand-off out.

A request whose blocks are all resident is answered at once, without KV memory and without waiting for any computation.
Else it gets KV memory, pulls the resident prefix while others compute, and computes the rest in chunks. Between chunks
the worker turns to whoever should be next, so a long prompt does not hold up a short one. Whole blocks go to the pool
as they are made, the trailing partial block as a transient one.

The pool can make a request slower by a bounded time, never fail it: what cannot be fetched is computed, what cannot be
put is left to the decode instance, which computes it again.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtool.clock import Clock
from kvtool.engine.base import Engine
from kvtool.errors import Cancelled, EngineFull, KvtoolError
from kvtool.pool.base import Pool
from kvtool.serve.check import check_room
from kvtool.serve.handoff import Handoff, PrefillDone
from kvtool.serve.keys import PromptKeys, prompt_keys
from kvtool.serve.options import PrefillOptions
from kvtool.serve.pull import Task
from kvtool.serve.put import Staged, stored_run
from kvtool.serve.request import Request, Usage
from kvtool.serve.turns import FIRM_S, admission_order, batch_share, is_batch, next_chunk
from kvtool.serve.worker import Job, Worker

OnDone = Callable[[PrefillDone], None]
"""Called once, from one of the worker's threads or from within submit; must not block."""


class _Job(Job):
    """Stages: new -> looking -> waiting -> pulling -> computing -> staging -> putting -> over."""

    def __init__(self, request: Request, done: OnDone, keys: PromptKeys, now_s: float) -> None:
        super().__init__(request, now_s)
        self.done, self.keys = done, keys
        self.stage = "new"
        self.resident = 0  # leading keys that the pool said it has
        self.hit_blocks = 0
        self.hit_tokens: dict[str, int] = {}
        self.puts_sent = self.puts_done = 0
        self.stored: dict[int, int] = {}  # first index of a batch -> blocks of it that are in the pool
        self.new_blocks = 0
        self.put_from = 0  # the next block to stage
        self.put_until_s: float | None = None
        self.usage = Usage(prompt_tokens=len(request.tokens))
        self.end = keys.end


class PrefillWorker(Worker[_Job]):
    """See the module. `pool` None: every prompt is computed and no hand-off has blocks; of use for tests only."""

    role = "prefill"

    def __init__(
        self,
        engine: Engine,
        pool: Pool | None,
        namespace: str = "default",
        options: PrefillOptions | None = None,
        *,
        clock: Clock | None = None,
        close_pool: bool = False,
    ) -> None:
        self._options = options or PrefillOptions()
        super().__init__(
            engine,
            pool,
            namespace,
            self._options.pool,
            queue_max=self._options.queue_max,
            staging_blocks_max=self._options.staging_blocks_max,
            clock=clock,
            close_pool=close_pool,
        )
        self._thread.start()

    def submit(self, request: Request, done: OnDone) -> None:
        """Take a request. Never raises for its faults: `done` gets the error, then from within this call."""

        def make(now_s: float) -> _Job:
            return _Job(request, done, prompt_keys(request, self._engine, self._namespace), now_s)

        try:
            job = self._accept(request, make, lambda: check_room(request, self._engine, len(request.tokens)))
        except KvtoolError as error:
            self._count("refused")
            refused = PrefillDone(request.request_id, None, Usage(prompt_tokens=len(request.tokens)), error)
            self._call(f"done request={request.request_id}", lambda: done(refused))
            return
        self._look(job)
        self._wake.set()

    def _look(self, job: _Job) -> None:
        """Ask the pool what is resident. By the submitter, since the engine's thread may be in a long chunk."""
        with self._lock:
            if self._puller is not None:
                job.task = self._puller.match(job.id, job.keys.all, lambda task: self._looked(job, task))
            if not job.finished:
                job.stage = "waiting" if job.task is None else "looking"

    # The engine's thread.

    def _turn(self, now_s: float) -> bool:
        with self._lock:
            jobs = list(self._jobs.values())
        self._advance_all(jobs, now_s)
        urgent = any(not is_batch(job) and job.stage not in ("putting", "over") for job in jobs)
        batch = self._beside.may_run(urgent, now_s)
        self._admit(jobs, now_s, batch)
        turns = (job for job in jobs if job.stage == "computing" and (batch or not is_batch(job)))
        chosen = next_chunk(turns, now_s)
        if chosen is not None:
            self._chunk(chosen)
        return chosen is not None

    def _advance(self, job: _Job, now_s: float) -> None:
        error = self._overdue(job, now_s)
        with self._lock:
            task, stage = job.task, job.stage
        if stage in ("new", "over"):
            return
        if task is not None and not task.done.is_set():
            late = now_s >= task.due_at_s
            assert self._puller is not None
            if not (late or error) or not self._puller.give_up(task):
                return
            if stage == "pulling":
                self._pulled(job, given_up=True)
        if error is not None:
            self._stop(job, error)
        elif stage == "looking":
            job.task, job.stage = None, "waiting"
        elif job.stage == "pulling":
            self._pulled(job)
        elif stage == "staging":
            self._computed(job, now_s)
        elif stage == "putting" and job.put_until_s is not None and now_s >= job.put_until_s:
            self._done(job)

    def _looked(self, job: _Job, task: Task) -> None:
        """In the pull thread: what is resident is known. A full hit ends here and waits for no computation."""
        job.resident = task.matched
        keys = job.keys
        enough = len(keys.keys) if self._options.tail_to_decode and keys.keys else len(keys.all)
        if job.resident >= enough and not job.cancelled:
            job.hit_blocks = min(job.resident, len(keys.keys))
            self._done(job)

    def _admit(self, jobs: list[_Job], now_s: float, batch: bool) -> None:
        """`batch`: may batch requests begin. They have places of their own: one that was stopped half-way for online
        requests would else keep them out."""
        active = {kind: sum(is_batch(job) == kind for job in self._holders.values()) for kind in (False, True)}
        most = {False: self._options.active_max, True: batch_share(self._options.active_max)}
        for job in admission_order((job for job in jobs if job.stage == "waiting" and not job.finished), now_s):
            if job.end == 0:  # one token: nothing to compute, nothing to move
                self._done(job)
                continue
            kind, old = is_batch(job), now_s - job.arrived_at_s >= FIRM_S
            if active[kind] >= most[kind] or (kind and not (batch or old)):
                continue
            if not self._make_room(job, jobs, now_s):
                if kind and not old:
                    continue
                return
            job.firm = kind and old
            active[kind] += 1
            job.usage.seconds["queue"] = now_s - job.arrived_at_s
            job.served_at_s = now_s
            job.stage, job.task = "computing", None
            if self._puller is not None and job.resident and job.sequence is not None:
                job.task = self._puller.pull(job.id, job.sequence, job.keys.all[: job.resident])
                if job.task is not None:
                    job.stage = "pulling"

    def _make_room(self, job: _Job, jobs: list[_Job], now_s: float) -> bool:
        while True:
            try:
                self._open(job, job.end, now_s)
                return True
            except EngineFull:
                if is_batch(job) or not self._give_way(jobs):
                    return False

    def _pulled(self, job: _Job, given_up: bool = False) -> None:
        assert job.task is not None and job.sequence is not None
        pulled, job.task, job.stage = job.task.pulled, None, "computing"
        if given_up or not pulled.blocks:
            return
        job.at = job.sequence.length = job.keys.covered(pulled.blocks)
        job.hit_blocks = min(pulled.blocks, len(job.keys.keys))
        for tier in pulled.by_tier[: job.hit_blocks]:
            job.hit_tokens[tier] = job.hit_tokens.get(tier, 0) + self._block_tokens
        job.usage.path_bytes, job.usage.seconds["fetch"] = pulled.path_bytes, pulled.seconds
        job.put_from = pulled.blocks
        if job.left == 0:
            self._computed(job, self._clock.now_s())

    def _chunk(self, job: _Job) -> None:
        try:
            seconds = self._compute(job, job.request.tokens, self._chunk_end(job, self._options.chunk_tokens))
            job.usage.seconds["prefill"] = job.usage.seconds.get("prefill", 0.0) + seconds
            self._put(job)
        except Exception as error:
            self._stop(job, self._engine_error(job, "prefill", error))
            return
        if job.left == 0:
            self._computed(job, self._clock.now_s())

    def _put(self, job: _Job) -> bool:
        """Stage what is whole and not yet on its way, and at the end the trailing partial block. False: there is no
        room now for all of it."""
        if self._putter is None or job.sequence is None or not job.request.publish:
            return True
        keys = job.keys
        ready = job.at // self._block_tokens if job.left else len(keys.all)
        start, end = job.put_from, min(ready, job.put_from + self._putter.room)
        if end > start:
            batch = Staged(job.id, self._clock.now_s())
            for index in range(start, end):
                transient_s = self._options.tail_transient_s if index == len(keys.keys) else None
                self._putter.stage(batch, job.sequence, index, keys.all[index], keys.parent(index), transient_s)
            job.put_from = end
            job.puts_sent += 1
            self._putter.send(batch, lambda batch: self._stored(job, start, batch))
        return end == ready

    def _stored(self, job: _Job, start: int, batch: Staged) -> None:
        """In the put thread."""
        with self._lock:
            job.stored[start] = stored_run(batch.results)
            job.new_blocks += sum(result.outcome.value == "stored" for result in batch.results)
            job.puts_done += 1
            last = job.stage == "putting" and job.puts_done == job.puts_sent
        self._wake.set()
        if last:
            self._done(job)

    def _computed(self, job: _Job, now_s: float) -> None:
        """All is there. Keep the memory until all is staged, but no longer than a put may take."""
        if job.put_until_s is None:
            job.put_until_s = now_s + self._options.pool.put_budget_s
        if not self._put(job) and now_s < job.put_until_s and not self._gate.rests(now_s):
            job.stage = "staging"
            return
        self._release(job)
        with self._lock:
            job.stage = "putting"
            if job.puts_done < job.puts_sent:
                return
        self._done(job)

    # The end of a request, on any thread.

    def _done(self, job: _Job) -> None:
        if not self._claim(job, "done"):
            return
        keys, blocks = job.keys, job.hit_blocks
        with self._lock:
            while stored := job.stored.get(blocks):
                blocks += stored
            job.usage.put_blocks = job.new_blocks
        tail = keys.tail_tokens if max(blocks, job.resident) == len(keys.all) else 0
        blocks = min(blocks, len(keys.keys))
        hits = job.hit_tokens
        job.usage.hit_tokens = dict(hits)
        job.usage.computed_tokens = len(job.request.tokens) - job.hit_blocks * self._block_tokens
        job.usage.seconds["total"] = self._clock.now_s() - job.arrived_at_s
        handoff = Handoff(blocks, tail, job.hit_blocks, dict(hits), keys.seed.hex()[:16])
        self._tell(job, PrefillDone(job.id, handoff, job.usage))

    def _end(self, job: _Job, error: KvtoolError) -> None:
        if self._claim(job, "cancelled" if isinstance(error, Cancelled) else "failed"):
            self._tell(job, PrefillDone(job.id, None, job.usage, error))

    def _tell(self, job: _Job, done: PrefillDone) -> None:
        job.stage = "over"
        self._call(f"done request={job.id}", lambda: job.done(done))

    def _waits(self, job: _Job) -> bool:
        return job.sequence is None and job.stage != "putting"
