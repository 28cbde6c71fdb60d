"""KV memory of the torch engine: blocks in per-layer pools, and who holds which.

A pool is [layers, 2, kv_heads, tokens, head_dim]: within one layer and head the rows of physically neighbouring blocks
follow each other. A sequence whose blocks are neighbours is thus read in place, as a view; one whose blocks are
scattered is gathered first. Both give attention the same numbers in the same order, so the same bits. The allocator
hands out the smallest run of free blocks that fits, and scattered blocks only when no run does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtool.errors import EngineFull
from kvtool.kv.layout import KVLayout


class BlockTable:
    """Which blocks are free. `take` prefers one contiguous run."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = [True] * total
        self.free_count = total

    def take(self, count: int) -> list[int]:
        """`count` blocks, neighbours if any run is long enough.

        Raises:
            EngineFull: fewer are free.
        """
        if count > self.free_count:
            raise EngineFull(
                f"wanted {count} KV blocks, {self.free_count} of {self.total} are free; wait for a sequence to end, or "
                "raise kv_blocks"
            )
        runs = self._runs()
        fitting = [run for run in runs if run[1] >= count]
        if fitting:
            start, _ = min(fitting, key=lambda run: (run[1], run[0]))
            taken = list(range(start, start + count))
        else:
            taken = [b for start, length in sorted(runs, key=lambda run: -run[1]) for b in range(start, start + length)]
            taken = taken[:count]
        for block in taken:
            self._free[block] = False
        self.free_count -= count
        return taken

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            assert not self._free[block], f"KV block {block} was freed twice"
            self._free[block] = True
        self.free_count += len(blocks)

    def _runs(self) -> list[tuple[int, int]]:
        """(start, length) of every run of free blocks."""
        edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(self._free, dtype=np.int8), [0]])))
        return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@dataclass(eq=False)
class TorchSequence:
    """KV memory of one sequence. `slots`: int64 [capacity_tokens], the pool row of each position."""

    blocks: list[int]
    block_tokens: int
    slots: torch.Tensor
    contiguous: bool
    length: int = 0
    open: bool = True

    @property
    def capacity_tokens(self) -> int:
        return len(self.blocks) * self.block_tokens


class KVMemory:
    """All KV memory of one engine. Its pages are taken from the system only when they are first written."""

    def __init__(self, layout: KVLayout, blocks: int) -> None:
        self.layout = layout
        self.table = BlockTable(blocks)
        tokens = blocks * layout.block_tokens
        shape = (layout.layers, 2, layout.kv_heads, tokens, layout.head_dim)
        self.pool = torch.zeros(shape, dtype=torch.bfloat16)
        self.layers = list(self.pool.unbind(0))
        self._raw: npt.NDArray[np.int16] = self.pool.view(torch.int16).numpy()

    def open(self, capacity_tokens: int) -> TorchSequence:
        assert capacity_tokens > 0, "a sequence needs room for at least one token"
        step = self.layout.block_tokens
        blocks = self.table.take(-(-capacity_tokens // step))
        slots = (torch.tensor(blocks)[:, None] * step + torch.arange(step)).reshape(-1)
        contiguous = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        return TorchSequence(blocks, step, slots, contiguous)

    def close(self, sequence: TorchSequence) -> None:
        if sequence.open:
            sequence.open = False
            self.table.give_back(sequence.blocks)

    def read(self, layer: int, sequence: TorchSequence, end: int) -> torch.Tensor:
        """K and V of positions [0, end): [2, kv_heads, end, head_dim], a view where the blocks are neighbours."""
        pool = self.layers[layer]
        if sequence.contiguous:
            first = sequence.blocks[0] * sequence.block_tokens
            return pool[:, :, first : first + end]
        return pool.index_select(2, sequence.slots[:end])

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store `kv` [2, kv_heads, tokens, head_dim] in the pool rows `slots`."""
        self.layers[layer].index_copy_(2, slots, kv)

    def export_block(self, sequence: TorchSequence, index: int, out: memoryview) -> None:
        block = np.frombuffer(out, dtype=np.int16).reshape(self.layout.shape)
        assert sequence.open and 0 <= index < len(sequence.blocks)
        step = sequence.block_tokens
        first, filled = sequence.blocks[index] * step, min(max(sequence.length - index * step, 0), step)
        block[:, :, :, :filled] = self._raw[:, :, :, first : first + filled]
        block[:, :, :, filled:] = 0

    def import_block(self, sequence: TorchSequence, index: int, data: memoryview) -> None:
        block = np.frombuffer(data, dtype=np.int16).reshape(self.layout.shape)
        assert sequence.open and 0 <= index < len(sequence.blocks)
        first = sequence.blocks[index] * sequence.block_tokens
        self._raw[:, :, :, first : first + sequence.block_tokens] = block
