"""What `generate_async` gives back: filled by the executor's thread, awaited, iterated or waited for by callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: Any = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None
    generation_logits: Any = None
    disaggregated_params: Any = None
    _last_token_ids_len: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


class RequestOutput:
    """Streaming: an iteration gives this object once for each step that was made. `result()`: when all is done."""

    def __init__(
        self, request_id: int, prompt: Any, tokens: list[int], streaming: bool, abort: Callable[[int], None]
    ) -> None:
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, tokens
        self.outputs = [CompletionOutput(0)]
        self.context_logits: Any = None
        self.mm_embedding_handle: Any = None
        self.metrics_dict: dict[str, float] = {}
        self.cached_tokens = 0
        self.decoding_iter = 0
        self._streaming, self._abort = streaming, abort
        self._steps: list[tuple[int, str | None, Any]] = []
        self._error: BaseException | None = None
        self._ended = self._aborted = False
        self._taken = 0
        self._changed = threading.Condition()
        self._loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    # the executor's side

    def _push(self, token: int) -> None:
        self._tell(lambda: self._steps.append((token, None, None)))

    def _end(self, reason: str | None, disaggregated: Any = None, error: BaseException | None = None) -> None:
        def end() -> None:
            self._steps.append((-1, reason, disaggregated))
            self._ended, self._error = True, error

        self._tell(end)

    def _tell(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
            loops = list(self._loops)
        for loop, event in loops:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    # the caller's side

    @property
    def finished(self) -> bool:
        return self._ended and self._taken == len(self._steps)

    @property
    def disaggregated_params(self) -> Any:
        return self.outputs[0].disaggregated_params

    def abort(self) -> None:
        self._aborted = True
        self._abort(self.request_id)

    def aborted(self) -> bool:
        return self._aborted

    def _take(self, whole: bool) -> None:
        """Steps that were made since the last look into `outputs`; one, or all."""
        if self._error is not None:
            raise self._error
        output = self.outputs[0]
        output._last_token_ids_len = len(output.token_ids)
        while self._taken < len(self._steps):
            token, reason, disaggregated = self._steps[self._taken]
            self._taken += 1
            if token >= 0:
                output.token_ids.append(token)
                ahead = self._steps[self._taken : self._taken + 1]
                if not whole and not (ahead and ahead[0][0] < 0):
                    return  # the end comes with the last token
            else:
                output.finish_reason, output.disaggregated_params = reason, disaggregated

    def _ready(self) -> bool:
        return self._ended if not self._streaming else self._taken < len(self._steps)

    def result(self, timeout: float | None = None) -> RequestOutput:
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended, timeout):
                raise TimeoutError(f"request {self.request_id} did not end within {timeout} s")
            self._take(whole=True)
        return self

    async def _await(self, ready: Callable[[], bool]) -> None:
        event = asyncio.Event()
        entry = (asyncio.get_running_loop(), event)
        with self._changed:
            self._loops.append(entry)
        try:
            while not ready():
                event.clear()
                if not ready():
                    await event.wait()
        finally:
            with self._changed:
                self._loops.remove(entry)

    async def aresult(self) -> RequestOutput:
        await self._await(lambda: self._ended)
        with self._changed:
            self._take(whole=True)
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self._await(self._ready)
        with self._changed:
            self._take(whole=not self._streaming)
        return self

    def __iter__(self) -> RequestOutput:
        return self

    def __next__(self) -> RequestOutput:
        if self.finished:
            raise StopIteration
        with self._changed:
            self._changed.wait_for(self._ready)
            self._take(whole=not self._streaming)
        return self


GenerationResult = RequestOutput
