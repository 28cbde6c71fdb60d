"""An owner of memory in a process of its own: byte i is (i * 31 + i // 257 + seed) % 256."""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np

from kvtool.transfer.ucx import UcxOwner


def pattern(size: int, seed: int) -> np.ndarray:
    at = np.arange(size, dtype=np.int64)
    return ((at * 31 + at // 257 + seed) % 256).astype(np.uint8)


def serve(name: str, size: int, seed: int, link: Connection) -> None:
    """Say where the memory is, and serve until the other end of `link` closes."""
    owner = UcxOwner(name, memoryview(pattern(size, seed)))
    link.send_bytes(owner.metadata())
    while not link.poll(0.001):
        owner.progress()
    owner.close()
