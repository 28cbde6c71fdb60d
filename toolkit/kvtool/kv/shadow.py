"""Shadows: what each eviction policy would have made of the same requests, at this size; and this one, at others.

A shadow is a cache of keys without bytes. It sees a sample of the keys, chosen by the key itself, at a size in the same
proportion, so that its hit ratio is an estimate of the full cache's: spatial sampling after Waldspurger et al.,
"Efficient MRC construction with SHARDS" (FAST 2015). The rate follows from the size: caches of a few thousand blocks
are shadowed whole, since there a sample would be too small to tell policies apart.

The policy in use is changed when another one hit clearly more over the last few turnovers of the cache. On the released
traces no policy is best at all sizes, and the best is worth up to twice the hits of LRU.

Cost for each use of a block: one comparison; for the share that is sampled, one access to each shadow. Memory: about
`SAMPLED_MAX` keys for each policy and as many for the curve, twice that with the policies' own memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtool.kv.block import BlockKey
from kvtool.kv.policy import make
from kvtool.kv.policy.changing import Changing, may_change, settled
from kvtool.kv.policy.mini import MiniCache

SAMPLED_MAX = 2048
"""Blocks of a policy's shadow."""
CURVE_SHARE = 4
"""The curve's shadows see one in so many of the keys that the policies' shadows see."""
CURVE = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Sizes at which the policy in use is shadowed, relative to the cache."""
WINDOW, WINDOW_MIN = 0.25, 2048
"""Uses between two looks at the shadows: relative to the size of the cache, and at least."""
FADE = 0.9
"""What is left of earlier counts at each look."""
BETTER, SURE = 0.004, 2.0
"""To take over, a policy must have hit so much more of all uses, and so many standard deviations more than chance."""
RUN = 16
"""Blocks of a request are hit or missed together: so many count as one observation when all are sampled."""
CONTEST = ("turn", "lru", "lru-2", "s3-fifo", "arc")
"""Policies among which `auto` chooses, the first to begin with."""


@dataclass
class Shadow:
    """One policy at one size. `wins`: hits where the policy in use missed; `losses`: the reverse."""

    cache: MiniCache[BlockKey]
    sure: float = SURE
    hits: float = 0.0
    asked: float = 0.0
    wins: float = 0.0
    losses: float = 0.0

    @property
    def ratio(self) -> float:
        return self.hits / self.asked if self.asked else 0.0

    @property
    def lead(self) -> float:
        """How much more of all uses it hit; 0 when that may be chance."""
        more = self.wins - self.losses
        sure = more > self.sure * math.sqrt(self.wins + self.losses)
        return more / self.asked if sure else 0.0

    def access(self, key: BlockKey, turn: int) -> bool:
        self.asked += 1
        hit = self.cache.access(key, turn)
        self.hits += hit
        return hit

    def fade(self) -> None:
        self.hits *= FADE
        self.asked *= FADE
        self.wins *= FADE
        self.losses *= FADE


@dataclass(frozen=True)
class Judgement:
    """What the shadows of one cache show; ratios of block hits, lately. `curve`: of the policy in use, by size."""

    policy: str
    size: int
    rate: float
    ratios: dict[str, float] = field(default_factory=dict)
    curve: tuple[tuple[int, float], ...] = ()
    changes: int = 0


class Shadows:
    """The shadows of one cache of `size` blocks that is ordered by `policy`; `contest`: who may take over."""

    def __init__(self, size: int, policy: str, contest: Iterable[str] = ()) -> None:
        self.size, self.policy, self.changes = size, policy, 0
        self._rate, self._bound = _sampling(size, 1)
        self._curve_rate, self._curve_bound = _sampling(size, CURVE_SHARE)
        sampled = max(1, round(size * self._rate))
        sure = SURE * math.sqrt(1 + RUN * self._rate)
        self._shadows = {name: Shadow(MiniCache(make(name), sampled), sure) for name in contest}
        self._curve = self._drawn(policy)
        self._asked, self._window = 0, max(64, round(max(WINDOW * size, WINDOW_MIN) * self._rate))

    def use(self, key: BlockKey, turn: int) -> str | None:
        """A block was used, or missed and brought in. The policy that should take over now, if one should."""
        if key < self._curve_bound:
            for shadow in self._curve.values():
                shadow.access(key, turn)
        if not self._shadows or key >= self._bound:
            return None
        in_use = self._shadows[self.policy]
        found = in_use.access(key, turn)
        for shadow in self._shadows.values():
            if shadow is not in_use and shadow.access(key, turn) != found:
                if found:
                    shadow.losses += 1
                else:
                    shadow.wins += 1
        self._asked += 1
        return self._look() if self._asked >= self._window else None

    def _look(self) -> str | None:
        self._asked = 0
        best = max(self._shadows, key=lambda name: self._shadows[name].lead)
        better = self._shadows[best].lead > BETTER
        for shadow in self._shadows.values():
            shadow.fade()
        return best if better else None

    def changed(self, policy: str) -> None:
        """`policy` took over."""
        self.policy = policy
        self.changes += 1
        for shadow in self._shadows.values():
            shadow.wins = shadow.losses = 0.0
        self._curve = self._drawn(policy)

    def _drawn(self, policy: str) -> dict[float, Shadow]:
        """A new curve. It is right once its caches are full."""
        sizes = {share: max(1, round(self.size * self._curve_rate * share)) for share in CURVE}
        return {share: Shadow(MiniCache(make(policy), size)) for share, size in sizes.items()}

    def judgement(self) -> Judgement:
        ratios = {name: shadow.ratio for name, shadow in self._shadows.items()}
        curve = tuple((max(1, round(self.size * share)), shadow.ratio) for share, shadow in self._curve.items())
        return Judgement(self.policy, self.size, self._rate, ratios, curve, self.changes)


def _sampling(size: int, share: int) -> tuple[float, bytes]:
    """(rate, bound): keys below the bound are in the sample."""
    rate = min(1.0, SAMPLED_MAX / size) / share
    return rate, b"\xff" * 33 if rate >= 1 else round(rate * 2**64).to_bytes(8, "big")


class AutoCache(MiniCache[BlockKey]):
    """A cache of keys that changes its policy by its shadows; for replaying traces."""

    __slots__ = ("shadows",)

    def __init__(self, size: int) -> None:
        self.shadows = Shadows(size, CONTEST[0], CONTEST)
        super().__init__(make(CONTEST[0]), size)

    def access(self, key: BlockKey, turn: int = 0) -> bool:
        hit = super().access(key, turn)
        name = self.shadows.use(key, turn)
        if name is not None:
            self.policy = settled(self.policy)
            if may_change(self.policy):
                self.policy = Changing(self.policy, make(name))
                self.shadows.changed(name)
        return hit
