"""Hints: which blocks have a copy near this client, as their owners said of late.

An owner that sees a block read often from another host has it copied to a rank there, and says so with its answers. A
hint ends by the clock, before the copy does; one that turns out wrong costs one question more, to the owner.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtool.kv.block import BlockKey
from kvtool.kv.hot import Near

HINTS_MAX = 8192
SHARE = 0.9
"""Of a copy's remaining time: its clock is another one."""


class Hints:
    """Bounded; from any thread, since every step is one on a dict."""

    def __init__(self) -> None:
        self._near: dict[BlockKey, tuple[int, float]] = {}  # -> (rank, until)

    def __len__(self) -> int:
        return len(self._near)

    def learn(self, names: Sequence[BlockKey], near: Iterable[Near], now_s: float) -> None:
        """`names`: keys of the hits that the positions of `near` mean."""
        for one in near:
            if one.position < len(names):
                self._near.pop(names[one.position], None)
                self._near[names[one.position]] = one.rank, now_s + SHARE * one.left_s
        while len(self._near) > HINTS_MAX:
            try:
                del self._near[next(iter(self._near))]
            except (KeyError, RuntimeError, StopIteration):  # another thread did
                break

    def rank_near(self, key: BlockKey, now_s: float) -> int | None:
        there = self._near.get(key)
        if there is None:
            return None
        if there[1] <= now_s:
            self._near.pop(key, None)
            return None
        return there[0]

    def wrong(self, keys: Iterable[BlockKey]) -> None:
        """The rank that was hinted at does not have them."""
        for key in keys:
            self._near.pop(key, None)
