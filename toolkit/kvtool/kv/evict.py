"""Eviction order: least recently used first, leaves before their parents.

A prefix is read from its first block on, so a block whose parent is gone can never be a hit: evicting a parent wastes
every descendant. `LeafLRU` therefore offers only blocks without resident children, oldest use first. Blocks enter when
something makes them evictable (committed, last child gone, last lease ended) and are checked again when they come up,
so that a change of mind costs nothing until then.

Pure rules. O(log n) for each use; memory stays within a small multiple of the blocks in it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from kvtool.kv.block import BlockKey

Touched = Callable[[BlockKey], "int | None"]
"""When a block was last used, as a count of uses, or None when it may not be evicted now."""


class LeafLRU:
    """Candidates for eviction of one tier, by last use."""

    def __init__(self, touched: Touched) -> None:
        self._touched = touched
        self._heap: list[tuple[int, BlockKey]] = []

    def offer(self, key: BlockKey) -> None:
        """`key` became evictable, or was used again while it is. Harmless when it is not."""
        touched = self._touched(key)
        if touched is not None:
            heapq.heappush(self._heap, (touched, key))

    def next(self) -> BlockKey | None:
        """Take out the evictable block that was used longest ago; offer it again if it stays."""
        while self._heap:
            touched, key = heapq.heappop(self._heap)
            if self._touched(key) == touched:
                return key
        return None

    def rebuild(self, keys: Iterable[BlockKey], count: int) -> None:
        """Throw out stale entries once they outnumber the `count` blocks of the tier four times."""
        if len(self._heap) <= 256 + 4 * count:
            return
        self._heap = [(touched, key) for key in keys if (touched := self._touched(key)) is not None]
        heapq.heapify(self._heap)


class Children:
    """How many resident children each key has in one tier. The parent itself may come later, or live elsewhere."""

    def __init__(self) -> None:
        self._count: dict[BlockKey, int] = {}

    def add(self, parent: BlockKey | None) -> None:
        if parent is not None:
            self._count[parent] = self._count.get(parent, 0) + 1

    def remove(self, parent: BlockKey | None) -> bool:
        """Whether that was the last child of `parent`."""
        if parent is None:
            return False
        left = self._count[parent] - 1
        if left:
            self._count[parent] = left
            return False
        del self._count[parent]
        return True

    def any(self, key: BlockKey) -> bool:
        return key in self._count

    def __len__(self) -> int:
        return len(self._count)
