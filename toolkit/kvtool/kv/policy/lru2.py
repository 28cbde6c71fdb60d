"""LRU-2: by the last use but one, so that a block must be used twice before it pushes others out.

Blocks used once go first, the oldest first; then those whose last use but one is longest ago. When a block leaves, its
last use is remembered, and counts when it comes back. After O'Neil, O'Neil & Weikum, "The LRU-K page replacement
algorithm" (SIGMOD 1993), whose history is unbounded; here it is twice the blocks. O(1) a use, O(log n) a victim.
"""

from __future__ import annotations

import heapq

from kvtool.kv.policy.base import Ghosts, K, MayGo, Policy, Queue

HISTORY = 2


class Lru2(Policy[K]):
    def __init__(self) -> None:
        self._clock = 0
        self._once: Queue[K] = Queue()
        self._last: dict[K, int] = {}
        self._before: dict[K, int] = {}  # the last use but one
        self._heap: list[tuple[int, K]] = []  # (at most `_before`, key), one for each key in `_heaped`
        self._heaped: set[K] = set()
        self._ghosts: Ghosts[K] = Ghosts()

    def admit(self, key: K, turn: int = 0) -> None:
        self._clock += 1
        self._last[key] = self._clock
        before = self._ghosts.pop(key)
        if before is None:
            self._once.put_last(key)
        else:
            self._twice(key, before)

    def use(self, key: K, turn: int = 0) -> None:
        self._clock += 1
        self._once.discard(key)
        self._twice(key, self._last[key])
        self._last[key] = self._clock

    def _twice(self, key: K, before: int) -> None:
        self._before[key] = before
        self.offer(key)

    def renew(self, key: K) -> None:
        pass

    def leave(self, key: K, evicted: bool) -> None:
        last = self._last.pop(key, None)
        if last is None:
            return
        if self._before.pop(key, None) is None:
            self._once.discard(key)
        if evicted:
            self._ghosts.add(key, last)
        self._ghosts.trim(HISTORY * (len(self._last) + 1))
        if len(self._heap) > 64 + 2 * len(self._before):
            self._heap = [(before, known) for known, before in self._before.items() if known in self._heaped]
            heapq.heapify(self._heap)
            self._heaped = {known for _, known in self._heap}

    def offer(self, key: K) -> None:
        if key in self._before:
            if key not in self._heaped:
                self._heaped.add(key)
                heapq.heappush(self._heap, (self._before[key], key))
        else:
            self._once.offer(key)

    def victim(self, may_go: MayGo[K] | None = None) -> K | None:
        key = self._once.first(may_go)
        return self._oldest(may_go) if key is None else key

    def _oldest(self, may_go: MayGo[K] | None) -> K | None:
        while self._heap:
            place, key = self._heap[0]
            before = self._before.get(key)
            if before is None or (may_go is not None and not may_go(key)):
                heapq.heappop(self._heap)
                self._heaped.discard(key)
            elif before != place:  # it was used since
                heapq.heapreplace(self._heap, (before, key))
            else:
                return key
        return None

    def __contains__(self, key: K) -> bool:
        return key in self._last

    def __len__(self) -> int:
        return len(self._last)

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)
