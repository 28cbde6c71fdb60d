"""A front that tritonclient can talk to: real gRPC, answers by a script instead of an engine."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvtool.errors import KvtoolError
from kvtool.triton.wire import Step, error_text

_KINDS = {"INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
Script = Callable[[dict[str, Any]], Iterator[Step]]
"""What was asked -> the steps of its answer; what it raises is the answer's error."""


class KServe(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`asked`: every request as it came; `gone`: the ids of those whose client went away before the end."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.asked: list[dict[str, Any]] = []
        self.gone: list[str] = []
        self.changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(32))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def stop(self) -> None:
        assert self._server.stop(0).wait(10)

    def until(self, happens: Callable[[], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(happens, 10), (self.asked, self.gone)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            yield from self._answer(_read(request), context)

    def _answer(self, asked: dict[str, Any], context: Any) -> Iterator[Any]:
        over = threading.Event()
        context.add_callback(lambda: None if over.is_set() else self._note(self.gone, asked["request_id"]))
        self._note(self.asked, asked)
        try:
            for step in self.script(asked):
                if step.finish:
                    over.set()
                yield _response(step)
        except (KvtoolError, RuntimeError) as error:  # a RuntimeError: Triton's own words, as of a process that is gone
            over.set()
            said = error_text(error) if isinstance(error, KvtoolError) else str(error)
            yield service_pb2.ModelStreamInferResponse(error_message=said)

    def _note(self, where: list[Any], what: Any) -> None:
        with self.changed:
            where.append(what)
            self.changed.notify_all()


def _read(request: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"request_id": request.id}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            found[tensor.name] = _texts(raw)
        else:
            found[tensor.name] = np.frombuffer(raw, _KINDS[tensor.datatype])[0].item()
    found["text_input"] = found["text_input"][0]
    return found


def _texts(raw: bytes) -> list[str]:
    texts = []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        texts.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return texts


def _response(step: Step) -> Any:
    response = service_pb2.ModelInferResponse(model_name="kvtool")
    values = (("text_output", step.text), ("finish_reason", step.finish), ("usage", json.dumps(step.usage)))
    for name, text in values:
        response.outputs.add(name=name, datatype="BYTES", shape=[1])
        data = text.encode()
        response.raw_output_contents.append(struct.pack("<I", len(data)) + data)
    response.outputs.add(name="token_ids", datatype="INT32", shape=[len(step.tokens)])
    response.raw_output_contents.append(np.array(step.tokens, np.int32).tobytes())
    return service_pb2.ModelStreamInferResponse(infer_response=response)
