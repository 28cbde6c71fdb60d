"""S3-FIFO: most blocks are used once, so new ones wait in a small queue and leave from there unless used.

A tenth of the blocks is the small queue; what was used at least twice there moves to the main one, the rest goes and
is remembered by key. What comes back while it is remembered enters the main queue at once. In the main queue a used
block gets another round for each use, three at most. After Yang et al., "FIFO queues are all you need for cache
eviction" (SOSP 2023). O(1) amortised; as many ghosts as the main queue has blocks.
"""

from __future__ import annotations

from kvtool.kv.policy.base import Ghosts, K, MayGo, Policy, Queue

USES_MAX = 3
SMALL_SHARE = 10


class S3Fifo(Policy[K]):
    def __init__(self) -> None:
        self._small: Queue[K] = Queue()
        self._main: Queue[K] = Queue()
        self._uses: dict[K, int] = {}
        self._ghosts: Ghosts[K] = Ghosts()

    def admit(self, key: K, turn: int = 0) -> None:
        self._uses[key] = 0
        (self._small if self._ghosts.pop(key) is None else self._main).put_last(key)

    def use(self, key: K, turn: int = 0) -> None:
        uses = self._uses[key]
        if uses < USES_MAX:
            self._uses[key] = uses + 1

    def renew(self, key: K) -> None:
        pass

    def leave(self, key: K, evicted: bool) -> None:
        if self._uses.pop(key, None) is None:
            return
        if not self._small.discard(key):
            self._main.discard(key)
        elif evicted:
            self._ghosts.add(key, 0)
        count = len(self._uses) + 1
        self._ghosts.trim(count - self._small_max(count))

    def offer(self, key: K) -> None:
        self._small.offer(key)
        self._main.offer(key)

    def victim(self, may_go: MayGo[K] | None = None) -> K | None:
        small_max = self._small_max(len(self._uses))
        while True:
            small_first = len(self._small) >= small_max
            for small in (small_first, not small_first):
                key = (self._small if small else self._main).first(may_go)
                if key is not None:
                    break
            if key is None:
                return None
            if small:
                if self._uses[key] < 2:
                    return key
                self._small.discard(key)
            elif self._uses[key]:
                self._uses[key] -= 1
            else:
                return key
            self._main.put_last(key)

    @staticmethod
    def _small_max(count: int) -> int:
        return max(1, count // SMALL_SHARE)

    def __contains__(self, key: K) -> bool:
        return key in self._uses

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)
