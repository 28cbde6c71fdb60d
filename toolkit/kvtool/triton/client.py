"""Talking to a deployment: one request, streamed, from plain code or from asyncio.

    for piece in stream("127.0.0.1:8001", "Once upon a time", max_tokens=32):
        print(piece.text, end="")

Leaving the loop early (or closing the generator) cancels the request: the front sees the stream go and cancels what
runs for it on prefill and decode servers. Errors come as kvtool.errors.
"""

from __future__ import annotations

import json
import queue
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from kvtool.errors import DeadlinePassed, KvtoolError, Unavailable, Unreachable
from kvtool.triton import wire
from kvtool.triton.rpc import CHANNEL

MODEL = "kvtool"
_KINDS: dict[str, tuple[str, Any]] = {
    "chat": ("BOOL", np.bool_),
    "max_tokens": ("INT32", np.int32),
    "temperature": ("FP32", np.float32),
    "top_k": ("INT32", np.int32),
    "top_p": ("FP32", np.float32),
    "seed": ("INT64", np.int64),
    "priority": ("INT32", np.int32),
    "deadline_ms": ("INT32", np.int32),
    "ignore_eos": ("BOOL", np.bool_),
}
"""Optional input of the front model -> its type on the wire."""

_SOON_AGAIN = [
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
]


@dataclass(frozen=True)
class Piece:
    """One response. The last has `finish_reason` ("stop" or "length") and `usage`."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)


def stream(
    url: str,
    prompt: str | Sequence[Mapping[str, str]],
    *,
    request_id: str = "",
    stop: Sequence[str] = (),
    timeout_s: float = 600.0,
    **options: Any,
) -> Generator[Piece, None, None]:
    """Pieces of the answer as they come. `prompt`: text, or chat messages. `options`: the front's optional inputs.

    `timeout_s` bounds the wait for each piece; a request's own deadline is `deadline_ms`.

    Raises:
        RequestRefused, Overloaded, DeadlinePassed, Unavailable, KvtoolError: as the front says.
        Unreachable: no front says anything.
    """
    inputs = _inputs(prompt, stop, options)
    got: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = triton.InferenceServerClient(url, channel_args=CHANNEL)
    try:
        client.start_stream(callback=lambda result, error: got.put((result, error)))
        client.async_stream_infer(MODEL, inputs, request_id=request_id)
        while True:
            try:
                result, error = got.get(timeout=timeout_s)
            except queue.Empty:
                raise DeadlinePassed(f"{url}: nothing came for {timeout_s:g} s") from None
            if error is not None:
                raise _raised(url, error)
            piece = _piece(result)
            yield piece
            if piece.finish_reason:
                return
    except InferenceServerException as error:
        raise _raised(url, _told(got) or error) from None
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()


def client_async(url: str) -> Any:
    """One channel for many `stream_async`, of the running event loop. It looks for a server that went away every second
    or so; gRPC's own pace slows down to two minutes. Whoever asks for it awaits its `close`."""
    return triton_aio.InferenceServerClient(url, channel_args=[*CHANNEL, *_SOON_AGAIN])


async def stream_async(
    url: str,
    prompt: str | Sequence[Mapping[str, str]],
    *,
    request_id: str = "",
    stop: Sequence[str] = (),
    timeout_s: float = 600.0,
    client: Any = None,
    **options: Any,
) -> AsyncGenerator[Piece, None]:
    """As `stream`, in asyncio; `timeout_s` bounds the whole. `client`: of `client_async`, to share its channel."""
    inputs = _inputs(prompt, stop, options)

    async def once() -> AsyncGenerator[dict[str, Any], None]:
        yield {"model_name": MODEL, "inputs": inputs, "request_id": request_id}

    own = client or triton_aio.InferenceServerClient(url, channel_args=CHANNEL)
    responses = own.stream_infer(once(), stream_timeout=timeout_s)
    try:
        async for result, error in responses:
            if error is not None:
                raise _raised(url, error)
            piece = _piece(result)
            yield piece
            if piece.finish_reason:
                return
        raise Unreachable(f"{url}: the stream ended before the answer did")
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise DeadlinePassed(f"{url}: no answer in {timeout_s:g} s") from None
        raise Unreachable(f"{url}: {error.details() or error.code().name}") from None
    finally:
        responses.cancel()
        if client is None:
            await own.close()


def operate(url: str, op: str, request_id: str = "", timeout_s: float = 10.0) -> dict[str, Any]:
    """Ask the front for its "status", or to "cancel" a request."""
    made = [_bytes("text_input", [request_id.encode()]), _bytes("op", [op.encode()])]
    got: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = triton.InferenceServerClient(url, channel_args=CHANNEL)
    try:
        client.start_stream(callback=lambda result, error: got.put((result, error)))
        client.async_stream_infer(MODEL, made)
        result, error = got.get(timeout=timeout_s)
    except queue.Empty:
        raise DeadlinePassed(f"{url}: no answer to {op} in {timeout_s:g} s") from None
    except InferenceServerException as failed:
        raise _raised(url, _told(got) or failed) from None
    finally:
        client.stop_stream(cancel_requests=True)
        client.close()
    if error is not None:
        raise _raised(url, error)
    return dict(_piece(result).usage)


def _told(got: queue.Queue[tuple[Any, Any]]) -> Any:
    """The error that ended a stream, where tritonclient raises only that it has ended."""
    try:
        return got.get(timeout=1.0)[1]
    except queue.Empty:
        return None


def _inputs(prompt: str | Sequence[Mapping[str, str]], stop: Sequence[str], options: Mapping[str, Any]) -> list[Any]:
    given = {name: value for name, value in options.items() if value is not None}
    unknown = sorted(set(given) - set(_KINDS))
    if unknown:
        raise TypeError(f"unknown options {', '.join(unknown)}; known: {', '.join(_KINDS)}")
    if not isinstance(prompt, str):
        given["chat"] = True
        prompt = json.dumps(list(prompt))
    made = [_bytes("text_input", [prompt.encode()])]
    if stop:
        made.append(_bytes("stop", [text.encode() for text in stop]))
    for name, value in given.items():
        kind, dtype = _KINDS[name]
        made.append(_tensor(name, np.array([value], dtype=dtype), kind))
    return made


def _tensor(name: str, array: Any, kind: str) -> Any:
    made = triton.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def _bytes(name: str, values: list[bytes]) -> Any:
    return _tensor(name, np.array(values, dtype=object), "BYTES")


def _piece(result: Any) -> Piece:
    usage = _text(result, "usage")
    return Piece(
        text=_text(result, "text_output"),
        tokens=tuple(int(token) for token in result.as_numpy("token_ids").reshape(-1)),
        finish_reason=_text(result, "finish_reason"),
        usage=json.loads(usage) if usage else {},
    )


def _text(result: Any, name: str) -> str:
    values = result.as_numpy(name).reshape(-1)
    return bytes(values[0]).decode(errors="replace") if values.size else ""


def _raised(url: str, error: Any) -> KvtoolError:
    message = str(error.message())
    status = str(error.status() or "")
    if "UNAVAILABLE" in status or "failed to connect" in message:
        return Unreachable(f"{url}: no Triton server answers there: {message}")
    found = wire.error_from_text(message)
    if type(found) is Unavailable and not wire.is_ours(message):
        return Unreachable(f"{url}: {found}")  # the front's own process is gone
    return found
