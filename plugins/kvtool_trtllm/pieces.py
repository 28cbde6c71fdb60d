"""Pieces: where the bytes of a packed block lie in an engine's memory, and everything a launch relies on, checked.

A kernel that is told a wrong page writes into another request's cache, and nobody hears of it. So pages, sizes and
overlaps are looked at here, on the host, before anything is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from kvtool.errors import EngineFailed

Pages = torch.Tensor | Sequence[int]


@dataclass(frozen=True)
class Piece:
    """`memory`: uint8 [slots, size], row `page` holds `size` bytes that lie at byte `at` of a packed block. Rows may be
    any distance apart; the bytes of a row are contiguous."""

    memory: torch.Tensor
    at: int

    @property
    def size(self) -> int:
        return int(self.memory.shape[1])


class Table(Sequence[Piece]):
    """Pieces, checked once. Keep one where the same pieces are copied again and again: a call with a plain list makes
    a table of its own, and on a GPU another upload of it. Used by one thread at a time.

    `slots`: pages that every piece has. `runs`: the byte ranges of a packed block that the pieces cover, joined.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Raises:
        EngineFailed: memory of another kind or on several devices, or pieces over each other.
        """
        self._pieces = [piece for piece in pieces if piece.size]
        for index, piece in enumerate(self._pieces):
            _check_piece(index, piece, self._pieces[0])
        self.device: torch.device = self._pieces[0].memory.device if self._pieces else torch.device("cpu")
        self.slots = min((int(piece.memory.shape[0]) for piece in self._pieces), default=0)
        self.largest = max((piece.size for piece in self._pieces), default=0)
        self.runs = _covered(self._pieces)
        self._rows: torch.Tensor | None = None
        self._uploaded: Any = None

    @overload
    def __getitem__(self, index: int) -> Piece: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...

    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        return self._pieces[index]

    def __len__(self) -> int:
        return len(self._pieces)

    def rows(self) -> torch.Tensor:
        """int64 [pieces, 4] on the device: address, stride, size and place of each, as copies.cu reads them.

        On a GPU the current stream has them: the upload is queued, for one that blocks would wait for all that the
        stream waits for, and other streams wait for its event.
        """
        if self._rows is None:
            rows = [[p.memory.data_ptr(), p.memory.stride(0), p.size, p.at] for p in self._pieces]
            self._rows = to_device(torch.tensor(rows, dtype=torch.int64), self.device)
            if self.device.type == "cuda":
                self._uploaded = torch.cuda.current_stream(self.device).record_event()
        elif self._uploaded is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._uploaded)
            self._rows.record_stream(stream)
        return self._rows

    def check(self, pages: Pages, packed: torch.Tensor, once: bool) -> torch.Tensor:
        """`pages` as int64 [n] on the host. `packed`: uint8 [n, size]. `once`: no page may be named twice.

        Raises:
            EngineFailed: what does not fit, with both sides named.
        """
        rows = _page_numbers(pages)
        check_blocks(packed, rows.numel())
        if self.runs and self.runs[-1][1] > packed.shape[1]:
            raise EngineFailed(f"pieces reach to byte {self.runs[-1][1]} of packed blocks of {packed.shape[1]}")
        if self._pieces and packed.device != self.device and (packed.device.type != "cpu" or not packed.is_pinned()):
            raise EngineFailed(
                f"packed blocks on {packed.device}, not pinned, and pages on {self.device}: a device reaches its own "
                "memory and pinned host memory only; allocate the blocks with pin_memory=True"
            )
        if rows.numel() and self._pieces and (int(rows.min()) < -1 or int(rows.max()) >= self.slots):
            raise EngineFailed(
                f"pages {_short(rows)} reach outside the engine's pool of {self.slots}; nothing was copied"
            )
        used = rows[rows >= 0].tolist() if once else []
        if len(set(used)) != len(used):
            raise EngineFailed(f"a page is named twice in {_short(rows)}; two blocks cannot go to one page")
        return rows


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor of the host, queued on the current stream; nothing waits."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def check_blocks(packed: torch.Tensor, blocks: int) -> None:
    """Raises EngineFailed unless `packed` is uint8 [blocks, size] with contiguous rows."""
    if packed.dtype != torch.uint8 or packed.ndim != 2:
        raise EngineFailed(f"packed blocks must be uint8 [blocks, size], got {packed.dtype} {list(packed.shape)}")
    if packed.shape[0] != blocks:
        raise EngineFailed(f"{blocks} pages for {packed.shape[0]} packed blocks; give one page a block")
    if packed.shape[1] > 1 and packed.stride(1) != 1:
        raise EngineFailed(f"bytes of a packed block must be contiguous, their stride is {packed.stride(1)}")


def _page_numbers(pages: Pages) -> torch.Tensor:
    rows = torch.as_tensor(pages) if len(pages) else torch.empty(0, dtype=torch.int64)
    if rows.device.type != "cpu":
        raise EngineFailed("pages lie on the device; give them on the host, where they are checked before the launch")
    if rows.ndim != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
        raise EngineFailed(f"pages must be whole numbers in one dimension, got {rows.dtype} {list(rows.shape)}")
    return rows.to(torch.int64)


def _check_piece(index: int, piece: Piece, first: Piece) -> None:
    memory = piece.memory
    if memory.dtype != torch.uint8 or memory.ndim != 2 or (memory.shape[1] > 1 and memory.stride(1) != 1):
        raise EngineFailed(
            f"piece {index}: memory must be uint8 [slots, size] with contiguous rows, got {memory.dtype} "
            f"{list(memory.shape)} with strides {list(memory.stride())}"
        )
    if memory.device != first.memory.device:
        raise EngineFailed(f"piece {index} lies on {memory.device}, piece 0 on {first.memory.device}; copy them apart")
    if piece.at < 0:
        raise EngineFailed(f"piece {index} lies at byte {piece.at} of a packed block; places begin at 0")


def _covered(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for start, end in sorted((piece.at, piece.at + piece.size) for piece in pieces):
        if runs and start < runs[-1][1]:
            raise EngineFailed(f"two pieces hold byte {start} of a packed block; which of them counts is not decided")
        if runs and start == runs[-1][1]:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((start, end))
    return runs


def _short(rows: torch.Tensor) -> str:
    listed = rows.tolist()
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:8]))}, ... {len(listed)} in all]"
