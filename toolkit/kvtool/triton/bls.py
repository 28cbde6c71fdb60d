"""A request's way through two models of Triton's C++ backend: `context`, then `generation`, inside one server.

Stands where TensorRT-LLM's `LLM` stands elsewhere (`serve.trtllm.Generator`), so that the same decode worker serves
both: streams, stop strings, deadlines, cancel, canaries. A call to another model of the server blocks its thread, and
Triton's event loop must not be blocked, so each request has a thread of a bounded pool. What it says comes back through
the loop that asked.

The C++ backend gives no finish reason, only the end of its responses: fewer tokens than were asked for mean that an end
token or stop word was met. Its generation answers begin with context's token, which so is sent once. Cancelling goes by
its own `stop` input under the same request id: a caller's cancel does not pass from one model to another in Triton.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtool.errors import EngineFailed

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 600
Tensors = Mapping[str, npt.NDArray[Any]]


class Caller(Protocol):
    """Calls to models of this server, as `bridge.Bls` makes them."""

    def call(
        self, model: str, request_id: str, inputs: Tensors, parameters: Mapping[str, str], timeout_s: float
    ) -> Iterator[Tensors]:
        """Responses as they come. Blocks; any thread. Raises EngineFailed: the model's error."""


class _Completion:
    """As of a RequestOutput."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.disaggregated_params: Any = None


class BlsOutput:
    """What the worker iterates. Belongs to the loop that made it, save for `_say`."""

    def __init__(self, abort: Any) -> None:
        self.outputs = [_Completion()]
        self.cached_tokens = 0
        self.finished = False
        self._abort = abort
        self._loop = asyncio.get_running_loop()
        self._said: asyncio.Queue[list[int] | str | BaseException] = asyncio.Queue()

    def say(self, what: list[int] | str | BaseException) -> None:
        """Tokens, the finish reason, or an error; from the request's thread."""
        self._loop.call_soon_threadsafe(self._said.put_nowait, what)

    def abort(self) -> None:
        self._abort()

    def __aiter__(self) -> BlsOutput:
        return self

    async def __anext__(self) -> BlsOutput:
        if self.finished:
            raise StopAsyncIteration
        said = await self._said.get()
        if isinstance(said, BaseException):
            self.finished = True
            raise said
        completion = self.outputs[0]
        if isinstance(said, str):
            self.finished, completion.finish_reason = True, said
        elif isinstance(said, list):
            completion.token_ids.extend(said)
        return self


class BlsGenerator:
    """`threads`: requests that may be under way at once; the worker's queue_max."""

    def __init__(self, caller: Caller, *, context: str, generation: str, block_tokens: int, threads: int) -> None:
        self._caller, self._context, self._generation = caller, context, generation
        self._block_tokens = block_tokens
        self._ids = itertools.count(1)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="bls")
        self._stops = ThreadPoolExecutor(2, thread_name_prefix="bls-stop")

    def generate(
        self,
        tokens: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        streaming: bool,
        handoff: Mapping[str, Any] | None = None,
        salt: str = "",
    ) -> BlsOutput:
        """Start a request. `handoff` and `salt` are not for this backend: it hands over by itself, and has no salt."""
        if salt:
            raise ValueError("the C++ backend cannot keep tenants' blocks apart (no cache_salt)")
        request_id = str(next(self._ids))
        inputs = request_tensors(tokens, sampling)
        output = BlsOutput(lambda: self._stops.submit(self._stop, request_id, inputs))
        self._threads.submit(self._run, output, request_id, inputs, int(sampling["max_tokens"]))
        return output

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._stops.shutdown(wait=False, cancel_futures=True)

    # In a thread of the request.

    def _run(self, output: BlsOutput, request_id: str, inputs: Tensors, limit: int) -> None:
        try:
            count = 0
            for answer in self._answers(output, request_id, inputs):
                new = new_tokens(answer)
                count += len(new)
                output.say(new)
            output.say("length" if count >= limit else "stop")
        except BaseException as error:
            output.say(error)

    def _answers(self, output: BlsOutput, request_id: str, inputs: Tensors) -> Iterator[Tensors]:
        step = {"request_type": "context_only"}
        asked = {**inputs, "return_perf_metrics": np.array([[True]])}
        answers = list(self._caller.call(self._context, request_id, asked, step, CALL_TIMEOUT_S))
        held = [answer for answer in answers if answer.get("context_phase_params") is not None]
        if len(held) != 1:
            raise EngineFailed(f"{self._context}: wanted one answer with context_phase_params, found {len(held)}")
        reused = held[0].get("kv_cache_reused_blocks")
        blocks = int(reused.reshape(-1)[0]) if reused is not None and reused.size else 0
        output.cached_tokens = blocks * self._block_tokens
        follow = {**inputs, "context_phase_params": held[0]["context_phase_params"]}
        step = {"request_type": "generation_only"}
        yield from self._caller.call(self._generation, request_id, follow, step, CALL_TIMEOUT_S)

    def _stop(self, request_id: str, inputs: Tensors) -> None:
        """Best effort, in both models: the request is in one of them."""
        asked = {name: inputs[name] for name in ("input_ids", "input_lengths", "request_output_len")}
        asked["stop"] = np.array([[True]])
        for model in (self._context, self._generation):
            try:
                list(self._caller.call(model, request_id, asked, {}, 10.0))
            except Exception as error:  # a model that does not have it says so
                log.debug("stop model=%s request=%s answer=%s", model, request_id, error)


def request_tensors(tokens: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Inputs of the C++ backend for SamplingParams' keywords; a batch of one, as its config wants."""
    inputs: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.array([list(tokens)], dtype=np.int32),
        "input_lengths": np.array([[len(tokens)]], dtype=np.int32),
        "request_output_len": np.array([[sampling["max_tokens"]]], dtype=np.int32),
        "streaming": np.array([[True]]),
    }
    if not sampling.get("ignore_eos"):
        inputs["end_id"] = np.array([[sampling["end_id"]]], dtype=np.int32)
        inputs["pad_id"] = np.array([[sampling["pad_id"]]], dtype=np.int32)
    stops = sampling.get("stop_token_ids")
    if stops:  # ids of all words in a row, and where each ends
        inputs["stop_words_list"] = np.array([[list(stops), list(range(1, len(stops) + 1))]], dtype=np.int32)
    kinds = {
        "temperature": ("temperature", np.float32),
        "top_k": ("runtime_top_k", np.int32),
        "top_p": ("runtime_top_p", np.float32),
        "seed": ("seed", np.uint64),
    }
    for name, (tensor, kind) in kinds.items():
        if name in sampling:
            inputs[tensor] = np.array([[sampling[name]]], dtype=kind)
    return inputs


def new_tokens(answer: Tensors) -> list[int]:
    """Of one streaming response: `output_ids` [1, beams, tokens] holds what is new, `sequence_length` how much of it
    counts."""
    ids = answer.get("output_ids")
    if ids is None or not ids.size:
        return []
    row: npt.NDArray[Any] = ids.reshape(-1, ids.shape[-1])[0]
    lengths = answer.get("sequence_length")
    count = int(lengths.reshape(-1)[0]) if lengths is not None and lengths.size else len(row)
    found: list[int] = row[: min(count, len(row))].tolist()
    return found
