"""From one policy to another, with all blocks in place and at no cost at once.

The blocks that are there stay with the old policy, which gives its victims first. Those that are used meanwhile move
over to the new one, and so does the memory of those that go; when the old one is empty the change is over. (Ranking all
blocks anew at once would stop a rank with a million of them for a second.)
"""

from __future__ import annotations

from kvtool.kv.policy.base import K, MayGo, Policy

CHANGES_MAX = 4
"""Changes of one policy that may be under way at a time."""


class Changing(Policy[K]):
    """The blocks of `old` on their way to `new`."""

    def __init__(self, old: Policy[K], new: Policy[K]) -> None:
        self.old, self.new = old, new

    def admit(self, key: K, turn: int = 0) -> None:
        self.new.admit(key, turn)

    def use(self, key: K, turn: int = 0) -> None:
        if key in self.old:
            self.old.leave(key, evicted=False)
            self.new.admit(key, turn)
        self.new.use(key, turn)

    def renew(self, key: K) -> None:
        (self.old if key in self.old else self.new).renew(key)

    def leave(self, key: K, evicted: bool) -> None:
        if key in self.old:
            self.old.leave(key, evicted=False)
            if not evicted:
                return
            self.new.admit(key)
        self.new.leave(key, evicted)

    def offer(self, key: K) -> None:
        self.old.offer(key)
        self.new.offer(key)

    def victim(self, may_go: MayGo[K] | None = None) -> K | None:
        key = self.old.victim(may_go)
        return self.new.victim(may_go) if key is None else key

    def __contains__(self, key: K) -> bool:
        return key in self.new or key in self.old

    def __len__(self) -> int:
        return len(self.new) + len(self.old)

    @property
    def ghosts(self) -> int:
        return self.old.ghosts + self.new.ghosts


def settled(policy: Policy[K]) -> Policy[K]:
    """`policy` without the changes that are over."""
    if not isinstance(policy, Changing):
        return policy
    policy.old = settled(policy.old)
    return policy if len(policy.old) else settled(policy.new)


def may_change(policy: Policy[K]) -> bool:
    """Whether another change may begin: false when too many are under way."""
    count = 0
    while isinstance(policy, Changing):
        policy, count = policy.old, count + 1
    return count < CHANGES_MAX
