"""What prefill and decode workers have in common: one engine thread, requests that end exactly once, and an audit.

The engine's thread is the only one that opens, computes on and closes sequences. Everything else (submitting, pulling,
putting, cancelling) leaves a note and wakes it. Each turn of the loop does a bounded piece of work: one chunk, one
decode step. A clock tick ends what is due even when nothing else happens.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvtool.clock import Clock, SystemClock
from kvtool.engine.base import Engine, SequenceKV
from kvtool.errors import Cancelled, DeadlinePassed, EngineFailed, KvtoolError, Overloaded, RequestRefused, Unavailable
from kvtool.pool.base import Pool
from kvtool.serve.check import check_request
from kvtool.serve.gate import FetchGate, Mean
from kvtool.serve.options import PoolOptions
from kvtool.serve.pull import Puller, Task
from kvtool.serve.put import Putter
from kvtool.serve.request import Request
from kvtool.serve.turns import Beside, batch_share, is_batch

log = logging.getLogger(__name__)

_TICK_S = 0.02
_IDLE_S = 1.0
_IMPORT_S = 5.0
_AGAIN_S = 1.0
"""When a batch request that gave way may come again."""


@dataclass(frozen=True)
class Held:
    """One thing that a worker holds now. `owner` is a request id; `what`: request, kv_blocks, pull or staging."""

    owner: str
    what: str
    count: int
    age_s: float


class Job:
    """A request from submit to its end. `priority`, `arrived_at_s`, `served_at_s` and `left` are what turns go by."""

    def __init__(self, request: Request, now_s: float) -> None:
        self.request = request
        self.priority = request.priority
        self.arrived_at_s = self.served_at_s = now_s
        self.deadline_at_s = now_s + request.deadline_s
        self.cancelled = self.finished = False
        self.firm = False
        """A batch request that online ones do not take memory from."""
        self.sequence: SequenceKV | None = None
        self.sequence_at_s = now_s
        self.task: Task | None = None
        """Its call to the pool that runs now."""
        self.at = self.end = 0
        """Canonical KV of [0, at) is there; [at, end) is to be computed."""

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def left(self) -> int:
        return self.end - self.at


J = TypeVar("J", bound=Job)


class Worker(ABC, Generic[J]):
    """`role` names it in errors; `queue_max` bounds what may wait."""

    role = "worker"

    def __init__(
        self,
        engine: Engine,
        pool: Pool | None,
        namespace: str,
        pool_options: PoolOptions,
        *,
        queue_max: int,
        staging_blocks_max: int,
        clock: Clock | None,
        close_pool: bool,
    ) -> None:
        self._engine, self._pool, self._namespace = engine, pool, namespace
        self._clock = clock or SystemClock()
        self._queue_max, self._close_pool = queue_max, close_pool
        self._block_tokens = engine.layout.block_tokens
        self._gate = FetchGate(pool_options, self._block_tokens, engine.layout.block_size)
        self._beside = Beside()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._quiet = threading.Condition()
        self._closing = False
        self._jobs: dict[str, J] = {}
        self._holders: dict[int, J] = {}
        """Who has a sequence open, by id(); a job may hold one after its request has ended."""
        self._counts: dict[str, int] = {}
        self._finish_rate = Mean()
        self._finished_at_s: float | None = None
        self._puller: Puller | None = None
        self._putter: Putter | None = None
        if pool is not None:
            self._puller = Puller(engine, pool, self._gate, pool_options, self._clock, self._wake.set)
            self._putter = Putter(engine, pool, self._gate, pool_options, staging_blocks_max, self._clock)
        self._thread = threading.Thread(target=self._run, name=f"kvtool-{self.role}", daemon=True)

    # What a role adds.

    @abstractmethod
    def _turn(self, now_s: float) -> bool:
        """One bounded piece of work on the engine's thread; False when there is nothing to do right now."""

    @abstractmethod
    def _advance(self, job: J, now_s: float) -> None:
        """Move one request on where that costs next to nothing: its end, its pull, its stage."""

    @abstractmethod
    def _end(self, job: J, error: KvtoolError) -> None:
        """Give the request its error, through `_claim`. Any thread."""

    @abstractmethod
    def _waits(self, job: J) -> bool:
        """Whether a request waits for its turn to hold KV memory. Under the lock."""

    # What callers use.

    def cancel(self, request_id: str) -> bool:
        """Stop a request; its callback gets `Cancelled`. False: no such request runs here (any more)."""
        with self._lock:
            job = self._jobs.get(request_id)
            if job is None:
                return False
            job.cancelled = True
        self._wake.set()
        return True

    def hold(self, seconds: float) -> None:
        """Batch requests give way for so long, as online ones wait for a first token on the same cores; 0: no more."""
        self._beside.hold(self._clock.now_s() + seconds)
        self._wake.set()

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing is held any more, at the latest after `timeout_s`: no request, KV block, pull or put."""
        until_s = time.monotonic() + timeout_s
        while self.audit():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                return False
            with self._quiet:
                self._quiet.wait(min(left_s, _TICK_S))
        return True

    def close(self, timeout_s: float = 30.0) -> None:
        """End every request with `Unavailable`, give everything back and stop. Idempotent."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        with self._lock:
            left = list(self._jobs.values())
        for job in left:  # only where the engine's thread hangs in a computation
            self._end(job, self._closed_error(job.id))
        if self._puller is not None:
            self._puller.close()
        if self._putter is not None:
            self._putter.close(timeout_s)
        if self._close_pool and self._pool is not None:
            self._pool.close()

    def audit(self) -> list[Held]:
        """Everything held now; empty when idle."""
        now_s = self._clock.now_s()
        with self._lock:
            held = [Held(job.id, "request", 1, now_s - job.arrived_at_s) for job in self._jobs.values()]
        if self._putter is not None:
            held += [Held(batch.owner, "staging", len(batch.puts), now_s - batch.at_s) for batch in self._putter.held()]
        if self._puller is not None:
            held += [Held(task.owner, "pull", 1, now_s - task.began_at_s) for task in self._puller.running()]
        with self._lock:
            for job in self._holders.values():
                if job.sequence is not None:
                    blocks = job.sequence.capacity_tokens // self._block_tokens
                    held.append(Held(job.id, "kv_blocks", blocks, now_s - job.sequence_at_s))
        return held

    def status(self) -> dict[str, Any]:
        """Counts and sizes for operators: plain JSON."""
        now_s = self._clock.now_s()
        with self._lock:
            oldest_s = max((now_s - job.arrived_at_s for job in self._jobs.values()), default=0.0)
            status: dict[str, Any] = {
                "role": self.role,
                "queued": sum(self._waits(job) for job in self._jobs.values()),
                "requests": len(self._jobs),
                "batch": sum(is_batch(job) for job in self._jobs.values()),
                "oldest_s": round(oldest_s, 3),
                "blocks_free": self._engine.blocks_free,
                "blocks_total": self._engine.blocks_total,
                "counts": dict(self._counts),
                "alive": self._thread.is_alive(),
            }
        status["rates"] = {
            "compute_tokens_s": self._gate.compute_tokens_s.value,
            "fetch_bytes_s": self._gate.fetch_bytes_s.value,
            "requests_s": self._finish_rate.value,
        }
        if self._pool is not None and self._puller is not None and self._putter is not None:
            status["pool"] = {
                **vars(self._pool.counts()),
                "breaker_opened": self._gate.opened,
                "pulls_abandoned": self._puller.abandoned,
                "puts": dict(self._putter.outcomes),
                "puts_dropped": self._putter.dropped,
            }
        return status

    # What roles use.

    def _accept(self, request: Request, make: Callable[[float], J], check: Callable[[], None]) -> J:
        """Check and register. Raises what the request's callback must be told."""
        check_request(request, self._engine)
        check()
        with self._lock:
            if self._closing:
                raise self._closed_error(request.request_id)
            if request.request_id in self._jobs:
                raise RequestRefused(f"{request.request_id}: a request with this id runs already; ids must differ")
            waiting = [job for job in self._jobs.values() if self._waits(job)]
            self._check_queue(request, len(waiting), self._queue_max, "requests")
            if is_batch(request):
                own = sum(is_batch(job) for job in waiting)
                self._check_queue(request, own, batch_share(self._queue_max), "batch requests")
            job = make(self._clock.now_s())
            self._jobs[job.id] = job
            self._count("accepted")
        return job

    def _check_queue(self, request: Request, queued: int, most: int, what: str) -> None:
        if queued >= most:
            rate = self._finish_rate.value or 1.0
            raise Overloaded(
                f"{request.request_id}: {queued} {what} wait for this {self.role} worker, its limit is {most}; "
                "try again later or elsewhere",
                retry_after_s=min(30.0, max(0.1, queued / rate)),
            )

    def _claim(self, job: J, outcome: str) -> bool:
        """Whether the caller is the one who ends this request; exactly one is."""
        now_s = self._clock.now_s()
        with self._lock:
            if job.finished:
                return False
            job.finished = True
            self._jobs.pop(job.id, None)
            self._count(outcome)
            if self._finished_at_s is not None:
                self._finish_rate.add(1, max(now_s - self._finished_at_s, 1e-3))
            self._finished_at_s = now_s
        return True

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + by

    def _open(self, job: J, tokens: int, now_s: float) -> None:
        """Raises EngineFull."""
        sequence = self._engine.open(tokens)
        with self._lock:
            job.sequence, job.sequence_at_s = sequence, now_s
            self._holders[id(job)] = job

    def _release(self, job: J) -> None:
        """Give the job's KV blocks back. On the engine's thread; harmless where there are none."""
        with self._lock:
            sequence, job.sequence = job.sequence, None
            self._holders.pop(id(job), None)
        if sequence is not None:
            self._engine.close(sequence)

    def _advance_all(self, jobs: list[J], now_s: float) -> None:
        """A fault of ours in one request's handling ends that request and no other. What ended requests still hold is
        released: they do that themselves, unless they were ended from outside, as by a `close` that lost patience."""
        for job in jobs:
            try:
                self._advance(job, now_s)
            except Exception as error:
                self._stop(job, self._engine_error(job, "handling the request", error))
        for job in list(self._holders.values()):
            if job.finished and not self._keeps(job):
                self._release(job)

    def _give_way(self, jobs: list[J]) -> bool:
        """End the batch request that lost least by it, for an online one's memory. False: there is none. It may come
        again: the blocks of its prompt are in the pool by then."""
        least: J | None = None
        for job in jobs:
            yields = is_batch(job) and not (job.firm or job.finished) and job.task is None and job.sequence is not None
            if yields and (least is None or job.sequence_at_s > least.sequence_at_s):
                least = job
        if least is None:
            return False
        self._count("gave_way")
        error = Overloaded(f"{least.id}: gave way to online requests; send it again", retry_after_s=_AGAIN_S)
        self._stop(least, error)
        return True

    def _stop(self, job: J, error: KvtoolError) -> None:
        self._release(job)
        self._end(job, error)

    def _keeps(self, job: J) -> bool:
        """Whether an ended request may hold its sequence yet."""
        return False

    def _compute(self, job: J, tokens: tuple[int, ...], end: int) -> float:
        """One chunk [job.at, end) by the prefill path; the seconds that it took."""
        assert job.sequence is not None
        began_s = time.perf_counter()
        self._engine.prefill(job.sequence, tokens, job.at, end)
        seconds = time.perf_counter() - began_s
        step = self._block_tokens  # engines compute whole blocks, however few of their tokens are wanted
        self._gate.compute_tokens_s.add((-(-end // step) - job.at // step) * step, seconds)
        self._count("computed_tokens", end - job.at)
        job.at = end
        job.served_at_s = self._clock.now_s()
        return seconds

    def _chunk_end(self, job: J, chunk_tokens: int) -> int:
        """The next chunk's end: a block boundary, or the end of what is to be computed. A batch request's is no longer
        than an online request may be made to wait."""
        if is_batch(job):
            now_s = self._clock.now_s()
            self._beside.ran(now_s)
            rate = self._gate.compute_tokens_s.value or 0.0
            chunk_tokens = min(chunk_tokens, int(rate * self._beside.piece_s(now_s)))
        end = job.at + chunk_tokens
        aligned = end - end % self._block_tokens
        return min(job.end, aligned if aligned > job.at else job.at + self._block_tokens)

    def _overdue(self, job: J, now_s: float) -> KvtoolError | None:
        """Why a request must end now, if it must."""
        if self._closing:
            return self._closed_error(job.id)
        if job.cancelled:
            return Cancelled(f"{job.id}: cancelled")
        if now_s >= job.deadline_at_s:
            return DeadlinePassed(
                f"{job.id}: not done within its deadline of {job.request.deadline_s:g} s (in {self.role})"
            )
        return None

    def _engine_error(self, job: J, what: str, error: Exception) -> KvtoolError:
        log.exception("engine failed request=%s in=%s", job.id, what, exc_info=error)
        if isinstance(error, KvtoolError):
            return error
        return EngineFailed(f"{job.id}: the engine failed in {what}: {type(error).__name__}: {error}")

    def _closed_error(self, request_id: str) -> Unavailable:
        return Unavailable(f"{request_id}: this {self.role} worker is closing; send the request to another instance")

    def _call(self, what: str, callback: Callable[[], None]) -> None:
        """A callback's own failure must not end the thread that calls it."""
        try:
            callback()
        except Exception:
            log.exception("callback failed %s", what)

    def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            try:
                worked = self._turn(self._clock.now_s())
            except Exception:  # our own bug: requests of this turn may hang until their deadline, others go on
                log.exception("turn failed role=%s", self.role)
                self._count("turns_failed")
                worked = False
            if not worked:
                with self._quiet:
                    self._quiet.notify_all()
                self._wake.wait(_TICK_S if self._jobs else _IDLE_S)
        with self._lock:
            left = list(self._jobs.values())
        for job in left:
            self._end(job, self._closed_error(job.id))
        for job in list(self._holders.values()):
            if job.task is not None and not job.task.abandon():
                job.task.done.wait(_IMPORT_S)  # its memory is being written to
            self._release(job)
        with self._quiet:
            self._quiet.notify_all()
