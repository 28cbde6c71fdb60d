"""Turn-aware: blocks go by what became of blocks like them.

Blocks are alike when equally many requests used them: in a conversation these are the turns that a block has seen. For
each kind the policy learns how long blocks lie until they are used again, and gives each block its best rate: the most
hits for each unit of time in the cache that keeping it from its present age on, over any span, would bring. The block
with the lowest rate goes. That protects what proved useful without letting it stay for ever, and drops one-offs at once
when room is scarce but not when there is plenty. With a single kind this is LRU. (The turn of the conversation, counted
from its first prompt, was tried as a kind of its own, `TURNS_MAX`: it gains nothing once uses are counted, and where a
prefix has left the cache the count begins anew and is wrong.)

Reuse is predictable within a category of requests (Wang et al., "KVCache cache in the wild", ATC 2025); hits by age,
and their density, are from Beckmann et al., "LHD" (NSDI 2018); the best rate over all spans is Gittins' index.

Every n-th placement is watched until the block is used again, `WATCHED_MAX` of them at a time. Those that still lie
count as alive at their age (Kaplan & Meier), else long gaps would look rare. O(kinds) a victim and O(1) a use; four
times as many ghosts as blocks.
"""

from __future__ import annotations

from collections import OrderedDict

from kvtool.kv.policy.base import Ghosts, K, MayGo, Policy, Queue

USES_MAX, TURNS_MAX = 4, 1
WATCHED_MAX = 4096
HORIZON = 8
"""How long a placement is watched at least, in uses, relative to the blocks in the cache."""
HISTORY = 4
"""Ghosts for each block; they remember how often it was used."""
LEARN_EACH = 1024
"""Uses between two rounds of learning."""
FADE, FADE_AT = 0.5, 8192
"""What is left of old observations, each time that there are so many new ones."""
RUN_MAX = 16
AGES = 96


def age_class(age: int) -> int:
    """Two classes for each doubling of the age; the classes 2 and 3 stay empty."""
    length = age.bit_length()
    return min(2 * length + (age >> (length - 2) & 1), AGES - 1) if length > 1 else age


def _first_age(at: int) -> int:
    """The lowest age of a class."""
    length, half = divmod(at, 2)
    return (1 << (length - 1)) + half * (1 << (length - 2)) if length > 1 else at


WIDTHS = [float(_first_age(at + 1) - _first_age(at)) for at in range(AGES)]


class Kind:
    """How long placements of one kind lie until they are used again, by age class."""

    __slots__ = ("again", "gone", "rate")

    def __init__(self) -> None:
        self.again = [0.0] * AGES
        self.gone = [0.0] * AGES
        """Not watched any longer, and not used again by then."""
        self.rate = [0.0] * AGES

    def fade(self) -> None:
        self.again = [count * FADE for count in self.again]
        self.gone = [count * FADE for count in self.gone]


def best_rates(again: list[float], ended: list[float]) -> list[float]:
    """For each age class the most uses for a unit of time, over any span that begins there.

    `again`: placements that ended by a use, `ended`: all that ended or are alive, both by age class.
    """
    rates = [0.0] * AGES
    spans: list[tuple[float, float]] = []  # (uses, time) of the best spans from here on, the best one last
    alive_after = 0.0
    for at in range(AGES - 1, -1, -1):
        alive = alive_after + ended[at]
        uses, time = again[at], WIDTHS[at] * (alive + alive_after) / 2
        while spans and spans[-1][0] * time >= uses * spans[-1][1]:
            more = spans.pop()
            uses, time = uses + more[0], time + more[1]
        spans.append((uses, time))
        rates[at] = uses / time if time else 0.0
        alive_after = alive
    return rates


