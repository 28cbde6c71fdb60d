"""What the scheduler tells the workers in each iteration. Small, picklable, and free of handles.

TensorRT-LLM carries it from rank 0 to all ranks between `build_connector_meta` and `bind_connector_meta`. Pages are ids
of the engine's own blocks: one tuple for each layer group (one group with the V1 cache manager), an entry for each
block, -1 where that group holds none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtool.kv.block import BlockKey

Pages = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Load:
    """Blocks that every rank has staged and checked under `load_id`, and the pages that they go to, in order.

    `layerwise`: the forward pass of this very iteration reads them; else the request waits beside the batch, and the
    worker reports it from `get_finished`.
    """

    load_id: int
    request_id: int
    pages: Pages
    layerwise: bool = False


@dataclass(frozen=True)
class Save:
    """Whole blocks that this iteration's forward pass completes. `parents[0]` is None for a prompt's first block."""

    request_id: int
    keys: tuple[BlockKey, ...]
    parents: tuple[BlockKey | None, ...]
    pages: Pages


@dataclass(frozen=True)
class Meta:
    """`forget`: requests that were reset or cancelled. Copies of theirs that had not ended when this arrives may hold
    what the pages are used for next, and are thrown away."""

    iteration: int
    loads: tuple[Load, ...] = field(default=())
    saves: tuple[Save, ...] = field(default=())
    forget: tuple[int, ...] = field(default=())
