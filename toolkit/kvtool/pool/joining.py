"""Joining a pool that runs."""

from __future__ import annotations

from pathlib import Path

from kvtool.kv.layout import KVLayout
from kvtool.pool.aio import AsyncPoolClient
from kvtool.pool.client import PoolClient
from kvtool.pool.state import FILE, read_state


def connect(
    pool: Path | str,
    layout: KVLayout | None = None,
    *,
    path: str = "auto",
    client_name: str = "client",
    namespace: str = "",
) -> PoolClient:
    """A client of the pool of a run directory, or of a state file. A context manager.

    `layout`: of your blocks; None: whatever the pool holds. `namespace`: of the blocks that are put. `path`: "shm",
    "ucx", "socket", or "auto", the first of them that can be had.

    Raises:
        PoolUnavailable: `layout` is None and no pool runs there that could tell.
        Refused: the pool holds another layout.
    """
    file = _state_file(pool)
    return PoolClient(
        file, layout or read_state(file).kv_layout, path=path, client_name=client_name, namespace=namespace
    )


def connect_async(
    pool: Path | str,
    layout: KVLayout | None = None,
    *,
    path: str = "auto",
    client_name: str = "client",
    namespace: str = "",
) -> AsyncPoolClient:
    """As `connect`, for asyncio; to be used on one event loop. An async context manager."""
    file = _state_file(pool)
    return AsyncPoolClient(
        file, layout or read_state(file).kv_layout, path=path, client_name=client_name, namespace=namespace
    )


def _state_file(pool: Path | str) -> Path:
    path = Path(pool)
    return path / FILE if path.is_dir() else path
