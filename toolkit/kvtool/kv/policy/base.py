"""What an eviction policy is asked and told, and the line in which its blocks wait.

A policy ranks the blocks of one tier; it does not know why a block may not go just now (it is being read, it has
children, it is pinned). So `victim` takes a question, `may_go`, and a block for which the answer is no steps aside: it
is not looked at again until `offer` says that things changed, and then it stands where it stood before. Each step aside
is paid for by one `offer`, so finding a victim stays O(log n) amortised however many blocks may not go.

A block stays known from `admit` to `leave`, in whatever order it is offered as a victim meanwhile: a victim that does
not leave after all is simply offered again. What a policy remembers of blocks that left (ghosts) is keys only, and at
most a fixed multiple of the blocks it knows.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
MayGo = Callable[[K], bool]


class Policy(Protocol[K]):
    """The order in which blocks of one tier go. `turn`: which turn of its conversation used the block, 0 if unknown."""

    def admit(self, key: K, turn: int = 0) -> None:
        """`key`, which is not known, came in."""

    def use(self, key: K, turn: int = 0) -> None:
        """`key`, which is known, was used."""

    def renew(self, key: K) -> None:
        """`key` was used again by the request that used it last: no news, but for how long ago that was."""

    def leave(self, key: K, evicted: bool) -> None:
        """`key` went: for room, so that it may be missed, or for another reason, and is forgotten."""

    def offer(self, key: K) -> None:
        """`key` may go again, perhaps. Harmless for any key."""

    def victim(self, may_go: MayGo[K] | None = None) -> K | None:
        """The next to go among those that may; None when there is none. It stays known until `leave`."""

    def __contains__(self, key: K) -> bool: ...

    def __len__(self) -> int: ...

    @property
    def ghosts(self) -> int:
        """How many keys that left are remembered."""


class Queue(Generic[K]):
    """Keys by place, lowest first; a new or moved key gets the last place. O(1) but for those that stepped aside."""

    __slots__ = ("_aside", "_back", "_heap", "_line", "_place")

    def __init__(self) -> None:
        self._place = 0
        self._line: OrderedDict[K, int] = OrderedDict()  # by place
        self._aside: dict[K, int] = {}
        self._back: dict[K, int] = {}  # were aside, may be looked at again
        self._heap: list[tuple[int, K]] = []  # of `_back`; entries that are no longer in it are skipped

    def put_last(self, key: K) -> None:
        """Give `key`, new or known, the last place."""
        self._place = place = self._place + 1
        line = self._line
        if key in line:
            line.move_to_end(key)
        elif self._aside.pop(key, None) is None:
            self._back.pop(key, None)
        line[key] = place

    def discard(self, key: K) -> bool:
        """Whether `key` was there."""
        if self._line.pop(key, None) is not None or self._aside.pop(key, None) is not None:
            return True
        return self._back.pop(key, None) is not None

    def offer(self, key: K) -> None:
        place = self._aside.pop(key, None)
        if place is not None:
            self._back[key] = place
            heapq.heappush(self._heap, (place, key))

    def first(self, may_go: MayGo[K] | None = None) -> K | None:
        """The first that may go; it keeps its place. Those before it that may not step aside."""
        while self._line or self._back:
            key = self._lowest()
            if may_go is None or may_go(key):
                return key
            place = self._line.pop(key, None) or self._back.pop(key)
            self._aside[key] = place
        return None

    def _lowest(self) -> K:
        while self._heap and self._back.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if not self._heap:
            return next(iter(self._line))
        place, key = self._heap[0]
        if self._line:
            first = next(iter(self._line))
            if self._line[first] < place:
                return first
        return key

    def __contains__(self, key: K) -> bool:
        return key in self._line or key in self._aside or key in self._back

    def __len__(self) -> int:
        return len(self._line) + len(self._aside) + len(self._back)

    def __iter__(self) -> Iterator[K]:
        """In the order of their places; O(n log n)."""
        everyone = {**self._line, **self._aside, **self._back}
        return iter(sorted(everyone, key=everyone.__getitem__))


class Ghosts(Generic[K]):
    """Keys that left, the oldest forgotten first once there are too many, each with a number."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left: OrderedDict[K, int] = OrderedDict()

    def add(self, key: K, note: int) -> None:
        self._left[key] = note

    def trim(self, count_max: int) -> None:
        while len(self._left) > count_max:
            self._left.popitem(last=False)

    def pop(self, key: K) -> int | None:
        """The number of `key`, which is a ghost no more; None if it was none."""
        return self._left.pop(key, None)

    def __len__(self) -> int:
        return len(self._left)
