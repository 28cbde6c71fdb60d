"""The decode worker over TensorRT-LLM: one streaming request for each, its tokens sent as soon as their text is clear.

With `handoff` pool the engine finds the prompt's blocks through the connector, and whatever it does not find it
computes; a hand-off says only what was a hit. With transceiver the hand-off is a must: a generation_only request pulls
the KV that the context request left. Without one the engine would compute the prompt, where no room was planned for
that, so the request is refused. A canary has no prompt to speak of and needs none.

Stop strings, end tokens and the length are watched here too, token by token: an engine may send several at once, and
ids are read from the whole list each time, since what a step added is told in different ways by different versions.
"""

from __future__ import annotations

import time
from typing import Any

from kvtool.errors import Cancelled, DeadlinePassed, EngineFailed, KvtoolError, RequestRefused
from kvtool.serve.handoff import Handoff
from kvtool.serve.options import LlmOptions
from kvtool.serve.request import Event, Finish, OnEvent, Request, Usage
from kvtool.serve.text import Decoder, Step, TextStream
from kvtool.serve.trtllm import ENGINE, Facts, Generator, LlmJob, LlmWorker
from kvtool.serve.trtllm_terms import FINISHED, generation_keywords, sampling_keywords


class _Job(LlmJob):
    def __init__(self, request: Request, on_event: OnEvent, handoff: Handoff | None, text: TextStream) -> None:
        super().__init__(request)
        self.on_event, self.handoff, self.text = on_event, handoff, text
        self.generated = self.sent = 0
        self.usage = Usage(prompt_tokens=len(request.tokens))


class LlmDecodeWorker(LlmWorker[_Job]):
    """See the module. `tokenizer` None: no stop strings, and nothing is held back."""

    role = "decode"

    def __init__(self, llm: Generator, facts: Facts, options: LlmOptions, tokenizer: Decoder | None = None) -> None:
        self._options, self._tokenizer = options, tokenizer
        super().__init__(llm, facts, queue_max=options.queue_max)

    def submit(self, request: Request, on_event: OnEvent, handoff: Handoff | None = None) -> None:
        """Take a request; `handoff` is what prefill returned, None where the prompt was not prefilled elsewhere.

        Never raises for the request's faults: `on_event` gets its one, final event, then from within this call.
        """

        def check() -> None:
            if request.stop and self._tokenizer is None:
                raise RequestRefused(f"{request.request_id}: stop strings need a tokenizer, this worker has none")
            if self._options.handoff == "transceiver" and request.publish and not (handoff and handoff.transfer):
                raise RequestRefused(
                    f"{request.request_id}: wanted the hand-off of a context request, found none: with handoff "
                    "transceiver this server only generates; send prompts to the front model"
                )

        try:
            self._accept(
                request, lambda: _Job(request, on_event, handoff, TextStream(self._tokenizer, request.stop)), check
            )
        except KvtoolError as error:
            self._count("refused")
            usage = Usage(prompt_tokens=len(request.tokens))
            event = Event(request.request_id, 0, (), finish=Finish.ERROR, usage=usage, error=error)
            self._call(f"on_event request={request.request_id}", lambda: on_event(event))

    # In the loop.

    async def _run(self, job: _Job) -> None:
        state = job.handoff.transfer if job.handoff is not None else {}
        keywords = generation_keywords(state) if state else None
        if state.get(FINISHED):  # the context request's one token was the last
            if self._take(job, state["first_gen_tokens"], job.request.max_tokens):
                return
            self._finish(job, Finish.STOP, job.text.flush())
            return
        limit = self._max_tokens(job.request)
        sampling = sampling_keywords(job.request, limit, self._ends)
        output = self._generate(job, sampling, streaming=True, handoff=keywords)
        seen = 0
        async for _ in output:
            self._note_hits(job, output)
            tokens = output.outputs[0].token_ids or []
            new, seen = tokens[seen:], max(seen, len(tokens))
            if self._take(job, new, limit):
                return
        self._close_stream(job, output.outputs[0].finish_reason)

    def _take(self, job: _Job, tokens: list[int], limit: int) -> bool:
        """Send what `tokens` set free; whether the request ended with them."""
        for token in tokens:
            job.usage.seconds.setdefault("ttft", time.monotonic() - job.arrived_s)
            if token in self._ends and not job.request.ignore_eos:
                self._finish(job, Finish.STOP, job.text.flush())
                return True
            job.generated += 1
            self._count("generated_tokens")
            step = job.text.push(token)
            if step is not None and step.stopped:  # only we know of stop strings
                self._finish(job, Finish.STOP, step, abort=True)
                return True
            if job.generated == limit:
                self._finish_length(job, step)
                return True
            if step is not None:
                self._send(job, Event(job.id, job.sent, step.tokens, step.context, step.cut_chars))
        return False

    def _finish_length(self, job: _Job, step: Step | None) -> None:
        if step is None:
            step = job.text.flush()
        elif job.text.held:
            self._send(job, Event(job.id, job.sent, step.tokens, step.context, step.cut_chars))
            step = job.text.flush()
        self._finish(job, Finish.LENGTH, step)

    def _close_stream(self, job: _Job, reason: str | None) -> None:
        """The engine ended the request before we did."""
        if reason in ("stop", "length"):
            self._finish(job, Finish(reason), job.text.flush())
        elif reason == "timeout":
            raise DeadlinePassed(f"{job.id}: TensorRT-LLM ended the request as timed out")
        else:
            raise EngineFailed(f"{job.id}: TensorRT-LLM ended the request as {reason or 'nothing it names'}")

    def _note_hits(self, job: _Job, output: Any) -> None:
        """Once: what was there before the request came. Of a handed-over prompt only prefill knows that."""
        if job.usage.computed_tokens or job.usage.hit_tokens:
            return
        handoff, prompt = job.handoff, job.usage.prompt_tokens
        cached = self._cached(output, prompt)
        job.usage.hit_tokens = dict(handoff.hit_tokens) if handoff is not None else {ENGINE: cached} if cached else {}
        job.usage.computed_tokens = prompt - sum(job.usage.hit_tokens.values())

    def _send(self, job: _Job, event: Event) -> None:
        job.sent += len(event.tokens)
        self._call(f"on_event request={job.id}", lambda: job.on_event(event))

    def _finish(self, job: _Job, finish: Finish, step: Step, *, abort: bool = False) -> None:
        if self._claim(job, finish.value, abort=abort):
            self._last(job, finish, step)

    def _end(self, job: _Job, error: KvtoolError) -> None:
        cancelled = isinstance(error, Cancelled)
        self._last(job, Finish.CANCELLED if cancelled else Finish.ERROR, None, None if cancelled else error)

    def _last(self, job: _Job, finish: Finish, step: Step | None, error: KvtoolError | None = None) -> None:
        job.usage.completion_tokens = job.generated
        job.usage.seconds["total"] = time.monotonic() - job.arrived_s
        tokens, context, cut = (step.tokens, step.context, step.cut_chars) if step is not None else ((), (), 0)
        self._send(job, Event(job.id, job.sent, tokens, context, cut, finish, job.usage, error))

    def status(self) -> dict[str, Any]:
        status = super().status()
        with self._lock:
            status["running"] = sum(job.output is not None for job in self._jobs.values())
        return status
