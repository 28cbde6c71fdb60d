"""A batch of copies in two threads: one core does not use all of a machine's memory bandwidth."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

SHARED_SIZE = 4 * 2**20
"""Bytes from which on a second thread helps."""
_T = TypeVar("_T")


def in_halves(items: Sequence[_T], size: int, work: Callable[[Sequence[_T]], None]) -> None:
    """`work` on all `items`, which move `size` bytes together; on half of them in another thread where that pays.
    Returns, or raises, when nobody works on them any more."""
    helper = _helper(os.getpid()) if len(items) > 1 and size >= SHARED_SIZE else None
    if helper is None:
        work(items)
        return
    half = len(items) // 2
    rest = helper.submit(work, items[half:])
    try:
        work(items[:half])
    finally:
        error = rest.exception()  # never leave while a thread still writes into somebody's memory
    if error is not None:
        raise error


@cache
def _helper(pid: int) -> ThreadPoolExecutor | None:
    """One more thread for copies in process `pid` (a fork has none of its parent's); None on a single core."""
    if len(os.sched_getaffinity(0)) < 2:
        return None
    return ThreadPoolExecutor(1, thread_name_prefix="kvtool-copy")
