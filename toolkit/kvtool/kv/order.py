"""Order: which block of a tier goes next, by level first and then by the eviction policy.

Each level has a policy of its own, so that a policy never has to know of priorities. A block that has just been put is
about to be read by the one that it was put for: prefill hands its KV to decode through the pool. Policies that let
one-offs go first would evict just these. So within its level a block is *fresh* for a moment, and goes only when no
other can; then the one that was used longest ago.

Pure rules. `may_go` is the tier's answer to whether a block could leave it now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvtool.kv.block import BlockKey
from kvtool.kv.policy import make
from kvtool.kv.policy.base import Policy, Queue
from kvtool.kv.policy.changing import Changing, may_change, settled
from kvtool.kv.record import Entry

FRESH_S = 10.0
"""How long a block is fresh."""


class Level:
    """The blocks of one priority."""

    def __init__(self, policy: Policy[BlockKey]) -> None:
        self.policy = policy
        self.fresh: Queue[BlockKey] = Queue()
        self._until: dict[BlockKey, float] = {}  # of those in `fresh`
        self._due: deque[tuple[float, BlockKey]] = deque()

    def enter(self, entry: Entry, fresh_until_s: float | None) -> None:
        self.policy.admit(entry.key, entry.turn)
        if fresh_until_s is not None:
            self.fresh.put_last(entry.key)
            self._until[entry.key] = fresh_until_s
            self._due.append((fresh_until_s, entry.key))

    def use(self, entry: Entry, same_request: bool) -> None:
        key = entry.key
        if same_request:
            self.policy.renew(key)
        else:
            self.policy.use(key, entry.turn)
        if key in self._until:
            self.fresh.put_last(key)

    def leave(self, key: BlockKey, evicted: bool) -> None:
        self.policy.leave(key, evicted)
        if self._until.pop(key, None) is not None:
            self.fresh.discard(key)

    def offer(self, key: BlockKey) -> None:
        self.policy.offer(key)
        self.fresh.offer(key)

    def victim(self, may_go: Callable[[BlockKey], bool], now_s: float) -> BlockKey | None:
        if isinstance(self.policy, Changing) and not len(self.policy.old):
            self.policy = settled(self.policy)
        while self._due and self._due[0][0] <= now_s:
            until_s, key = self._due.popleft()
            if self._until.get(key) == until_s:
                del self._until[key]
                self.fresh.discard(key)
                self.policy.offer(key)
        fresh = self._until
        found = (
            self.policy.victim(lambda key: key not in fresh and may_go(key)) if fresh else self.policy.victim(may_go)
        )
        return self.fresh.first(may_go) if found is None else found


class Order:
    """The blocks of one tier, in the order in which they go. `name` is the policy's."""

    def __init__(self, name: str, may_go: Callable[[BlockKey], bool]) -> None:
        self.name, self._may_go = name, may_go
        self._levels: dict[int, Level] = {}
        self._in: dict[BlockKey, tuple[Entry, int]] = {}
        make(name)

    def enter(self, entry: Entry, fresh_until_s: float | None = None) -> None:
        """`entry` is in the tier now; fresh, when it was just put."""
        assert entry.key not in self._in, f"block {entry.key.hex()[:8]} is in this tier already"
        number = entry.level
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = Level(make(self.name))
        self._in[entry.key] = entry, number
        level.enter(entry, fresh_until_s)

    def use(self, entry: Entry, same_request: bool) -> None:
        """`entry`, if it is in the tier, was used; `same_request`: by the one that used it last."""
        found = self._in.get(entry.key)
        if found is None or found[0] is not entry:
            return
        self._levels[found[1]].use(entry, same_request)

    def leave(self, entry: Entry, evicted: bool = False) -> None:
        """`entry` left the tier, if it was there: `evicted` for room, or for another reason."""
        found = self._in.get(entry.key)
        if found is None or found[0] is not entry:
            return
        del self._in[entry.key]
        level = self._levels[found[1]]
        level.leave(entry.key, evicted)
        if len(self._levels) > 1 and not len(level.policy):
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

    def next(self, now_s: float) -> BlockKey | None:
        """The block that goes next, which stays in the order until it leaves; None when none may go."""
        levels = self._levels
        for number in sorted(levels) if len(levels) > 1 else levels:
            key = levels[number].victim(self._may_go, now_s)
            if key is not None:
                return key
        return None

    def change(self, name: str) -> bool:
        """Order by another policy from now on. False when too many changes are under way."""
        levels = self._levels.values()
        for level in levels:
            level.policy = settled(level.policy)
        if not all(may_change(level.policy) for level in levels):
            return False
        self.name = name
        for level in levels:
            level.policy = Changing(level.policy, make(name))
        return True

    def __contains__(self, entry: Entry) -> bool:
        return self._in.get(entry.key, (None, 0))[0] is entry

    def __len__(self) -> int:
        return len(self._in)

    @property
    def ghosts(self) -> int:
        return sum(level.policy.ghosts for level in self._levels.values())
