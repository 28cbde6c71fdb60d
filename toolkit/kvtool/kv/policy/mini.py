"""A cache of keys without bytes: one policy at one size, for shadows and for replaying traces."""

from __future__ import annotations

from typing import Generic

from kvtool.kv.policy.base import K, Policy


class MiniCache(Generic[K]):
    """`access` is all: a hit is a use; a miss takes the room of the policy's next victim."""

    __slots__ = ("keys", "policy", "size")

    def __init__(self, policy: Policy[K], size: int) -> None:
        if size < 1:
            raise ValueError(f"a cache needs room for at least one block, got {size}")
        self.policy, self.size = policy, size
        self.keys: set[K] = set()

    def access(self, key: K, turn: int = 0) -> bool:
        """Whether it was a hit."""
        keys = self.keys
        if key in keys:
            self.policy.use(key, turn)
            return True
        if len(keys) >= self.size:
            victim = self.policy.victim()
            assert victim is not None, "nothing holds a block of a cache without bytes"
            keys.remove(victim)
            self.policy.leave(victim, evicted=True)
        keys.add(key)
        self.policy.admit(key, turn)
        return False
