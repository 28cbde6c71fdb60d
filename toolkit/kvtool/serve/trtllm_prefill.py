"""The prefill worker over TensorRT-LLM: prompts in, KV where decode can have it, a hand-off out.

Two ways, by `handoff`:

- transceiver: a context_only request. TensorRT-LLM keeps the KV until a generation server pulls it, or its transfer
  timeout ends that; the hand-off carries what the generation request needs (opaque state, first token). It serves once.
- pool: an ordinary request of one token, whose blocks the connector saves into the pool. The hand-off goes out when the
  pool has them, or the time for puts is over: a decode instance that asked too early would compute them again. A prompt
  whose whole blocks are in the pool already is answered without the engine.

A canary is an ordinary request either way: nobody would ever pull its KV.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

from kvtool.errors import EngineFailed, KvtoolError
from kvtool.serve.handoff import Handoff, PrefillDone
from kvtool.serve.options import LlmOptions
from kvtool.serve.request import Request, Usage
from kvtool.serve.trtllm import ENGINE, Facts, Generator, LlmJob, LlmWorker
from kvtool.serve.trtllm_terms import context_keywords, handoff_state, sampling_keywords

OnDone = Callable[[PrefillDone], None]
_POLL_S = (0.005, 0.01, 0.02, 0.05)


class Residence(Protocol):
    """What the pool holds of a prompt, asked through the keys that the connector saves under. Blocking; any thread."""

    def blocks(self, tokens: tuple[int, ...]) -> int:
        """How many leading blocks of a request without salt are there, all of their parts."""

    def close(self) -> None: ...


class _Job(LlmJob):
    def __init__(self, request: Request, done: OnDone) -> None:
        super().__init__(request)
        self.done = done
        self.usage = Usage(prompt_tokens=len(request.tokens))


class LlmPrefillWorker(LlmWorker[_Job]):
    """See the module. `residence` None: there is no pool to wait for. `own_ids`: see `context_keywords`."""

    role = "prefill"

    def __init__(
        self,
        llm: Generator,
        facts: Facts,
        options: LlmOptions,
        residence: Residence | None = None,
        *,
        own_ids: bool = False,
    ) -> None:
        self._options, self._residence, self._own_ids = options, residence, own_ids
        super().__init__(llm, facts, queue_max=options.queue_max)

    def submit(self, request: Request, done: OnDone) -> None:
        """Take a request. Never raises for its faults: `done` gets the error, then from within this call."""
        try:
            self._accept(request, lambda: _Job(request, done), lambda: None)
        except KvtoolError as error:
            self._count("refused")
            refused = PrefillDone(request.request_id, None, Usage(prompt_tokens=len(request.tokens)), error)
            self._call(f"done request={request.request_id}", lambda: done(refused))

    def close(self, timeout_s: float = 30.0) -> None:
        super().close(timeout_s)
        if self._residence is not None:
            self._residence.close()

    # In the loop.

    async def _run(self, job: _Job) -> None:
        if self._options.handoff == "transceiver" and job.request.publish:
            handoff = await self._context(job)
        else:
            handoff = await self._into_pool(job)
        usage = job.usage
        usage.computed_tokens = usage.prompt_tokens - sum(usage.hit_tokens.values())
        usage.seconds["total"] = time.monotonic() - job.arrived_s
        if self._claim(job, "done"):
            self._tell(job, PrefillDone(job.id, handoff, usage))

    async def _context(self, job: _Job) -> Handoff:
        completion = (await self._one_token(job, context_keywords(self._own_ids))).outputs[0]
        state = handoff_state(completion.disaggregated_params, completion.finish_reason)
        return Handoff(0, hit_blocks=self._hit_blocks(job), hit_tokens=dict(job.usage.hit_tokens), transfer=state)

    async def _into_pool(self, job: _Job) -> Handoff:
        step, canary = self._facts.block_tokens, not job.request.publish
        wanted = len(job.request.tokens) // step
        there = 0 if canary else await self._there(job)
        if canary or there < wanted:
            await self._one_token(job)
            there = 0 if canary else await self._saved(job, wanted)
        elif wanted:
            job.usage.hit_tokens = {ENGINE: wanted * step}
        return Handoff(there, hit_blocks=self._hit_blocks(job), hit_tokens=dict(job.usage.hit_tokens))

    async def _one_token(self, job: _Job, handoff: dict[str, Any] | None = None) -> Any:
        """The prompt through the engine; its finished output."""
        began_s = time.monotonic()
        sampling = sampling_keywords(job.request, 1, self._ends)
        output = self._generate(job, sampling, streaming=False, handoff=handoff)
        async for _ in output:
            pass
        finish = output.outputs[0].finish_reason
        if finish in ("cancelled", "timeout"):
            raise EngineFailed(f"{job.id}: TensorRT-LLM ended the prompt as {finish}")
        job.usage.seconds["prefill"] = time.monotonic() - began_s
        cached = self._cached(output, len(job.request.tokens))
        self._count("computed_tokens", len(job.request.tokens) - cached)
        job.usage.hit_tokens = {ENGINE: cached} if cached else {}
        return output

    async def _there(self, job: _Job) -> int:
        """0 too where that cannot be told: without a pool, and under a salt, which TensorRT-LLM makes a number of its
        own."""
        if self._residence is None or job.request.salt:
            return 0
        return await asyncio.to_thread(self._residence.blocks, job.request.tokens)

    async def _saved(self, job: _Job, wanted: int) -> int:
        """Wait until the pool holds `wanted` blocks, or for as long as a put may take; how many it holds."""
        began_s = time.monotonic()
        waits = itertools.chain(_POLL_S, itertools.repeat(_POLL_S[-1]))
        there = await self._there(job)
        while there < wanted and self._residence is not None and not job.request.salt:
            if time.monotonic() - began_s >= self._options.put_budget_s:
                self._count("saves_late")
                break
            await asyncio.sleep(next(waits))
            there = await self._there(job)
        job.usage.put_blocks = max(0, there - self._hit_blocks(job))
        job.usage.seconds["put"] = time.monotonic() - began_s
        return there

    def _hit_blocks(self, job: _Job) -> int:
        return sum(job.usage.hit_tokens.values()) // self._facts.block_tokens

    def _end(self, job: _Job, error: KvtoolError) -> None:
        self._tell(job, PrefillDone(job.id, None, job.usage, error))

    def _tell(self, job: _Job, done: PrefillDone) -> None:
        self._call(f"done request={job.id}", lambda: job.done(done))
