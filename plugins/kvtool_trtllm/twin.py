"""The twin of copies.cu in torch's operations: what runs on a CPU, and on a GPU without a compiler.

On a GPU everything is queued on the current stream. Between device and pinned host memory it copies run by run of one
block, since torch may copy a strided range by way of a temporary that it reads too early.
"""

from __future__ import annotations

import torch

from kvtool_trtllm.pieces import Table, to_device

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_CHUNK = 1 << 20
"""Words that the checksum's temporaries hold at a time."""


class Twin:
    name = "torch operations"

    def copy(self, gathering: bool, table: Table, rows: torch.Tensor, packed: torch.Tensor) -> None:
        held = torch.nonzero(rows >= 0).flatten().tolist()
        if not gathering and not held:
            return
        pages = to_device(rows.clamp(min=0) if gathering else rows[held], table.device)
        holes = [block for block in range(rows.numel()) if rows[block] < 0] if gathering else []
        for start, end in table.runs:
            inside = [piece for piece in table if start <= piece.at < end]
            if gathering:
                run = torch.empty(rows.numel(), end - start, dtype=torch.uint8, device=table.device)
                for piece in inside if held else []:
                    run[:, piece.at - start : piece.at - start + piece.size] = piece.memory.index_select(0, pages)
                for block in holes:
                    run[block].zero_()
                _by_row(run, packed[:, start:end])
            else:
                run = torch.empty(len(held), end - start, dtype=torch.uint8, device=table.device)
                _by_row([packed[block, start:end] for block in held], run)
                for piece in inside:
                    part = run[:, piece.at - start : piece.at - start + piece.size]
                    piece.memory.index_copy_(0, pages, part)

    def checksum(self, blocks: torch.Tensor, seed: int) -> torch.Tensor:
        count, size = blocks.shape
        sums = torch.full((count,), _signed(_mix_number(size ^ _mix_number(seed))), dtype=torch.int64)
        sums = sums.to(blocks.device)
        for first in range(0, -(-size // 8), _CHUNK):
            part = blocks[:, first * 8 : (first + _CHUNK) * 8]
            words = -(-part.shape[1] // 8)
            padded = torch.zeros(count, words * 8, dtype=torch.uint8, device=blocks.device)
            padded[:, : part.shape[1]] = part
            places = torch.arange(first + 1, first + 1 + words, dtype=torch.int64, device=blocks.device)
            mask = _mix(places * _signed(_GOLDEN) + _signed(seed))
            sums += _mix(padded.view(torch.int64) ^ mask).sum(dim=1)
        return sums


def _by_row(source: torch.Tensor | list[torch.Tensor], target: torch.Tensor) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one, non_blocking=True)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64 that stands for uint64: shifts are made logical, products wrap."""
    x = (x ^ _shifted(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shifted(x, 27)) * _signed(_MIX[1])
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mix_number(x: int) -> int:
    x = (x ^ x >> 30) * _MIX[0] % (1 << 64)
    x = (x ^ x >> 27) * _MIX[1] % (1 << 64)
    return x ^ x >> 31


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
