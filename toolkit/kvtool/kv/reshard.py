"""Resharding: a block cut one way made into the same block cut another way, byte for byte.

A cut says how the bytes of a block of all heads and layers are parted: by heads, as ranks of a tensor-parallel width
hold them, and by groups of layers, as an engine with several kinds of layers keeps them. Every part is contiguous,
[layers, kv_factor, heads, block_tokens, head_dim]. Between any two cuts of one layout there is a plan: a list of byte
ranges to copy. Nothing is converted, scaled or rounded, so there and back gives the bytes that one began with.

Quantised payloads may carry scales. They lie behind the payload of their own part, from the next multiple of 16 bytes,
in the order of the payload with the dimensions that they span left out: `Scales`. Scales of heads, tokens and groups
are cut as the heads are. A scale of a whole block stands in every part; parts that disagree about it cannot be merged,
since one of them would be read under the other's scale, and are refused.

Pure: a plan touches no bytes, `Plan.apply` copies in numpy. The device copies take the same ranges as their pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvtool.errors import BlockCorrupt, EngineRefused
from kvtool.kv.layout import DTYPE_SIZE, KVLayout
from kvtool.kv.shard import shard_count, stored_layout

SCALES_AT = 16
"""Scales begin at a multiple of this many bytes."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Scales:
    """Scales that travel with a quantised block, for each layer and K or V.

    `per`: one for the block [layers, kv_factor], for each head [layers, kv_factor, heads], for each token [.., heads,
    tokens], or for each run of `group` dims of a token [.., heads, tokens, head_dim / group].
    """

    per: Literal["block", "head", "token", "group"]
    dtype: str = "float32"
    group: int = 16

    def head_size(self, layout: KVLayout) -> int:
        """Bytes of one head's scales in one layer's K or V; 0 where scales are not of heads."""
        if self.per == "group" and (self.group < 1 or layout.head_dim % self.group):
            raise EngineRefused(f"scales of {self.group} dims do not divide heads of {layout.head_dim}; set a divisor")
        count = {
            "block": 0,
            "head": 1,
            "token": layout.block_tokens,
            "group": layout.block_tokens * (layout.head_dim // self.group),
        }[self.per]
        return count * DTYPE_SIZE[self.dtype]

    def at(self, layout: KVLayout) -> int:
        """Where the scales of a part begin: behind its payload."""
        return -(-layout.block_size // SCALES_AT) * SCALES_AT

    def part_size(self, layout: KVLayout) -> int:
        """Bytes of a part with its scales. `layout`: of the part."""
        each = DTYPE_SIZE[self.dtype] if self.per == "block" else layout.kv_heads * self.head_size(layout)
        return self.at(layout) + layout.layers * layout.kv_factor * each


@dataclass(frozen=True)
class Cut:
    """`width`: tensor parallel. `groups`: the layers of each layer group, in order; empty is one group of all.

    Parts are numbered group by group, and inside a group by their heads.
    """

    width: int = 1
    groups: tuple[tuple[int, ...], ...] = ()

    def parts(self, kv: KVLayout) -> list[KVLayout]:
        """The layout of every part of a block of `kv`, the whole model's layout."""
        shards = shard_count(kv, self.width)
        return [stored_layout(kv, self.width, len(group)) for group in self.layers(kv) for _ in range(shards)]

    def layers(self, kv: KVLayout) -> tuple[tuple[int, ...], ...]:
        """The groups, checked.

        Raises:
            EngineRefused: a layer is in no group or in two.
        """
        groups = self.groups or (tuple(range(kv.layers)),)
        if sorted(layer for group in groups for layer in group) != list(range(kv.layers)) or not all(groups):
            raise EngineRefused(f"layer groups {groups} do not hold each of {kv.layers} layers once")
        return groups


@dataclass(frozen=True)
class Run:
    """`size` bytes at `source_at` of source part `source` go to `target_at` of target part `target`."""

    source: int
    source_at: int
    target: int
    target_at: int
    size: int


@dataclass(frozen=True)
class Plan:
    """`agree`: ranges of two source parts (`source` and `target` of the run) that must hold the same bytes: the scales
    of a block. `zeros`: part, byte and size of the padding before scales."""

    source_sizes: tuple[int, ...]
    target_sizes: tuple[int, ...]
    runs: tuple[Run, ...]
    agree: tuple[Run, ...] = ()
    zeros: tuple[tuple[int, int, int], ...] = ()

    def apply(self, sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
        """Copy. Each array is uint8 [.., size of its part]: one block, or n of them in the same leading dimensions.
        Every byte of the targets is written.

        Raises:
            BlockCorrupt: parts that must share a scale do not; nothing was copied.
            EngineRefused: an array that is not of its part's size.
        """
        _check_sizes("source", sources, self.source_sizes)
        _check_sizes("target", targets, self.target_sizes)
        for run in self.agree:
            one, other = sources[run.source], sources[run.target]
            if not np.array_equal(_of(one, run.source_at, run.size), _of(other, run.target_at, run.size)):
                raise BlockCorrupt(
                    f"parts {run.source} and {run.target} of a block have different scales: they were not quantised "
                    "together and cannot be one block; use a scale for each head, or compute the block again"
                )
        for part, at, size in self.zeros:
            _of(targets[part], at, size)[:] = 0
        for run in self.runs:
            _of(targets[run.target], run.target_at, run.size)[:] = _of(sources[run.source], run.source_at, run.size)


def plan(kv: KVLayout, source: Cut, target: Cut, scales: Scales | None = None) -> Plan:
    """How the parts of `source` become those of `target`. `kv`: the whole model's layout.

    Raises:
        EngineRefused: a width does not fit the KV heads, or layer groups that do not hold each layer once.
    """
    have, want = source.parts(kv), target.parts(kv)
    head_size = kv.block_tokens * kv.head_dim * DTYPE_SIZE[kv.dtype]
    payload = _joined(_head_runs(kv, source, target, head_size, [0] * len(have), [0] * len(want)))
    if scales is None:
        return Plan(_sizes(have), _sizes(want), payload)
    behind, before = [scales.at(part) for part in have], [scales.at(part) for part in want]
    sizes = tuple(map(scales.part_size, have)), tuple(map(scales.part_size, want))
    gaps = ((part, layout.block_size, before[part] - layout.block_size) for part, layout in enumerate(want))
    zeros = tuple(gap for gap in gaps if gap[2])
    if scales.per == "block":
        size = DTYPE_SIZE[scales.dtype]
        runs = _joined(_block_scales(kv, source, target, size, behind, before))
        return Plan(*sizes, payload + runs, tuple(_agreeing(kv, source, size, behind)), zeros)
    runs = _joined(_head_runs(kv, source, target, scales.head_size(kv), behind, before))
    return Plan(*sizes, payload + runs, zeros=zeros)


def _head_runs(
    kv: KVLayout, source: Cut, target: Cut, head_size: int, behind: Sequence[int], before: Sequence[int]
) -> Iterator[Run]:
    """Runs of heads of `head_size` bytes, in arrays that begin at byte `behind` and `before` of their parts."""
    shards, where = shard_count(kv, source.width), _where(source.layers(kv))
    held, wanted = kv.kv_heads // shards, kv.kv_heads // shard_count(kv, target.width)
    for part, first_head, index, layer in _target_layers(kv, target):
        group, source_index = where[layer]
        for factor in range(kv.kv_factor):
            head, end = first_head, first_head + wanted
            while head < end:
                shard, inner = divmod(head, held)
                count = min(end - head, held - inner)
                at = ((source_index * kv.kv_factor + factor) * held + inner) * head_size
                to = ((index * kv.kv_factor + factor) * wanted + head - first_head) * head_size
                one = group * shards + shard
                yield Run(one, behind[one] + at, part, before[part] + to, count * head_size)
                head += count


def _block_scales(
    kv: KVLayout, source: Cut, target: Cut, size: int, behind: Sequence[int], before: Sequence[int]
) -> Iterator[Run]:
    """Every target part gets the scales of its layers from the first source part that has them: all have the same."""
    shards, where = shard_count(kv, source.width), _where(source.layers(kv))
    both = size * kv.kv_factor
    for part, _, index, layer in _target_layers(kv, target):
        group, source_index = where[layer]
        one = group * shards
        yield Run(one, behind[one] + source_index * both, part, before[part] + index * both, both)


def _agreeing(kv: KVLayout, source: Cut, size: int, behind: Sequence[int]) -> Iterator[Run]:
    shards = shard_count(kv, source.width)
    for group, layers in enumerate(source.layers(kv)):
        first = group * shards
        for other in range(first + 1, first + shards):
            yield Run(first, behind[first], other, behind[other], len(layers) * kv.kv_factor * size)


def _target_layers(kv: KVLayout, target: Cut) -> Iterator[tuple[int, int, int, int]]:
    """Each target part's layers: part, its first head, the layer's index in the part, the layer."""
    shards = shard_count(kv, target.width)
    for group, layers in enumerate(target.layers(kv)):
        for shard in range(shards):
            for index, layer in enumerate(layers):
                yield group * shards + shard, shard * (kv.kv_heads // shards), index, layer


def _where(groups: Sequence[Sequence[int]]) -> dict[int, tuple[int, int]]:
    return {layer: (group, index) for group, layers in enumerate(groups) for index, layer in enumerate(layers)}


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Neighbours that follow each other on both sides become one."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.source, last.target) == (run.source, run.target)
            and last.source_at + last.size == run.source_at
            and last.target_at + last.size == run.target_at
        ):
            joined[-1] = replace(last, size=last.size + run.size)
        else:
            joined.append(run)
    return tuple(joined)


def _sizes(parts: Sequence[KVLayout]) -> tuple[int, ...]:
    return tuple(part.block_size for part in parts)


def _of(array: Bytes, at: int, size: int) -> Bytes:
    return array[..., at : at + size]


def _check_sizes(side: str, arrays: Sequence[Bytes], sizes: Sequence[int]) -> None:
    found = [array.shape[-1] for array in arrays]
    if found != list(sizes):
        raise EngineRefused(f"resharding: {side} parts have {found} bytes, the plan wants {list(sizes)}")


@dataclass(frozen=True)
class PageRun:
    """`size` bytes of a page lie at `at` of the packed block, all of one layer. `layer` counts inside the page."""

    layer: int
    page_at: int
    at: int
    size: int


def page_runs(page: KVLayout, shards: int) -> tuple[PageRun, ...]:
    """Where a rank's page lies in its packed form: `shards` stored shards one after another.

    `page`: the layout of one rank, `stored_layout(kv, tensor_parallel)`; `shards`: how many stored ones it covers,
    `len(rank_shards(..).reads)`. Runs stay inside a layer, so that a layer is a subset of them.
    """
    if page.kv_heads % shards:
        raise EngineRefused(f"{shards} stored shards do not divide the {page.kv_heads} KV heads of a page")
    head = page.block_tokens * page.head_dim * DTYPE_SIZE[page.dtype]
    layer_size, shard_size = page.kv_factor * page.kv_heads * head, page.block_size // shards
    if shards == 1:
        starts = (layer * layer_size for layer in range(page.layers))
        return tuple(PageRun(layer, at, at, layer_size) for layer, at in enumerate(starts))
    size = page.kv_heads // shards * head
    return tuple(
        PageRun(
            layer,
            layer * layer_size + (factor * shards + shard) * size,
            shard * shard_size + (layer * page.kv_factor + factor) * size,
            size,
        )
        for layer in range(page.layers)
        for factor in range(page.kv_factor)
        for shard in range(shards)
    )
