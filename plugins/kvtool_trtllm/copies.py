"""Device copies: between an engine's scattered pages and blocks packed one after another, and checksums of blocks.

A packed block is contiguous: one stored shard after another, each [layers, kv_factor, heads, tokens, head_dim]. An
engine's page holds the same bytes in another order, and in several places where a layer has memory of its own. A
`Piece` says where one run of a packed block lies in the engine's memory; a list of pieces is a whole block, or one
layer of it, or the head ranges of one stored shard. `gather` collects n pages into n packed blocks, `scatter` spreads
them again.

Pages of -1 are holes that the engine keeps in place: gather writes zeros there, scatter skips them.

Where the memory is on a GPU the work is queued on the current stream, or the one given, and nothing waits for it: by
kernels of ours (copies.cu), or by torch's own operations where there is no compiler. Elsewhere the same operations of
torch do it at once. All of them pass the same tests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

from kvtool.errors import EngineFailed, Missing
from kvtool_trtllm.build import build
from kvtool_trtllm.kernel import Kernel
from kvtool_trtllm.pieces import Pages, Piece, Table, check_blocks
from kvtool_trtllm.twin import Twin

__all__ = ["Mover", "Pages", "Piece", "Table", "checksum", "gather", "mover_for", "prepare", "scatter"]

log = logging.getLogger("kvtool.device")


class Mover(Protocol):
    """What moves bytes: `Kernel` or `Twin`. Arguments are checked; work is queued on torch's current stream."""

    name: str

    def copy(self, gathering: bool, table: Table, rows: torch.Tensor, packed: torch.Tensor) -> None: ...

    def checksum(self, blocks: torch.Tensor, seed: int) -> torch.Tensor: ...


def gather(
    pieces: Sequence[Piece], pages: Pages, out: torch.Tensor, stream: Any = None, mover: Mover | None = None
) -> None:
    """Pages -> packed blocks.

    `out`: uint8 [n, packed size], on the pieces' device or pinned on the host; bytes that no piece covers stay as they
    are. `pages`: n page ids on the host; -1 gives zeros. `stream`: torch.cuda.Stream; None is the current one.

    Raises:
        EngineFailed: a page outside the pool or shapes that do not fit, and nothing was copied; or a device error.
    """
    table = pieces if isinstance(pieces, Table) else Table(pieces)
    rows = table.check(pages, out, once=False)
    with on_stream(table.device, stream):
        (mover or mover_for(table.device)).copy(True, table, rows, out)


def scatter(
    pieces: Sequence[Piece], pages: Pages, source: torch.Tensor, stream: Any = None, mover: Mover | None = None
) -> None:
    """Packed blocks -> pages; the inverse of `gather`. Pages of -1 are skipped; no page may stand there twice.

    Raises:
        EngineFailed: as for gather, or a page is named twice.
    """
    table = pieces if isinstance(pieces, Table) else Table(pieces)
    rows = table.check(pages, source, once=True)
    with on_stream(table.device, stream):
        (mover or mover_for(table.device)).copy(False, table, rows, source)


def checksum(blocks: torch.Tensor, seed: int = 0, stream: Any = None, mover: Mover | None = None) -> torch.Tensor:
    """64 bits over each of uint8 [n, size], as int64 [n] on the blocks' device; equal on every device.

    A sum over 8-byte words, each mixed with its place and the seed, so that threads may add in any order. It guards a
    copy between device and host against torn and missing bytes. It is not the pool's xxh3, does not identify content,
    and does not withstand a forger.

    Raises:
        EngineFailed: blocks of another kind, or a device error.
    """
    check_blocks(blocks, int(blocks.shape[0]) if blocks.ndim else 0)
    with on_stream(blocks.device, stream):
        return (mover or mover_for(blocks.device)).checksum(blocks, seed % (1 << 64))


def prepare(device: torch.device) -> str:
    """Build or find the kernels of `device` now, rather than in the first copy. -> what copies go by, in words."""
    return mover_for(device).name


def mover_for(device: torch.device) -> Mover:
    """The kernels where `device` is a GPU and they can be had; else torch's operations, said once in the log."""
    return _gpu_mover(_index(device)) if device.type == "cuda" else Twin()


@cache
def _gpu_mover(index: int) -> Mover:
    major, minor = torch.cuda.get_device_capability(index)
    try:
        return Kernel(build([f"{major}{minor}"]))
    except (Missing, EngineFailed) as error:
        log.warning("device copies go by torch operations, not by kernels: %s", error)
        return Twin()


def _index(device: torch.device) -> int:
    return int(device.index) if device.index is not None else int(torch.cuda.current_device())


@contextmanager
def on_stream(device: torch.device, stream: Any) -> Iterator[None]:
    """On a GPU, work of this block is queued on `stream`; elsewhere it is done at once."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
