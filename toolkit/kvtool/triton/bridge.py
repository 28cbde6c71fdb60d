"""Between Triton's tensors and kvtool's types. The one module that runs inside Triton's Python stub only.

Responses of a decoupled model may be sent from any thread, but every send is a round trip to the server: an `Outbox`
does them on a thread of its own, so that a worker's engine thread only appends to a queue.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from kvtool.errors import Cancelled, EngineFailed, KvtoolError, Refused, Unavailable
from kvtool.serve.handoff import PrefillDone
from kvtool.serve.request import Event
from kvtool.triton import wire
from kvtool.triton.asked import Asked
from kvtool.triton.wire import Step

log = logging.getLogger(__name__)

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Outbox:
    """Sends responses in the order in which they were put, on one thread."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], None]) -> None:
        self._todo.put(send)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, then stop."""
        self._todo.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (send := self._todo.get()) is not None:
            try:
                send()
            except Exception:
                log.exception("a response could not be sent")


def raw(request: Any, name: str) -> bytes | None:
    """The one string in an input, as bytes; None when the input was left out."""
    tensor = pb.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    values = tensor.as_numpy().reshape(-1)
    return bytes(values[0]) if values.size else b""


def text(request: Any, name: str) -> str:
    """Raises RequestRefused (by json) later for nonsense; bytes that are no UTF-8 become U+FFFD here."""
    return (raw(request, name) or b"").decode(errors="replace")


def ids(request: Any, name: str) -> tuple[int, ...]:
    tensor = pb.get_input_tensor_by_name(request, name)
    return tuple(tensor.as_numpy().reshape(-1).tolist()) if tensor is not None else ()


def scalar(request: Any, name: str) -> Any:
    """The first value of an optional input, None when it was left out."""
    tensor = pb.get_input_tensor_by_name(request, name)
    return tensor.as_numpy().reshape(-1)[0].item() if tensor is not None else None


def strings(request: Any, name: str) -> tuple[bytes, ...]:
    tensor = pb.get_input_tensor_by_name(request, name)
    return tuple(bytes(value) for value in tensor.as_numpy().reshape(-1)) if tensor is not None else ()


def asked(request: Any) -> Asked:
    """A request to the front model."""
    given = {
        name: value
        for name in (
            "chat", "max_tokens", "temperature", "top_k", "top_p", "seed", "priority", "deadline_ms", "ignore_eos"
        )
        if (value := scalar(request, name)) is not None
    }  # fmt: skip
    return Asked(
        text=raw(request, "text_input") or b"",
        request_id=request.request_id(),
        stop=strings(request, "stop"),
        **given,
    )


def tensor_ids(name: str, tokens: tuple[int, ...] | list[int]) -> Any:
    return pb.Tensor(name, np.asarray(tokens, dtype=np.int32))


def tensor_text(name: str, said: str) -> Any:
    return pb.Tensor(name, np.array([said.encode()], dtype=object))


def respond(sender: Any, tensors: list[Any], final: bool) -> None:
    """Send one response of a decoupled model; FINAL goes with the last real one, which every client understands."""
    sender.send(pb.InferenceResponse(tensors), flags=FINAL if final else 0)


def answer(make: Callable[[], list[Any]]) -> Any:
    """The one response of a model that is not decoupled: `make`'s tensors, or its error."""
    try:
        return pb.InferenceResponse(make())
    except KvtoolError as error:
        return pb.InferenceResponse(error=triton_error(error))


def triton_error(error: KvtoolError) -> Any:
    """A TritonError whose text begins with the error's kind."""
    code = pb.TritonError.INTERNAL
    if isinstance(error, Refused):
        code = pb.TritonError.INVALID_ARG
    elif isinstance(error, Unavailable):
        code = pb.TritonError.UNAVAILABLE
    elif isinstance(error, Cancelled):
        code = pb.TritonError.CANCELLED
    return pb.TritonError(wire.error_text(error), code)


def fail(sender: Any, error: KvtoolError) -> None:
    sender.send(pb.InferenceResponse(error=triton_error(error)), flags=FINAL)


class FrontSink:
    """A client of the front model. Calls come from the front's thread; sends go through the outbox."""

    def __init__(self, sender: Any, outbox: Outbox) -> None:
        self._sender, self._outbox = sender, outbox

    def step(self, step: Step) -> None:
        self._outbox.put(lambda: respond(self._sender, self._tensors(step), bool(step.finish)))

    def fail(self, error: KvtoolError) -> None:
        self._outbox.put(lambda: fail(self._sender, error))

    def cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    @staticmethod
    def _tensors(step: Step) -> list[Any]:
        return [
            tensor_text("text_output", step.text),
            tensor_ids("token_ids", step.tokens),
            tensor_text("finish_reason", step.finish),
            tensor_text("usage", json.dumps(step.usage) if step.usage else ""),
        ]


class PrefillReply:
    """Where a prefill answer goes; callable as the worker's `done`."""

    def __init__(self, sender: Any, outbox: Outbox, tokens: tuple[int, ...]) -> None:
        self._sender, self._outbox, self._tokens = sender, outbox, tokens

    def __call__(self, done: PrefillDone) -> None:
        handoff = done.handoff.to_json() if done.handoff is not None else None
        self.say(wire.handoff_json(handoff, done.usage, done.error))

    def say(self, answer: str) -> None:
        tensors = [tensor_text("HANDOFF", answer), tensor_ids("PROMPT_IDS", self._tokens)]
        self._outbox.put(lambda: respond(self._sender, tensors, final=True))


class DecodeReply:
    """Where decode steps go; callable as the worker's `on_event`."""

    def __init__(self, sender: Any, outbox: Outbox) -> None:
        self._sender, self._outbox = sender, outbox

    def __call__(self, event: Event) -> None:
        self._send(event.tokens, event.context, wire.event_json(event), event.finish is not None)

    def say(self, answer: str) -> None:
        self._send((), (), answer, final=True)

    def _send(self, tokens: tuple[int, ...], context: tuple[int, ...], event: str, final: bool) -> None:
        def send() -> None:
            tensors = [tensor_ids("TOKEN_IDS", tokens), tensor_ids("CONTEXT_IDS", context), tensor_text("EVENT", event)]
            respond(self._sender, tensors, final)

        self._outbox.put(send)


class Bls:
    """Calls from a model to others of its server (`bls.Caller`). Responses are taken as they come; blocks."""

    def call(
        self,
        model: str,
        request_id: str,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, str],
        timeout_s: float,
    ) -> Iterator[dict[str, Any]]:
        """Raises EngineFailed: the model's error, with its name."""
        request = pb.InferenceRequest(
            model_name=model,
            request_id=request_id,
            requested_output_names=[],
            inputs=[pb.Tensor(name, value) for name, value in inputs.items()],
            parameters=dict(parameters),
            timeout=int(timeout_s * 1e6),
        )
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise EngineFailed(f"{model}: {response.error().message()}")
            yield {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
