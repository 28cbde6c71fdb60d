"""A plain tritonclient stream against the front model, as a user would write it. Nothing of kvtool is used."""

from __future__ import annotations

import json
import queue
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as grpc


@dataclass
class Answer:
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0


class Stream:
    """One streaming request on a client of its own, so that cancelling it is the client going away."""

    def __init__(
        self, url: str, prompt: str | bytes, max_tokens: int = 16, request_id: str = "", **options: Any
    ) -> None:
        self.answer = Answer()
        self.began_s = time.monotonic()
        self._got: queue.Queue[Any] = queue.Queue()
        self._client = grpc.InferenceServerClient(url)
        self._client.start_stream(callback=lambda result, error: self._got.put((result, error)))
        raw = prompt if isinstance(prompt, bytes) else prompt.encode()
        inputs = [tensor("text_input", np.array([raw], dtype=object), "BYTES")]
        inputs.append(tensor("max_tokens", np.array([max_tokens], dtype=np.int32), "INT32"))
        kinds = {
            "deadline_ms": "INT32",
            "temperature": "FP32",
            "seed": "INT64",
            "priority": "INT32",
            "ignore_eos": "BOOL",
        }
        for name, value in options.items():
            kind = kinds[name]
            dtype = {"INT32": np.int32, "FP32": np.float32, "INT64": np.int64, "BOOL": np.bool_}[kind]
            inputs.append(tensor(name, np.array([value], dtype=dtype), kind))
        self._client.async_stream_infer("kvtool", inputs, request_id=request_id)

    def step(self, timeout_s: float = 60.0) -> bool:
        """Take one response; False after the last."""
        try:
            result, error = self._got.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"no response in {timeout_s} s, so far {self.answer}") from None
        if error is not None:
            self.answer.error = str(error.message())
            self._end()
            return False
        self.answer.text += result.as_numpy("text_output")[0].decode()
        self.answer.tokens += [int(t) for t in result.as_numpy("token_ids")]
        self.answer.finish = result.as_numpy("finish_reason")[0].decode()
        if self.answer.finish:
            self.answer.usage = json.loads(result.as_numpy("usage")[0])
            self._end()
            return False
        return True

    def take(self, tokens: int, timeout_s: float = 60.0) -> None:
        """Read until `tokens` have come."""
        while len(self.answer.tokens) < tokens:
            assert self.step(timeout_s), f"ended early: {self.answer}"

    def rest(self, timeout_s: float = 60.0) -> Answer:
        while self.step(timeout_s):
            pass
        return self.answer

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def _end(self) -> None:
        self.answer.seconds = time.monotonic() - self.began_s
        self._client.stop_stream()
        self._client.close()


def ask(url: str, prompt: str | bytes, max_tokens: int = 16, timeout_s: float = 60.0, **options: Any) -> Answer:
    return Stream(url, prompt, max_tokens, **options).rest(timeout_s)


def tensor(name: str, value: np.ndarray, kind: str) -> grpc.InferInput:
    tensor = grpc.InferInput(name, list(value.shape), kind)
    tensor.set_data_from_numpy(value)
    return tensor
