"""The kernels of copies.cu, called through their C interface: no header of torch, so one library serves every torch.

A call queues work on torch's current stream and returns. What it was given must stay until the stream has come by;
memory that is made here is torch's, which reuses it on the same stream only.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from kvtool.errors import EngineFailed
from kvtool_trtllm.pieces import Table, to_device

ABI = 1
_TO_HOST_LIMIT = 64
"""Blocks of threads of a copy over a host link: each has 16 KiB under way, a link of 64 GB/s and 2 us needs 128 KiB.
Reckoned, not measured; more would take multiprocessors from the model."""
_INT, _LONG, _POINTER = ctypes.c_int, ctypes.c_longlong, ctypes.c_void_p
_CALLS: dict[str, tuple[Any, list[Any]]] = {
    "kvtool_abi": (_INT, []),
    "kvtool_error": (ctypes.c_char_p, [_INT]),
    "kvtool_device_pointer": (_INT, [_INT, _POINTER, ctypes.POINTER(_POINTER)]),
    "kvtool_copy": (
        _INT,
        [_INT, _INT, _POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER],
    ),
    "kvtool_checksum": (
        _INT,
        [_INT, _POINTER, _LONG, _LONG, _LONG, ctypes.c_ulonglong, _POINTER, _LONG, _POINTER],
    ),
    "kvtool_pack": (
        _INT,
        [_INT] * 4 + [_POINTER, _LONG, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER],
    ),
}


class Kernel:
    """`library`: what `build` made. Thread-safe: it keeps nothing between calls."""

    def __init__(self, library: Path) -> None:
        """Raises:
        EngineFailed: the library does not load, or is of another kvtool.
        """
        self.name = f"kernels in {library}"
        try:
            self._library = ctypes.CDLL(str(library))
            for name, (result, arguments) in _CALLS.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise EngineFailed(f"{library}: does not load: {error}; delete it, and it is built again") from None
        if self._library.kvtool_abi() != ABI:
            raise EngineFailed(f"{library}: interface {self._library.kvtool_abi()}, wanted {ABI}; delete it")

    def copy(self, gathering: bool, table: Table, rows: torch.Tensor, packed: torch.Tensor) -> None:
        if not rows.numel() or not len(table):
            return
        on_host = packed.device.type == "cpu" and table.device.type != "cpu"
        pieces, pages, index = table.rows(), to_device(rows, table.device), _index(table.device)
        code = self._library.kvtool_copy(
            index, int(gathering), pieces.data_ptr(), len(table), table.largest, pages.data_ptr(), rows.numel(),
            self._seen(index, packed) if on_host else packed.data_ptr(), packed.stride(0),
            _TO_HOST_LIMIT if on_host else _limit(table.device), _stream(table.device),
        )  # fmt: skip
        self._check(code, f"{'gather' if gathering else 'scatter'} of {rows.numel()} blocks in {len(table)} pieces")

    def checksum(self, blocks: torch.Tensor, seed: int) -> torch.Tensor:
        sums = torch.zeros(blocks.shape[0], dtype=torch.int64, device=blocks.device)
        if blocks.shape[0]:
            code = self._library.kvtool_checksum(
                _index(blocks.device), blocks.data_ptr(), blocks.stride(0), blocks.shape[1], blocks.shape[0], seed,
                sums.data_ptr(), _limit(blocks.device), _stream(blocks.device),
            )  # fmt: skip
            self._check(code, f"checksum of {blocks.shape[0]} blocks")
        return sums

    def pack(
        self, packing: bool, kind: int, fp8: bool, wide: torch.Tensor, packed: torch.Tensor,
        scales_at: int, rows: int, row_elements: int,
    ) -> None:  # fmt: skip
        """Lossy. `kind`: of the wide numbers, as copies.cu counts them; `rows`: scales of a block."""
        if not wide.shape[0]:
            return
        code = self._library.kvtool_pack(
            _index(wide.device), int(packing), kind, int(fp8), wide.data_ptr(), wide.stride(0), packed.data_ptr(),
            packed.stride(0), scales_at, wide.shape[0], rows, row_elements, _limit(wide.device), _stream(wide.device),
        )  # fmt: skip
        self._check(code, f"{'packing' if packing else 'unpacking'} of {wide.shape[0]} blocks")

    def _seen(self, index: int, host: torch.Tensor) -> int:
        seen = _POINTER()
        code = self._library.kvtool_device_pointer(index, host.data_ptr(), ctypes.byref(seen))
        self._check(code, "looking up pinned host memory")
        return int(seen.value or 0)

    def _check(self, code: int, doing: str) -> None:
        if code:
            words = self._library.kvtool_error(code).decode(errors="replace")
            raise EngineFailed(
                f"device copies, {doing}: {words} (CUDA error {code}); do not use these blocks, and "
                "after an error of the device itself start the process again"
            )


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(device.index) if device.index is not None else int(torch.cuda.current_device())


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _limit(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # more tasks than blocks, as on a device
    return 4 * int(torch.cuda.get_device_properties(device).multi_processor_count)
