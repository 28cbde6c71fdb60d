"""Matrix products whose rows do not depend on how many rows there are.

A BLAS picks its kernel by shape, and kernels round differently: the same row of activations may come out with other
last bits in a batch of 33 than in one of 64. Then the KV of a token would depend on how its prompt was chunked, and a
cache hit could change an answer. So each kernel is probed when the engine is loaded, once for every weight shape, on
this machine and with its thread count: where all row counts agree it runs free; where only large ones do, small inputs
are padded; else everything runs in tiles of the sizes that agree with each other.

Thinking Machines, "Defeating Nondeterminism in LLM Inference" (2025), calls the property batch invariance and writes
kernels for it; here it is found among the kernels that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Product = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out]."""

PREFILL_ROWS = (1, 2, 3, 5, 8, 16, 31, 32, 33, 64, 100, 128, 192, 256, 320, 512)
DECODE_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16)
ROWS_MAX = PREFILL_ROWS[-1]


@dataclass(frozen=True)
class RowPlan:
    """How a product is run. `rows_min`: any count from there to `rows_max` gives the same rows (0: none does).
    `tiles`: else, the counts that agree with each other, ascending."""

    rows_min: int
    rows_max: int
    tiles: tuple[int, ...] = ()

    @property
    def free(self) -> bool:
        return self.rows_min > 0


def probe(product: Product, columns: int, dtype: torch.dtype, counts: Sequence[int], anchor: int) -> RowPlan:
    """Find out which row counts give the rows that tiles of `anchor` give. About 2,000 rows' worth of compute."""
    top = counts[-1]
    rows = pattern(top, columns).to(dtype)
    wanted = torch.cat([product(rows[at : at + anchor]) for at in range(0, top, anchor)])
    agree = {count for count in counts if _agrees(product, rows, wanted, count)}
    for least in counts:
        if least > anchor:
            break
        if all(count in agree for count in counts if count >= least):
            return RowPlan(least, top)
    return RowPlan(0, top, tuple(sorted({c for c in agree if c % anchor == 0} | {anchor})))


def _agrees(product: Product, rows: torch.Tensor, wanted: torch.Tensor, count: int) -> bool:
    starts = {0, rows.shape[0] - count}
    return all(torch.equal(product(rows[at : at + count].clone()), wanted[at : at + count]) for at in starts)


def pattern(*shape: int) -> torch.Tensor:
    """Fixed numbers in [-1, 1) that look random; the same on every machine."""
    count = 1
    for length in shape:
        count *= length
    mixed = (torch.arange(count, dtype=torch.int64) * 2654435761 + 12345) % 4294967296
    return (((mixed ^ (mixed >> 13)) % 65536).float() / 32768 - 1).reshape(shape)


class Rows:
    """A product run by its plan: row i of the result is a function of row i of the input alone."""

    def __init__(self, product: Product, plan: RowPlan) -> None:
        self.product, self.plan = product, plan

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        plan, count = self.plan, rows.shape[0]
        if plan.rows_min <= count <= plan.rows_max and plan.free:
            return self.product(rows)
        parts, at = [], 0
        while at < count:
            size = self._size(count - at)
            take = min(size, count - at)
            part = rows[at : at + take]
            parts.append(self.product(part if take == size else F.pad(part, (0, 0, 0, size - take)))[:take])
            at += take
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _size(self, left: int) -> int:
        plan = self.plan
        if plan.free:
            return max(plan.rows_min, min(left, plan.rows_max))
        fitting = [tile for tile in plan.tiles if tile <= left]
        return fitting[-1] if fitting else plan.tiles[0]


def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; where not, float32 is about four times faster."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16") or found.get("amx_tile") or found.get("bf16"))


def linear_products(weight: torch.Tensor, dtype: torch.dtype) -> list[Callable[[], Product]]:
    """Ways to multiply by `weight` [out, in] in `dtype`, the preferred first; each may raise RuntimeError.

    On CPUs with bfloat16 units F.linear on the mapped weights comes first: the pages stay shared between processes.
    Else oneDNN's packed float32 does: its rows agree from two rows on, where MKL's do not, and short inputs are faster.
    """

    def plain() -> Product:
        held = weight.to(dtype)
        return lambda rows: F.linear(rows, held)

    def packed() -> Product:
        held = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), None)
        multiply = torch.ops.mkldnn._linear_pointwise
        return lambda rows: multiply(rows, held, None, "none", [], "")

    return [plain, packed] if dtype == torch.bfloat16 else [packed, plain]


class LinearMaker:
    """Makes `Rows` for linear weights; probes each shape once and keeps to one kind of product for it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._chosen: dict[tuple[int, ...], tuple[int, RowPlan]] = {}

    def make(self, weight: torch.Tensor) -> Rows:
        shape = tuple(weight.shape)
        if shape not in self._chosen:
            self._chosen[shape] = self._choose(weight)
        way, plan = self._chosen[shape]
        return Rows(linear_products(weight, self.dtype)[way](), plan)

    def _choose(self, weight: torch.Tensor) -> tuple[int, RowPlan]:
        """The first product that agrees from two rows on; else the one that agrees from the fewest, else tiles."""
        seen: list[tuple[int, RowPlan]] = []
        for way, start in enumerate(linear_products(weight, self.dtype)):
            try:
                plan = probe(start(), weight.shape[1], self.dtype, PREFILL_ROWS, anchor=64)
            except RuntimeError:  # torch without oneDNN, or a shape that it does not pack
                continue
            if plan.free and plan.rows_min <= 2:
                return way, plan
            seen.append((way, plan))
        return min(seen, key=lambda choice: choice[1].rows_min if choice[1].free else ROWS_MAX + 1)
