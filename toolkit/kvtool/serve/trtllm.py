"""What prefill and decode workers over TensorRT-LLM have in common: one asyncio loop, requests that end exactly once.

TensorRT-LLM batches, schedules and keeps KV by itself, so a worker here only carries requests in and answers out. Each
is a task in the worker's loop, bounded by its deadline. A request that ends early (cancelled, late, a stop string) is
aborted in the engine, and counts as held until the engine has said that it let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kvtool.errors import (
    Cancelled,
    DeadlinePassed,
    EngineFailed,
    KvtoolError,
    Overloaded,
    RequestRefused,
    Unavailable,
)
from kvtool.serve.check import check_request
from kvtool.serve.gate import Mean
from kvtool.serve.request import Request
from kvtool.serve.worker import Held

log = logging.getLogger(__name__)

_LET_GO_S = 30.0
"""How long an aborted request is waited for; what an engine holds beyond that is its own matter."""
_TICK_S = 0.02
ENGINE = "engine"
"""The tier of hits in usage: TensorRT-LLM says how many prompt tokens it did not compute, and not where they were."""


class Generator(Protocol):
    """`engine.trtllm.llm.Llm`."""

    def generate(
        self,
        tokens: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        streaming: bool,
        handoff: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Facts:
    """What the manifest says of an engine. `context_tokens_max`: prompt and answer together."""

    vocab_size: int
    context_tokens_max: int
    block_tokens: int
    eos_token_ids: frozenset[int]


class LlmJob:
    """A request from submit to its end. `output` is TensorRT-LLM's, once it has the request."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrived_s = time.monotonic()
        self.finished = False
        self.output: Any = None
        self.task: asyncio.Task[None] | None = None
        self.error: KvtoolError | None = None
        """Why it was asked to end."""

    @property
    def id(self) -> str:
        return self.request.request_id


J = TypeVar("J", bound=LlmJob)