class Turn(Policy[K]):
    def __init__(self) -> None:
        self._clock = self._learn_at = self._seen = 0
        self._queues: dict[int, Queue[K]] = {}
        self._kinds: dict[int, Kind] = {}
        self._blocks: dict[K, tuple[int, int, int]] = {}  # key -> (kind, uses, last use)
        self._ghosts: Ghosts[K] = Ghosts()
        self._watched: OrderedDict[K, tuple[int, int]] = OrderedDict()  # key -> (kind, since)
        self._watch_at = 0
        self._run, self._run_left = (0, 0), 0

    def admit(self, key: K, turn: int = 0) -> None:
        self._place(key, (self._ghosts.pop(key) or 0) + 1, turn)

    def use(self, key: K, turn: int = 0) -> None:
        kind, uses, _ = self._blocks[key]
        self._queues[kind].discard(key)
        self._place(key, uses + 1, turn)

    def _place(self, key: K, uses: int, turn: int) -> None:
        self._clock += 1
        kind = min(uses, USES_MAX) * TURNS_MAX + min(max(turn, 1), TURNS_MAX) - 1
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = Queue()
            self._kinds.setdefault(kind, Kind())
        queue.put_last(key)
        self._blocks[key] = kind, uses, self._clock
        self._watch(key, kind)

    def _watch(self, key: K, kind: int) -> None:
        found = self._watched.pop(key, None)
        if found is not None:
            self._kinds[found[0]].again[age_class(self._clock - found[1])] += 1
            self._saw()
        if self._clock >= self._watch_at:
            self._watch_at = self._clock + max(1, HORIZON * len(self._blocks) // WATCHED_MAX)
            self._watched[key] = kind, self._clock
            if len(self._watched) > WATCHED_MAX:
                _, (old, since) = self._watched.popitem(last=False)
                self._kinds[old].gone[age_class(self._clock - since)] += 1
                self._saw()

    def _saw(self) -> None:
        self._seen += 1
        if self._seen >= FADE_AT:
            self._seen = 0
            for kind in self._kinds.values():
                kind.fade()

    def _learn(self) -> None:
        """What is known of each kind, where that is little of all kinds together, as rates by age."""
        lying = {kind: [0.0] * AGES for kind in self._kinds}
        for kind, since in self._watched.values():
            lying[kind][age_class(self._clock - since)] += 1
        all_again, all_ended = [0.0] * AGES, [0.0] * AGES
        for number, counts in self._kinds.items():
            for at in range(AGES):
                lying[number][at] += counts.again[at] + counts.gone[at]
                all_again[at] += counts.again[at]
                all_ended[at] += lying[number][at]
        share = 1 / max(1.0, sum(all_ended))
        for number, counts in self._kinds.items():
            again = [own + share * other for own, other in zip(counts.again, all_again, strict=True)]
            ended = [own + share * other for own, other in zip(lying[number], all_ended, strict=True)]
            counts.rate = best_rates(again, ended)

    def renew(self, key: K) -> None:
        pass

    def leave(self, key: K, evicted: bool) -> None:
        found = self._blocks.pop(key, None)
        if found is None:
            return
        self._queues[found[0]].discard(key)
        if evicted:
            self._ghosts.add(key, found[1])
        self._ghosts.trim(HISTORY * (len(self._blocks) + 1))

    def offer(self, key: K) -> None:
        found = self._blocks.get(key)
        if found is not None:
            self._queues[found[0]].offer(key)

    def victim(self, may_go: MayGo[K] | None = None) -> K | None:
        if self._clock >= self._learn_at:
            self._learn_at = self._clock + max(LEARN_EACH, len(self._blocks) // 2)
            self._learn()
            self._run_left = 0
        if self._run_left:
            self._run_left -= 1
            key = self._queues[self._run[0]].first(may_go)
            if key is not None and age_class(self._clock - self._blocks[key][2]) == self._run[1]:
                return key
        return self._lowest(may_go)

    def _lowest(self, may_go: MayGo[K] | None) -> K | None:
        """The oldest of that kind whose oldest has the lowest rate. While those that follow are of the same age class
        they go without another look at all kinds, for a while."""
        lowest: tuple[float, int] | None = None
        found: K | None = None
        for number, queue in self._queues.items():
            key = queue.first(may_go)
            if key is not None:
                last = self._blocks[key][2]
                rate = self._kinds[number].rate[age_class(self._clock - last)], last
                if lowest is None or rate < lowest:
                    lowest, found = rate, key
                    self._run = number, age_class(self._clock - last)
        self._run_left = min(len(self._blocks) // 256, RUN_MAX) if found is not None else 0
        return found

    def __contains__(self, key: K) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def ghosts(self) -> int:
        return len(self._ghosts)
