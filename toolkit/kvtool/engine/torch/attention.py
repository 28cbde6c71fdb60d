"""Attention with a fixed order of summation for every position.

How a flash kernel splits keys and rounds depends on the shape of its call. So prefill always calls it in the same
shapes: queries in tiles of 64 positions aligned to absolute position, keys from 0 to the end of the tile. The shape of
a tile depends on where it lies and on nothing else; rows that a chunk does not want are zero and thrown away.
(FlashAttention, Dao et al. 2022, section 3.1, for the online softmax whose split is being fixed.) Queries of one KV
head's group are folded into the row axis, so one call reads K and V once for all of them.

Decode attends for one sequence at a time, so that its shape is a function of its position and not of the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvtool.engine.family import Family
from kvtool.engine.torch.memory import KVMemory, TorchSequence

TILE = 64
"""Query positions in a call. A row in a tile of 32 cost 1.8 x as much (three KV heads divide badly by two cores), in
one of 128 little less."""


class Attention:
    """`dtype`: what prefill computes in; K and V are bfloat16 in memory either way."""

    def __init__(self, family: Family, memory: KVMemory, dtype: torch.dtype) -> None:
        self.heads, self.groups, self.dim = family.heads, family.kv_heads, family.head_dim
        self.fold = family.heads // family.kv_heads
        self.memory, self.dtype = memory, dtype
        self._keys = torch.empty(2, self.groups, 0, self.dim, dtype=dtype)
        self._mask = torch.empty(0, 0, dtype=dtype)
        self._reserve(8 * TILE)

    def _reserve(self, tokens: int) -> None:
        """Grow the scratch to `tokens` keys, to a multiple of the tile."""
        if tokens <= self._keys.shape[2]:
            return
        size = 8 * TILE
        while size < tokens:
            size *= 2
        self._keys = torch.zeros(2, self.groups, size, self.dim, dtype=self.dtype)
        mask = torch.zeros(self.fold, TILE, size, dtype=self.dtype)
        mask[:, :, size - TILE :] = torch.full((TILE, TILE), float("-inf")).triu_(1)
        self._mask = mask.reshape(self.fold * TILE, size)

    def prefill(self, layer: int, sequence: TorchSequence, queries: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Causal attention of positions [start, end), whose K and V are in memory already.

        queries: [end - start, heads, head_dim] -> [end - start, heads * head_dim], both in `dtype`.
        """
        first, last = start // TILE * TILE, -(-end // TILE) * TILE
        self._reserve(last)
        keys = self._keys[:, :, :last]
        keys[:, :, :end] = self.memory.read(layer, sequence, end)
        keys[:, :, end:] = 0  # masked, but 0 x NaN would not be
        tiles = (last - first) // TILE
        rows = F.pad(queries, (0, 0, 0, 0, start - first, last - end))
        folded = rows.view(tiles, TILE, self.groups, self.fold, self.dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(tiles, self.groups, self.fold * TILE, self.dim)
        parts = [self._tile(folded[tile : tile + 1], keys, first + (tile + 1) * TILE) for tile in range(tiles)]
        out = torch.cat(parts).view(tiles, self.groups, self.fold, TILE, self.dim).permute(0, 3, 1, 2, 4)
        return out.reshape(tiles * TILE, self.heads * self.dim)[start - first : end - first]

    def _tile(self, queries: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
        k, v = keys[:, None, :, :count].unbind(0)
        mask = self._mask[:, self._mask.shape[1] - count :]
        return F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)

    def probe(self, kv: torch.Tensor) -> torch.Tensor:
        """One tile and one decode step over `kv` [2, kv_heads, tokens, head_dim], float32 and flat."""
        count = kv.shape[2]
        self._reserve(count)
        self._keys[:, :, :count] = kv
        row = kv[0, :, :1].repeat_interleave(self.fold, 1)
        tile = self._tile(row.repeat_interleave(TILE, 1).to(self.dtype)[None], self._keys, count)
        k, v = kv[:, None].unbind(0)
        step = F.scaled_dot_product_attention(row[None], k, v)
        return torch.cat([tile.float().reshape(-1), step.float().reshape(-1)])

    def decode(self, layer: int, sequence: TorchSequence, query: torch.Tensor, count: int) -> torch.Tensor:
        """Attention of one position over keys [0, count): query [heads, head_dim] -> [heads * head_dim], bfloat16."""
        k, v = self.memory.read(layer, sequence, count)[:, None].unbind(0)
        folded = query.view(1, self.groups, self.fold, self.dim)
        return F.scaled_dot_product_attention(folded, k, v).view(-1)
