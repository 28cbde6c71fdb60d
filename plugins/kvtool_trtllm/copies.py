"""Device copies: between an engine's scattered pages and blocks packed one after another.

A packed block is contiguous: one stored shard after another, each [layers, kv_factor, heads, tokens, head_dim]. An
engine's page holds the same bytes in another order, and in several places where a layer has memory of its own. A
`Piece` says where one run of a packed block lies in the engine's memory; a list of pieces is a whole block, or one
layer of it, or the head ranges of one stored shard. `gather` collects n pages into n packed blocks, `scatter` spreads
them again.

Pages of -1 are holes that the engine keeps in place: gather writes zeros there, scatter skips them. Pages are checked
against the pool before anything is launched, since a kernel that writes elsewhere in GPU memory is a wrong answer in
another request.

Where the memory is on a GPU the work is queued on the current stream, or the one given, by kernels of ours (kernel.py)
or, without a compiler, by torch's own operations; nothing waits for it. Elsewhere the twin below does it at once. Same
tests for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtool.errors import EngineFailed


@dataclass(frozen=True)
class Piece:
    """`memory`: uint8 [slots, size], row `page` holds `size` bytes that lie at byte `at` of a packed block. Rows may be
    any distance apart; the bytes of a row are contiguous."""

    memory: torch.Tensor
    at: int

    @property
    def size(self) -> int:
        return int(self.memory.shape[1])


Pages = torch.Tensor | Sequence[int]


def gather(pieces: Sequence[Piece], pages: Pages, out: torch.Tensor, stream: Any = None) -> None:
    """Pages -> packed blocks. `out`: uint8 [n, packed size], on the pieces' device or pinned on the host; bytes of it
    that no piece covers stay as they are. `pages`: n page ids on the host; -1 gives zeros. `stream`: torch.cuda.Stream.

    Raises:
        EngineFailed: a page outside the pool, shapes that do not fit, or a device error; nothing was copied then.
    """
    rows = check(pieces, pages, out)
    _twin_gather(pieces, rows, out)


def scatter(pieces: Sequence[Piece], pages: Pages, source: torch.Tensor, stream: Any = None) -> None:
    """Packed blocks -> pages; the inverse of `gather`. Pages of -1 are skipped; no page may stand there twice.

    Raises:
        EngineFailed: as for gather, or a page is named twice.
    """
    rows = check(pieces, pages, source)
    used = rows[rows >= 0].tolist()
    if len(set(used)) != len(used):
        raise EngineFailed(f"scatter: a page is named twice in {_short(rows)}; two blocks cannot go to one page")
    _twin_scatter(pieces, rows, source)


def check(pieces: Sequence[Piece], pages: Pages, packed: torch.Tensor) -> torch.Tensor:
    """`pages` as int64 [n] on the host, after everything that a launch relies on was looked at.

    Raises:
        EngineFailed: what does not fit, with both sides named.
    """
    rows = torch.as_tensor(pages) if len(pages) else torch.empty(0, dtype=torch.int64)
    if rows.device.type != "cpu":
        raise EngineFailed("pages lie on the device; give them on the host, where they are checked before the launch")
    if rows.ndim != 1 or rows.is_floating_point():
        raise EngineFailed(f"pages must be whole numbers in one dimension, got {rows.dtype} {list(rows.shape)}")
    rows = rows.to(torch.int64)
    _check_packed(packed, rows.numel())
    for index, piece in enumerate(pieces):
        _check_piece(index, piece, packed)
    if rows.numel() and pieces:
        slots = min(piece.memory.shape[0] for piece in pieces)
        if int(rows.min()) < -1 or int(rows.max()) >= slots:
            raise EngineFailed(f"pages {_short(rows)} reach outside the engine's pool of {slots}; nothing was copied")
    return rows


def _check_packed(packed: torch.Tensor, blocks: int) -> None:
    if packed.dtype != torch.uint8 or packed.ndim != 2:
        raise EngineFailed(f"packed blocks must be uint8 [blocks, size], got {packed.dtype} {list(packed.shape)}")
    if packed.shape[0] != blocks:
        raise EngineFailed(f"{blocks} pages for {packed.shape[0]} packed blocks; give one page a block")
    if packed.shape[1] > 1 and packed.stride(1) != 1:
        raise EngineFailed(f"bytes of a packed block must be contiguous, their stride is {packed.stride(1)}")


def _check_piece(index: int, piece: Piece, packed: torch.Tensor) -> None:
    memory = piece.memory
    if memory.dtype != torch.uint8 or memory.ndim != 2 or (memory.shape[1] > 1 and memory.stride(1) != 1):
        raise EngineFailed(
            f"piece {index}: memory must be uint8 [slots, size] with contiguous rows, got {memory.dtype} "
            f"{list(memory.shape)} with strides {list(memory.stride())}"
        )
    if piece.at < 0 or piece.at + piece.size > packed.shape[1]:
        raise EngineFailed(
            f"piece {index} lies at bytes {piece.at}..{piece.at + piece.size} of packed blocks of {packed.shape[1]}"
        )


def _short(rows: torch.Tensor) -> str:
    listed = rows.tolist()
    return str(listed) if len(listed) <= 8 else f"[{', '.join(map(str, listed[:8]))}, ... {len(listed)} in all]"


def _twin_gather(pieces: Sequence[Piece], rows: torch.Tensor, out: torch.Tensor) -> None:
    held = rows >= 0
    whole = bool(held.all())
    for piece in pieces:
        target = out[:, piece.at : piece.at + piece.size]
        if whole:
            target.copy_(piece.memory[rows])
        else:
            target[held] = piece.memory[rows[held]]
            target[~held] = 0


def _twin_scatter(pieces: Sequence[Piece], rows: torch.Tensor, source: torch.Tensor) -> None:
    held = rows >= 0
    used = rows[held]
    for piece in pieces:
        piece.memory[used] = source[:, piece.at : piece.at + piece.size][held]
