"""Order: which block of a tier goes next, by level first and then by the eviction policy.

Each level has a policy of its own, so that a policy never has to know of priorities.

Pure rules. `may_go` is the tier's answer to whether a block could leave it now.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtool.kv.block import BlockKey
from kvtool.kv.policy import make
from kvtool.kv.policy.base import Policy
from kvtool.kv.policy.changing import Changing, may_change, settled
from kvtool.kv.record import Entry


class Order:
    """The blocks of one tier, in the order in which they go. `name` is the policy's."""

    def __init__(self, name: str, may_go: Callable[[BlockKey], bool]) -> None:
        self.name, self._may_go = name, may_go
        self._levels: dict[int, Policy[BlockKey]] = {}
        self._in: dict[BlockKey, tuple[Entry, int]] = {}
        make(name)

    def enter(self, entry: Entry) -> None:
        """`entry` is in the tier now."""
        assert entry.key not in self._in, f"block {entry.key.hex()[:8]} is in this tier already"
        level = entry.level
        policy = self._levels.get(level)
        if policy is None:
            policy = self._levels[level] = make(self.name)
        self._in[entry.key] = entry, level
        policy.admit(entry.key, entry.turn)

    def use(self, entry: Entry, same_request: bool) -> None:
        """`entry`, if it is in the tier, was used; `same_request`: by the one that used it last."""
        found = self._in.get(entry.key)
        if found is None or found[0] is not entry:
            return
        policy = self._levels[found[1]]
        if same_request:
            policy.renew(entry.key)
        else:
            policy.use(entry.key, entry.turn)

    def leave(self, entry: Entry, evicted: bool = False) -> None:
        """`entry` left the tier, if it was there: `evicted` for room, or for another reason."""
        found = self._in.get(entry.key)
        if found is None or found[0] is not entry:
            return
        del self._in[entry.key]
        policy = self._levels[found[1]]
        policy.leave(entry.key, evicted)
        if len(self._levels) > 1 and not len(policy):
            del self._levels[found[1]]

    def offer(self, entry: Entry) -> None:
        """`entry` may go again, perhaps; or stands on another level. Harmless when it is not in the tier."""
        found = self._in.get(entry.key)
        if found is None or found[0] is not entry:
            return
        if found[1] != entry.level:
            self.leave(entry)
            self.enter(entry)
        else:
            self._levels[found[1]].offer(entry.key)

    def next(self) -> BlockKey | None:
        """The block that goes next, which stays in the order until it leaves; None when none may go."""
        levels = self._levels
        for level in sorted(levels) if len(levels) > 1 else list(levels):
            policy = levels[level]
            if isinstance(policy, Changing) and not len(policy.old):
                policy = levels[level] = settled(policy)
            key = policy.victim(self._may_go)
            if key is not None:
                return key
        return None

    def change(self, name: str) -> bool:
        """Order by another policy from now on. False when too many changes are under way."""
        levels = {level: settled(policy) for level, policy in self._levels.items()}
        if not all(may_change(policy) for policy in levels.values()):
            return False
        self.name = name
        self._levels = {level: Changing(policy, make(name)) for level, policy in levels.items()}
        return True

    def __contains__(self, entry: Entry) -> bool:
        return self._in.get(entry.key, (None, 0))[0] is entry

    def __len__(self) -> int:
        return len(self._in)

    @property
    def ghosts(self) -> int:
        return sum(policy.ghosts for policy in self._levels.values())
