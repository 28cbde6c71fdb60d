"""Calls from the front to prefill and decode servers: streams over gRPC, in asyncio.

Each call is one stream with one request on it, half-closed at once, read to its end: the end is the answer's, whether
or not Triton marks a last response. A stub that dies leaves its stream silent, not broken (2.51); the supervisor ends
such a server, and only then does the stream fail. So every call here also has a timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from kvtool.errors import DeadlinePassed, KvtoolError, Unavailable
from kvtool.triton import wire
from kvtool.triton.peers import Peer
from kvtool.triton.wire import Ask, Step

_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
CHANNEL = [
    ("grpc.enable_http_proxy", 0),  # what the environment names is not meant for our own addresses
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
"""gRPC channel options, here and in `client`."""

_OPERATED = {
    "front": ("kvtool", "usage"),
    "prefill": ("prefill_engine", "HANDOFF"),
    "decode": ("decode_engine", "EVENT"),
}
"""Role -> the model that answers operations, and in which output."""


class Links:
    """gRPC channels to the instances, one each, made when first needed. Belongs to one event loop."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, int], Any] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def prefill(
        self, peer: Peer, text: bytes, ask: Ask, timeout_s: float
    ) -> tuple[tuple[int, ...], str, dict[str, Any]]:
        """Ensemble `prefill`: (prompt tokens, hand-off, usage). Raises what the stage reports; Unavailable: gone."""
        inputs = [_bytes("TEXT", text), _bytes("REQUEST", ask.to_json().encode())]
        async for result in self._stream(peer, "prefill", inputs, timeout_s):
            handoff, usage = wire.read_handoff(_text(result, "HANDOFF"))
            return _ids(result, "PROMPT_IDS"), handoff, usage
        raise Unavailable(f"{peer.name}: the stream ended without a hand-off")

    async def tokenize(self, peer: Peer, text: bytes, ask: Ask, timeout_s: float) -> tuple[int, ...]:
        """Model `preprocessing` alone, for prompts that go straight to decode."""
        inputs = [_bytes("TEXT", text), _bytes("REQUEST", ask.to_json().encode())]
        async for result in self._stream(peer, "preprocessing", inputs, timeout_s):
            return _ids(result, "INPUT_IDS")
        raise Unavailable(f"{peer.name}: the stream ended without tokens")

    async def decode(
        self, peer: Peer, tokens: tuple[int, ...], ask: Ask, handoff: str, timeout_s: float
    ) -> AsyncGenerator[Step, None]:
        """Ensemble `decode`: steps as they come, the last with `finish`. Raises Unavailable: ended before that."""
        inputs = [
            _tensor("INPUT_IDS", np.asarray(tokens, dtype=np.int32), "INT32"),
            _bytes("REQUEST", ask.to_json().encode()),
            _bytes("HANDOFF", handoff.encode()),
        ]
        stream = self._stream(peer, "decode", inputs, timeout_s)
        try:
            async for result in stream:
                step = wire.step(_ids(result, "TOKEN_IDS"), _text(result, "TEXT"), _text(result, "EVENT"))
                yield step
                if step.finish:
                    return
        finally:
            await stream.aclose()
        raise Unavailable(f"{peer.name}: the stream ended before the answer did")

    async def operate(self, peer: Peer, op: dict[str, Any], timeout_s: float) -> str:
        """An operation on an engine model, or on the front; its JSON answer."""
        model, answer = _OPERATED[peer.role]
        if peer.role == "front":
            inputs = [
                _bytes("op", str(op["op"]).encode()),
                _bytes("text_input", str(op.get("request_id", "")).encode()),
            ]
        else:
            inputs = [_bytes("REQUEST", wire.op_json(op).encode())]
        async for result in self._stream(peer, model, inputs, timeout_s):
            return _text(result, answer)
        raise Unavailable(f"{peer.name}: no answer to {op.get('op')}")

    async def _stream(self, peer: Peer, model: str, inputs: list[Any], timeout_s: float) -> Any:
        if timeout_s <= 0:
            raise DeadlinePassed(f"no time was left to ask {peer.name}")

        async def once() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": model, "inputs": inputs}

        responses = self._client(peer).stream_infer(once(), stream_timeout=timeout_s)
        try:
            async for result, error in responses:
                if error is not None:
                    raise _with_name(peer, wire.error_from_text(str(error.message())))
                if result.get_response().outputs:
                    yield result
        except grpc.RpcError as error:
            raise _failed(peer, error) from None
        except InferenceServerException as error:
            raise _with_name(peer, wire.error_from_text(str(error.message()))) from None
        finally:
            responses.cancel()

    def _client(self, peer: Peer) -> Any:
        if peer.identity not in self._clients:
            for old in [identity for identity in self._clients if identity[0] == peer.name]:
                closing = asyncio.ensure_future(self._clients.pop(old).close())
                self._closing.add(closing)  # the loop itself holds tasks weakly
                closing.add_done_callback(self._closing.discard)
            self._clients[peer.identity] = triton.InferenceServerClient(peer.address, channel_args=CHANNEL)
        return self._clients[peer.identity]

    async def close(self) -> None:
        while self._clients:
            await self._clients.popitem()[1].close()


def _failed(peer: Peer, error: Any) -> KvtoolError:
    code, details = error.code(), error.details() or "no details"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlinePassed(f"{peer.name} did not answer in time")
    if code in _GONE:
        return Unavailable(f"{peer.name} at {peer.address} is gone: {details}")
    return KvtoolError(f"{peer.name} at {peer.address}: {code.name}: {details}")


def _with_name(peer: Peer, error: KvtoolError) -> KvtoolError:
    return Unavailable(f"{peer.name}: {error}") if type(error) is Unavailable else error


def _tensor(name: str, array: Any, kind: str) -> Any:
    made = triton.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def _bytes(name: str, raw: bytes) -> Any:
    return _tensor(name, np.array([raw], dtype=object), "BYTES")


def _text(result: Any, name: str) -> str:
    array = result.as_numpy(name)
    return bytes(array.reshape(-1)[0]).decode(errors="replace") if array is not None and array.size else ""


def _ids(result: Any, name: str) -> tuple[int, ...]:
    array = result.as_numpy(name)
    return tuple(array.reshape(-1).tolist()) if array is not None else ()
