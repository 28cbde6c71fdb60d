"""A real pool for a step: ranks under MPI in the check's own directory, and what they answered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtool.kv.layout import KVLayout
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import PoolHandle, pool_status, start_pool

DRAM = 256 << 20


@contextmanager
def pool(layout: KVLayout, run_dir: Path, dram_size: int = DRAM) -> Iterator[PoolHandle]:
    """One rank, memory only, gone afterwards.

    Raises:
        Missing: no Open MPI here.
        PoolUnavailable: the rank did not come up.
    """
    handle = start_pool(PoolConfig(layout=layout, ranks=1, dram_size=dram_size, file_size=0, heal=False), run_dir)
    try:
        yield handle
    finally:
        handle.stop(purge=True)


def blocks_served(run_dir: Path) -> int:
    """Blocks that clients of the pool have read from it, as they told the rank."""
    answers = (rank.answer or {} for rank in pool_status(run_dir).ranks)
    return sum(sum(answer.get("reads", {}).get("hits", {}).values()) for answer in answers)
