"""A generator as the workers over TensorRT-LLM see one: outputs that grow in the running loop, and abort."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def answer(tokens: Sequence[int], count: int, vocab: int = 200) -> list[int]:
    """The tokens after `tokens`: a function of all of them, so that two ways to the same answer can be compared."""
    made: list[int] = []
    state = 7
    for token in tokens:
        state = (state * 31 + token) % 65_537
    for _ in range(count):
        state = (state * 31 + 11) % 65_537
        made.append(10 + state % (vocab - 10))
    return made


class Output:
    """A RequestOutput. `step` tokens come at once; with a `gate`, each of them waits for it."""

    def __init__(self, engine: FakeLlm, tokens: list[int], keywords: Mapping[str, Any], handoff: Any) -> None:
        self._engine, self._keywords, self._handoff = engine, keywords, handoff
        self.prompt = tokens
        self.finished = self.aborted = False
        self.cached_tokens = engine.cached
        self.outputs = [SimpleNamespace(token_ids=[], finish_reason=None, disaggregated_params=None)]
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        kind = handoff["request_type"] if handoff else None
        if kind == "generation_only":
            whole = [*handoff["first_gen_tokens"], *answer(tokens, keywords["max_tokens"])[1:]]
        else:
            whole = engine.script or answer(tokens, keywords["max_tokens"])
        self._todo = whole[: keywords["max_tokens"]]

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> Output:
        if self.finished:
            raise StopAsyncIteration
        if self._engine.broken:
            raise RuntimeError("the executor is gone")
        await asyncio.sleep(0)
        while self._engine.gate is not None and not self.aborted and not self._engine.gate.is_set():
            await asyncio.sleep(0.002)
        completion = self.outputs[0]
        if self.aborted:
            self.finished, completion.finish_reason = True, "cancelled"
            return self
        step, self._todo = self._todo[: self._engine.step], self._todo[self._engine.step :]
        for token in step:
            if token == self._keywords["end_id"] and not self._keywords.get("ignore_eos"):
                self._finish("stop")
                return self
            completion.token_ids.append(token)
        if not self._todo:
            self._finish(self._engine.reason)
        return self

    def _finish(self, reason: str) -> None:
        self.finished, self.outputs[0].finish_reason = True, reason
        if self._handoff and self._handoff["request_type"] == "context_only" and self._engine.hands_off:
            self.outputs[0].disaggregated_params = SimpleNamespace(
                request_type="context_only",
                first_gen_tokens=list(self.outputs[0].token_ids),
                ctx_request_id=self._handoff.get("disagg_request_id", 17),
                opaque_state=b"\x00where\xff",
                draft_tokens=None,
            )

    def abort(self) -> None:
        self.aborted = True
        self._engine.aborted.append(self)


class FakeLlm:
    def __init__(self, **changes: Any) -> None:
        self.step, self.cached, self.reason = 1, 0, "length"
        self.script: list[int] = []
        self.broken, self.hands_off = False, True
        self.gate: asyncio.Event | None = None
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[Output] = []
        self.closed = False
        vars(self).update(changes)

    def generate(self, tokens: Any, sampling: Any, *, streaming: bool, handoff: Any = None, salt: str = "") -> Output:
        asyncio.get_running_loop()  # TensorRT-LLM makes an asynchronous queue only inside one
        self.asked.append({"sampling": sampling, "streaming": streaming, "handoff": handoff, "salt": salt})
        if len(tokens) > 900:
            raise ValueError("prompt length 901 exceeds max_input_len 900")
        return Output(self, list(tokens), sampling, handoff)

    def close(self) -> None:
        self.closed = True
