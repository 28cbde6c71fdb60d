"""Stored shards: how a block of all heads is cut in the pool, and which of its parts a tensor-parallel rank touches.

Engines of several widths may share a pool. Blocks lie in it under one width, `stored_parallel`, a multiple of every
engine's own, so that the part of each rank is a whole number of stored shards: a rank reads the shards that its heads
cover, in order, and writes those that it owns. Each stored shard is a block of the pool with a key and a checksum of
its own: [layers, kv_factor, heads of the shard, block_tokens, head_dim].

Heads are cut as engines cut them. At a width up to the KV heads each rank holds a run of kv_heads / width; above it
each head lies on width / kv_heads ranks, and the lowest of these owns it. Multi-head latent attention (kv_factor 1) has
one latent for all heads, on every rank: one shard, owned by rank 0.

Pure rules: no bytes are touched here. Byte ranges are kv/reshard.py's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm

from blake3 import blake3

from kvtool.errors import EngineRefused
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout


@dataclass(frozen=True)
class RankShards:
    """What one rank holds of every block. `heads` are KV heads of the whole model; `reads` and `writes` index stored
    shards, and `writes` is empty or equal to `reads`."""

    heads: range
    reads: range
    writes: range


def shard_count(kv: KVLayout, width: int) -> int:
    """Parts into which `width` cuts a block of `kv`, the whole model's layout.

    Raises:
        EngineRefused: the width neither divides the KV heads nor is a multiple of them.
    """
    if width < 1:
        raise EngineRefused(f"tensor parallel {width}: must be at least 1")
    if kv.kv_factor == 1:
        return 1
    if kv.kv_heads % width and width % kv.kv_heads:
        raise EngineRefused(
            f"tensor parallel {width} does not fit {kv.kv_heads} KV heads: it must divide them or be a multiple of them"
        )
    return min(width, kv.kv_heads)


def stored_layout(kv: KVLayout, width: int, layers: int | None = None) -> KVLayout:
    """The layout of one part of a block under `width`: what the pool is opened with, and what a rank of that tensor
    parallelism holds. `layers`: of one layer group; None is all.

    Raises:
        EngineRefused: the width does not fit the KV heads.
    """
    return replace(kv, kv_heads=kv.kv_heads // shard_count(kv, width), layers=kv.layers if layers is None else layers)


def rank_shards(kv: KVLayout, stored_parallel: int, tensor_parallel: int, rank: int) -> RankShards:
    """The stored shards that `rank` of `tensor_parallel` reads, and those that it owns.

    Raises:
        EngineRefused: a width does not fit the KV heads, or the stored one is no multiple of the engine's.
    """
    stored, parts = shard_count(kv, stored_parallel), shard_count(kv, tensor_parallel)
    if stored_parallel % tensor_parallel:
        raise EngineRefused(
            f"blocks stored under width {stored_parallel} do not fit tensor parallel {tensor_parallel}: set "
            f"stored_parallel to {lcm(stored_parallel, tensor_parallel)}, the least common multiple, for every engine "
            "that shares the pool"
        )
    if not 0 <= rank < tensor_parallel:
        raise EngineRefused(
            f"rank {rank} is outside tensor parallel {tensor_parallel}: it must be in 0..{tensor_parallel - 1}"
        )
    copies = tensor_parallel // parts
    part, heads, each = rank // copies, kv.kv_heads // parts, stored // parts
    reads = range(part * each, (part + 1) * each)
    return RankShards(
        heads=range(part * heads, (part + 1) * heads), reads=reads, writes=reads if rank % copies == 0 else range(0)
    )


def shared_width(widths: Iterable[int]) -> int:
    """The smallest stored_parallel that fits every engine of `widths`: their least common multiple."""
    return lcm(*widths)


def shard_key(key: BlockKey, count: int, index: int, layer_group: int = 0) -> BlockKey:
    """The pool's key of stored shard `index` of `count` of the block whose chain key is `key`.

    Cuts of different counts have different keys, so that engines that store under different widths miss each other's
    blocks and never take a part for another. The parent of a shard is the same shard of the parent block.
    """
    assert 0 <= index < count and layer_group >= 0, f"shard {index} of {count}, layer group {layer_group}"
    return blake3(b"kvtool stored shard 1\0" + key + struct.pack("<III", count, index, layer_group)).digest()
