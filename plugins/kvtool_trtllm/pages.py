"""An engine's KV memory as pieces of packed blocks.

A packed block of a rank is, layer group after layer group, its stored shards one after another (see kv/shard.py): each
[layers, kv_factor, heads of the shard, tokens, head_dim]. Where in the engine's memory each run of that lies depends on
the cache manager:

    V1   one tensor [pages, layers, kv_factor, heads * tokens * head_dim], heads outermost within K
    V2   layer groups of regions, `size` bytes at `base + stride * slot`, one buffer for each layer and role

Both are checked against the settings before anything is copied, and refused with both sides named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.errors import EngineRefused
from kvtool.kv.layout import DTYPE_SIZE, KVLayout
from kvtool.kv.shard import RankShards, rank_shards, shard_count
from kvtool_trtllm.copies import Piece, Table


@dataclass(frozen=True)
class Group:
    """One layer group of this rank. `pieces` make up a whole packed part, `layers` each layer of it; `at` is where the
    part begins in a packed block. Shard `i` of `shards` is bytes [at + i * shard_size, ...)."""

    index: int
    at: int
    shard_size: int
    shards: int
    pieces: Table
    layers: dict[int, Table]

    @property
    def size(self) -> int:
        return self.shard_size * self.shards


@dataclass(frozen=True)
class EnginePages:
    """`size`: bytes of a packed block of this rank."""

    groups: tuple[Group, ...]
    shards: RankShards
    shards_total: int
    device: torch.Tensor

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)

    def group_of(self, layer: int) -> Group | None:
        return next((group for group in self.groups if layer in group.layers), None)


class _Shape:
    """What one rank holds, in bytes."""

    def __init__(self, settings: ConnectorSettings, rank: int) -> None:
        self.kv: KVLayout = settings.kv.layout()
        self.shards = rank_shards(self.kv, settings.stored_parallel, settings.tensor_parallel, rank)
        self.total = shard_count(self.kv, settings.stored_parallel)
        self.parts = len(self.shards.reads)
        self.head = self.kv.block_tokens * self.kv.head_dim * DTYPE_SIZE[self.kv.dtype]
        self.heads = len(self.shards.heads)

    @property
    def buffer(self) -> int:
        """Bytes of K, or of V, of one layer in a page."""
        return self.heads * self.head


def of_tensor(tensor: torch.Tensor, settings: ConnectorSettings, rank: int) -> EnginePages:
    """V1's pool tensor.

    Raises:
        EngineRefused: it is not what the settings say.
    """
    shape = _Shape(settings, rank)
    kv = shape.kv
    elements = shape.heads * kv.block_tokens * kv.head_dim
    wanted = (kv.layers, kv.kv_factor, elements)
    if tensor.ndim != 4 or tuple(tensor.shape[1:]) != wanted or tensor.element_size() != DTYPE_SIZE[kv.dtype]:
        raise EngineRefused(
            f"the engine's KV pool is {list(tensor.shape)} of {tensor.element_size()}-byte elements, the connector's "
            f"settings ({kv}, rank {rank} of {settings.tensor_parallel}) make [pages, {kv.layers}, {kv.kv_factor}, "
            f"{elements}] of {DTYPE_SIZE[kv.dtype]}-byte ones; build the bundle again for this engine"
        )
    rows = _rows(tensor)
    runs = {
        (layer, factor): rows[:, (layer * kv.kv_factor + factor) * shape.buffer :][:, : shape.buffer]
        for layer in range(kv.layers)
        for factor in range(kv.kv_factor)
    }
    group = _group(0, 0, shape, tuple(range(kv.layers)), runs)
    if group.shards == 1:  # a page is a packed block as it lies there
        group = Group(0, 0, group.shard_size, 1, Table([Piece(rows[:, : group.size], 0)]), group.layers)
    return EnginePages((group,), shape.shards, shape.total, tensor)


def of_layout(layout: Any, settings: ConnectorSettings, rank: int) -> EnginePages:
    """V2's KvCacheLayout.

    Raises:
        EngineRefused: it is not what the settings say.
    """
    shape = _Shape(settings, rank)
    if layout.tokens_per_block != shape.kv.block_tokens:
        raise EngineRefused(
            f"the engine's blocks have {layout.tokens_per_block} tokens, the connector's settings want "
            f"{shape.kv.block_tokens}"
        )
    groups, at, memory = [], 0, None
    for index, described in enumerate(layout.groups):
        layers = tuple(described.layer_ids)
        runs: dict[tuple[int, int], torch.Tensor] = {}
        for region in described.regions:
            rows = region.as_tensor(torch.uint8)
            memory = rows if memory is None else memory
            _buffers(region, rows, shape, runs)
        wanted = {(layer, factor) for layer in layers for factor in range(shape.kv.kv_factor)}
        if set(runs) != wanted:
            raise EngineRefused(
                f"layer group {described.layer_group_id}: {len(runs)} buffers for {len(layers)} layers of "
                f"{shape.kv.kv_factor}, the connector's settings want {len(wanted)}; it holds other state than KV"
            )
        group = _group(index, at, shape, layers, runs)
        groups.append(group)
        at += group.size
    layers_found = sorted(layer for group in groups for layer in group.layers)
    if memory is None or len(layers_found) != shape.kv.layers:
        raise EngineRefused(
            f"the engine has KV of {len(layers_found)} layers, the connector's settings {shape.kv.layers}"
        )
    return EnginePages(tuple(groups), shape.shards, shape.total, memory)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [pages, bytes of a page], a view."""
    flat = tensor.view(torch.uint8) if tensor.element_size() > 1 else tensor.view(dtype=torch.uint8)
    return flat.flatten(1)


def _buffers(region: Any, rows: torch.Tensor, shape: _Shape, runs: dict[tuple[int, int], torch.Tensor]) -> None:
    """Cut a region's rows into its buffers. Of one layer the roles come as K, then V."""
    size = region.size // max(1, len(region.buffers))
    if size != shape.buffer or size * len(region.buffers) != region.size:
        raise EngineRefused(
            f"a region of {region.size} bytes with {len(region.buffers)} buffers, the settings make buffers "
            f"of {shape.buffer} bytes; build the bundle again for this engine"
        )
    for place, buffer in enumerate(region.buffers):
        factor = sum(layer == buffer.layer_id for layer, _ in runs)
        runs[buffer.layer_id, factor] = rows[:, place * size : (place + 1) * size]


def _group(
    index: int, at: int, shape: _Shape, layers: tuple[int, ...], runs: dict[tuple[int, int], torch.Tensor]
) -> Group:
    """Pieces by shard, layer and K/V: the heads of a shard are one run of each buffer."""
    heads = shape.heads // shape.parts
    run, factors = heads * shape.head, shape.kv.kv_factor
    shard_size = len(layers) * factors * run
    by_layer: dict[int, list[Piece]] = {layer: [] for layer in layers}
    for shard in range(shape.parts):
        for order, layer in enumerate(layers):
            for factor in range(factors):
                place = at + shard * shard_size + (order * factors + factor) * run
                by_layer[layer].append(Piece(runs[layer, factor][:, shard * run : (shard + 1) * run], place))
    pieces = Table([piece for layer in layers for piece in by_layer[layer]])
    return Group(index, at, shard_size, shape.parts, pieces, {layer: Table(by_layer[layer]) for layer in layers})
