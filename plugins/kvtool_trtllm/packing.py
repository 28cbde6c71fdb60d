"""LOSSY packing of blocks to 8 bits: e4m3 or int8 under float32 scales. Off unless somebody asks for it.

A block that was packed is not the block that was computed, and a hit on it may change an answer. So nothing here is a
default, and whoever packs puts `Packing.label` into the numerics of the keys: packed and exact blocks never meet.

A packed block is the payload, one byte a number in the order of the wide block, then the scales from the next multiple
of 16 bytes: as kv/reshard.py's `Scales` lays them out, so that packed blocks are resharded exactly. Scales of heads are
cut with their heads; those of a block belong to the part that was packed and keep parts from being merged.

A scale is the largest finite magnitude / 448 (e4m3) or / 127 (int8), 1 where that is zero. What lies beyond saturates,
infinities too; what is no number stays none in e4m3 and becomes 0 in int8. Rounding is half to even, everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kvtool.errors import EngineFailed
from kvtool.kv.layout import DTYPE_SIZE, KVLayout
from kvtool.kv.reshard import Scales
from kvtool_trtllm.copies import Mover, mover_for, on_stream
from kvtool_trtllm.kernel import Kernel
from kvtool_trtllm.pieces import check_blocks

_KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}


@dataclass(frozen=True)
class Packing:
    """`per`: a scale for each head of each layer's K or V, or one for all its heads."""

    kind: Literal["float8_e4m3fn", "int8"] = "float8_e4m3fn"
    per: Literal["head", "block"] = "head"

    @property
    def label(self) -> str:
        """For `numerics` of the keys and for people."""
        return f"lossy-{self.kind}-per-{self.per}"

    @property
    def largest(self) -> float:
        return 448.0 if self.kind == "float8_e4m3fn" else 127.0

    def layout(self, wide: KVLayout) -> KVLayout:
        """Of the payload. `wide`: of the block to pack."""
        return replace(wide, dtype=self.kind)

    def scales(self) -> Scales:
        return Scales(self.per)

    def size(self, wide: KVLayout) -> int:
        """Bytes of a packed block, scales and all."""
        return self.scales().part_size(self.layout(wide))


def pack(
    blocks: torch.Tensor, layout: KVLayout, packing: Packing, stream: Any = None, mover: Mover | None = None
) -> torch.Tensor:
    """uint8 [n, layout.block_size] of float32, bfloat16 or float16 -> uint8 [n, packing.size(layout)]. Lossy.

    Raises:
        EngineFailed: blocks that are not of the layout, or a device error.
    """
    _check(blocks, layout, layout.block_size)
    with on_stream(blocks.device, stream):
        packed = torch.zeros(blocks.shape[0], packing.size(layout), dtype=torch.uint8, device=blocks.device)
        chosen = mover or mover_for(blocks.device)
        if isinstance(chosen, Kernel):
            _by_kernel(chosen, True, blocks, packed, layout, packing)
        else:
            _pack(blocks, packed, layout, packing)
    return packed


def unpack(
    packed: torch.Tensor, layout: KVLayout, packing: Packing, stream: Any = None, mover: Mover | None = None
) -> torch.Tensor:
    """uint8 [n, packing.size(layout)] -> uint8 [n, layout.block_size], numbers of `layout.dtype` near what was packed.

    Raises:
        EngineFailed: as for pack.
    """
    _check(packed, layout, packing.size(layout))
    with on_stream(packed.device, stream):
        blocks = torch.empty(packed.shape[0], layout.block_size, dtype=torch.uint8, device=packed.device)
        chosen = mover or mover_for(packed.device)
        if isinstance(chosen, Kernel):
            _by_kernel(chosen, False, blocks, packed, layout, packing)
        else:
            _unpack(packed, blocks, layout, packing)
    return blocks


def _check(blocks: torch.Tensor, layout: KVLayout, size: int) -> None:
    if layout.dtype not in _KINDS:
        raise EngineFailed(f"blocks of {layout.dtype} are not packed, only those of {', '.join(_KINDS)}")
    check_blocks(blocks, int(blocks.shape[0]) if blocks.ndim else 0)
    if blocks.shape[1] != size:
        raise EngineFailed(f"blocks of {blocks.shape[1]} bytes, the layout wants {size}: {layout}")
    if blocks.data_ptr() % 4 or blocks.stride(0) % 4:
        raise EngineFailed(f"blocks at {blocks.data_ptr():#x}, {blocks.stride(0)} bytes apart: align them to 4 bytes")


def _rows(layout: KVLayout, packing: Packing) -> tuple[int, int]:
    """Scales of a block, and the numbers under each."""
    rows = layout.layers * layout.kv_factor * (layout.kv_heads if packing.per == "head" else 1)
    return rows, layout.block_size // DTYPE_SIZE[layout.dtype] // rows


def _by_kernel(
    kernel: Kernel, packing_: bool, wide: torch.Tensor, packed: torch.Tensor, layout: KVLayout, packing: Packing
) -> None:
    at = packing.scales().at(packing.layout(layout))
    kernel.pack(
        packing_, _KINDS[layout.dtype], packing.kind == "float8_e4m3fn", wide, packed, at, *_rows(layout, packing)
    )


def _pack(blocks: torch.Tensor, packed: torch.Tensor, layout: KVLayout, packing: Packing) -> None:
    rows, each = _rows(layout, packing)
    wide = blocks.contiguous().view(getattr(torch, layout.dtype)).view(-1, rows, each).to(torch.float32)
    peaks = torch.where(wide.isfinite(), wide.abs(), 0.0).amax(dim=2)
    scales = peaks / packing.largest
    scales = torch.where(scales > 0, scales, 1.0)
    values = (wide / scales[:, :, None]).clamp(-packing.largest, packing.largest)
    if packing.kind == "int8":
        values = torch.where(values.isnan(), 0.0, values.round())
    narrow = values.to(getattr(torch, packing.kind)).view(torch.uint8)
    packed[:, : rows * each] = narrow.view(-1, rows * each)
    packed[:, packing.scales().at(packing.layout(layout)) :] = scales.view(torch.uint8)


def _unpack(packed: torch.Tensor, blocks: torch.Tensor, layout: KVLayout, packing: Packing) -> None:
    rows, each = _rows(layout, packing)
    narrow = packed[:, : rows * each].contiguous().view(getattr(torch, packing.kind)).view(-1, rows, each)
    scales = packed[:, packing.scales().at(packing.layout(layout)) :].contiguous().view(torch.float32)
    wide = narrow.to(torch.float32) * scales[:, :, None]
    blocks.copy_(wide.to(getattr(torch, layout.dtype)).view(-1, rows * each).view(torch.uint8))
