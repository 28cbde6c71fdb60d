"""Write safetensors files one tensor at a time, so a build never holds the whole model.

The format (huggingface/safetensors, README) is a length, a JSON header and the bytes. The header is padded with spaces
so that the data begins at a multiple of 64 bytes: mapped weights then start on a cache line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        values = 1
        for length in self.shape:
            values *= length
        return values * self.dtype.itemsize


class SafetensorsWriter:
    """Writes `plans`, in their order, to `path`. Use as a context manager, and write one tensor for each of
    `writer.plans`."""

    def __init__(self, path: Path, plans: Iterable[TensorPlan]) -> None:
        self.plans = sorted(plans, key=lambda plan: -plan.dtype.itemsize)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for plan in self.plans:
            header[plan.name] = {
                "dtype": _NAMES[plan.dtype],
                "shape": list(plan.shape),
                "data_offsets": [at, at + plan.size],
            }
            at += plan.size
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-(8 + len(raw)) % 64)
        self._file = path.open("wb")
        self._file.write(len(raw).to_bytes(8, "little") + raw)
        self._next = 0

    def write(self, tensor: torch.Tensor) -> None:
        plan = self.plans[self._next]
        assert tensor.dtype == plan.dtype and tuple(tensor.shape) == plan.shape, plan
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._next += 1

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind is not None or self._next == len(self.plans)