class LlmWorker(ABC, Generic[J]):
    """`queue_max`: requests that the worker takes at once; TensorRT-LLM decides which of them run."""

    role = "worker"

    def __init__(self, llm: Generator, facts: Facts, *, queue_max: int) -> None:
        self._llm, self._facts, self._queue_max = llm, facts, queue_max
        self._lock = threading.Lock()
        self._closing = False
        self._jobs: dict[str, J] = {}
        self._leaving: dict[int, tuple[str, float]] = {}
        """Aborted and not yet let go by the engine: id() of the output -> request, since when."""
        self._counts: dict[str, int] = {}
        self._rate = Mean()
        self._ended_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._background: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"kvtool-{self.role}", daemon=True)
        self._thread.start()

    # What a role adds.

    @abstractmethod
    async def _run(self, job: J) -> None:
        """Serve one request to its good end. Raises what ends it otherwise."""

    @abstractmethod
    def _end(self, job: J, error: KvtoolError) -> None:
        """Give the request its error. In the loop; called once at most, and not after a good end."""

    # What callers use. Any thread.

    def cancel(self, request_id: str) -> bool:
        """Stop a request; its callback gets `Cancelled`. False: no such request runs here (any more)."""
        with self._lock:
            job = self._jobs.get(request_id)
        if job is None:
            return False
        self._loop.call_soon_threadsafe(self._stop, job, Cancelled(f"{request_id}: cancelled"))
        return True

    def hold(self, seconds: float) -> None:
        """Nothing to do: TensorRT-LLM orders what it has by itself, and instances have GPUs of their own. The front
        lets batch requests come one by one while online ones wait."""

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether nothing is held any more, at the latest after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while self.audit():
            if time.monotonic() >= until_s:
                return False
            time.sleep(_TICK_S)
        return True

    def audit(self) -> list[Held]:
        """Everything held now; empty when idle. `engine`: an aborted request that the engine has not let go."""
        now_s = time.monotonic()
        with self._lock:
            held = [Held(job.id, "request", 1, now_s - job.arrived_s) for job in self._jobs.values()]
            held += [Held(owner, ENGINE, 1, now_s - since_s) for owner, since_s in self._leaving.values()]
        return held

    def status(self) -> dict[str, Any]:
        """Counts and sizes for operators: plain JSON."""
        now_s = time.monotonic()
        with self._lock:
            return {
                "role": self.role,
                "queued": sum(job.output is None for job in self._jobs.values()),
                "requests": len(self._jobs),
                "oldest_s": round(max((now_s - job.arrived_s for job in self._jobs.values()), default=0.0), 3),
                "leaving": len(self._leaving),
                "counts": dict(self._counts),
                "rates": {"requests_s": self._rate.value},
                "alive": self._thread.is_alive(),
            }

    def close(self, timeout_s: float = 30.0) -> None:
        """End every request with `Unavailable`, then shut the engine down. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result(timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self._loop.close()
        self._llm.close()

    # What roles use.

    def _accept(self, request: Request, make: Callable[[], J], check: Callable[[], None]) -> J:
        """Check, register and start. Raises what the request's callback must be told."""
        check_request(request, self._facts)
        check()
        with self._lock:
            if self._closing:
                raise self._closed_error(request.request_id)
            if request.request_id in self._jobs:
                raise RequestRefused(f"{request.request_id}: a request with this id runs already; ids must differ")
            if len(self._jobs) >= self._queue_max:
                raise Overloaded(
                    f"{request.request_id}: {len(self._jobs)} requests are at this {self.role} worker, its limit is "
                    f"{self._queue_max}; try again later or elsewhere",
                    retry_after_s=min(30.0, max(0.1, 1.0 / (self._rate.value or 1.0))),
                )
            job = make()
            self._jobs[job.id] = job
            self._counts["accepted"] = self._counts.get("accepted", 0) + 1
        self._loop.call_soon_threadsafe(self._begin, job)
        return job

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + by

    def _claim(self, job: J, outcome: str, *, abort: bool = True) -> bool:
        """Whether the caller is the one who ends this request; exactly one is. What the engine still runs for it is
        aborted, unless it is about to end that itself. In the loop."""
        now_s = time.monotonic()
        with self._lock:
            if job.finished:
                return False
            job.finished = True
            output = job.output if abort and job.output is not None and not job.output.finished else None
            if output is not None:
                self._leaving[id(output)] = (job.id, now_s)
            self._jobs.pop(job.id, None)
            self._counts[outcome] = self._counts.get(outcome, 0) + 1
            self._rate.add(1, max(now_s - self._ended_s, 1e-3))
            self._ended_s = now_s
        if output is not None:
            self._call(f"abort request={job.id}", output.abort)
            self._keep(self._loop.create_task(self._drain(output)))
        return True

    def _generate(
        self, job: J, sampling: Mapping[str, Any], *, streaming: bool, handoff: Mapping[str, Any] | None = None
    ) -> Any:
        """Hand the request to the engine. Raises RequestRefused: the engine refuses it."""
        request = job.request
        try:
            output = self._llm.generate(
                request.tokens, sampling, streaming=streaming, handoff=handoff, salt=request.salt
            )
        except ValueError as error:
            raise RequestRefused(f"{job.id}: TensorRT-LLM refuses the request: {error}") from None
        job.output = output
        return output

    def _call(self, what: str, callback: Callable[[], None]) -> None:
        """A callback's own failure must not end the task that calls it."""
        try:
            callback()
        except Exception:
            log.exception("callback failed %s", what)

    def _max_tokens(self, request: Request) -> int:
        """What the context window leaves of the request's max_tokens."""
        return min(request.max_tokens, self._facts.context_tokens_max - len(request.tokens))

    def _cached(self, output: Any, prompt_tokens: int) -> int:
        """Prompt tokens that the engine did not compute; versions that do not say count as none."""
        return min(int(getattr(output, "cached_tokens", 0) or 0), prompt_tokens)

    @property
    def _ends(self) -> Collection[int]:
        return self._facts.eos_token_ids

    # In the loop.

    def _begin(self, job: J) -> None:
        job.task = self._loop.create_task(self._serve(job))
        self._keep(job.task)

    def _stop(self, job: J, error: KvtoolError) -> None:
        if not job.finished and job.task is not None:
            job.error = error
            job.task.cancel()

    async def _serve(self, job: J) -> None:
        """One request to its end, whatever that is."""
        left_s = job.request.deadline_s - (time.monotonic() - job.arrived_s)
        error: KvtoolError | None = None
        try:
            await asyncio.wait_for(self._run(job), max(left_s, 0.0))
        except asyncio.TimeoutError:
            error = DeadlinePassed(
                f"{job.id}: not done within its deadline of {job.request.deadline_s:g} s (in {self.role})"
            )
        except asyncio.CancelledError:
            error = job.error or self._closed_error(job.id)
        except KvtoolError as failed:
            error = failed
        except Exception as failed:
            log.exception("engine failed request=%s", job.id)
            error = EngineFailed(f"{job.id}: TensorRT-LLM failed: {type(failed).__name__}: {failed}")
        if error is not None and self._claim(job, "cancelled" if isinstance(error, Cancelled) else "failed"):
            self._end(job, error)

    async def _drain(self, output: Any) -> None:
        """Until the engine has said its last word on an aborted request."""
        try:
            await asyncio.wait_for(_rest(output), _LET_GO_S)
        except Exception as error:
            log.warning("aborted request did not end cleanly error=%r", error)
        finally:
            with self._lock:
                self._leaving.pop(id(output), None)

    async def _end_all(self) -> None:
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            self._stop(job, self._closed_error(job.id))
        while self._background:
            await asyncio.wait(self._background)
        await self._loop.shutdown_default_executor()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._background.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._background.discard)

    def _closed_error(self, request_id: str) -> Unavailable:
        return Unavailable(f"{request_id}: this {self.role} worker is closing; send the request to another instance")


async def _rest(output: Any) -> None:
    async for _ in output:
        pass
