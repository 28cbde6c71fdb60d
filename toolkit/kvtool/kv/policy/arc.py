"""ARC: how much room goes to blocks seen once, and how much to those seen again, is learnt from what is missed.

Two LRU lists, seen once and seen again, each with the keys that left it. A miss on such a key says that its list was
too short. After Megiddo & Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003). Here the victim is
chosen before it is known what comes in, so the paper's tie-break for a ghost of the second list is left out. O(1)
amortised; as many ghosts as blocks.
"""

from __future__ import annotations

from kvtool.kv.policy.base import Ghosts, K, MayGo, Policy, Queue


class Arc(Policy[K]):
    def __init__(self) -> None:
        self._once: Queue[K] = Queue()
        self._again: Queue[K] = Queue()
        self._once_left: Ghosts[K] = Ghosts()
        self._again_left: Ghosts[K] = Ghosts()
        self._once_wanted = 0.0

    def admit(self, key: K, turn: int = 0) -> None:
        once, again = len(self._once_left), len(self._again_left)
        if self._once_left.pop(key) is not None:
            self._once_wanted = min(float(len(self)), self._once_wanted + max(again / once, 1.0))
            self._again.put_last(key)
        elif self._again_left.pop(key) is not None:
            self._once_wanted = max(0.0, self._once_wanted - max(once / again, 1.0))
            self._again.put_last(key)
        else:
            self._once.put_last(key)

    def use(self, key: K, turn: int = 0) -> None:
        self._once.discard(key)
        self._again.put_last(key)

    def renew(self, key: K) -> None:
        (self._once if key in self._once else self._again).put_last(key)

    def leave(self, key: K, evicted: bool) -> None:
        count = len(self)
        if self._once.discard(key):
            if evicted:
                self._once_left.add(key, 0)
        elif self._again.discard(key) and evicted:
            self._again_left.add(key, 0)
        self._once_left.trim(max(0, count - len(self._once)))
        self._again_left.trim(max(0, count - len(self._once_left)))

    def offer(self, key: K) -> None:
        self._once.offer(key)
        self._again.offer(key)

    def victim(self, may_go: MayGo[K] | None = None) -> K | None:
        lines = [self._again, self._once]
        if len(self._once) > self._once_wanted:
            lines.reverse()
        for line in lines:
            key = line.first(may_go)
            if key is not None:
                return key
        return None

    def __contains__(self, key: K) -> bool:
        return key in self._once or key in self._again

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    @property
    def ghosts(self) -> int:
        return len(self._once_left) + len(self._again_left)
