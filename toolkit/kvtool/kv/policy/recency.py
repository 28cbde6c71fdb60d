"""FIFO and LRU: by when a block came in, and by when it was last used."""

from __future__ import annotations

from kvtool.kv.policy.base import K, MayGo, Policy, Queue


class Fifo(Policy[K]):
    """First in, first out. O(1)."""

    def __init__(self) -> None:
        self._queue: Queue[K] = Queue()
        self.offer = self._queue.offer  # type: ignore[method-assign]

    def admit(self, key: K, turn: int = 0) -> None:
        self._queue.put_last(key)

    def use(self, key: K, turn: int = 0) -> None:
        pass

    def renew(self, key: K) -> None:
        pass

    def leave(self, key: K, evicted: bool) -> None:
        self._queue.discard(key)

    def victim(self, may_go: MayGo[K] | None = None) -> K | None:
        return self._queue.first(may_go)

    def __contains__(self, key: K) -> bool:
        return key in self._queue

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def ghosts(self) -> int:
        return 0


class Lru(Fifo[K]):
    """Least recently used first. O(1)."""

    def renew(self, key: K) -> None:
        self._queue.put_last(key)

    def use(self, key: K, turn: int = 0) -> None:
        self._queue.put_last(key)
