"""Percentiles and ratios of measurements that were taken in turns.

A mean hides the tail that a user feels, so there is none here. Two things are compared by running them in turns, A B A
B, and taking the ratio of each neighbouring pair: what the machine does meanwhile (a clock step, another job) falls on
both. The ratio's own spread says how far to trust it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Summary:
    """Of `count` samples, in their unit. With few samples P99 is the maximum, by the nearest-rank rule."""

    count: int
    median: float
    p90: float
    p99: float
    max: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Ratio:
    """Of paired samples a[i] / b[i]: the median pair, and the lowest and the highest."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f} to {self.high:.2f})"


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of the samples do not exceed (nearest rank): always a real one.

    Raises:
        ValueError: no samples, or a share outside (0, 1].
    """
    if not samples:
        raise ValueError("no samples to take a percentile of")
    if not 0 < share <= 1:
        raise ValueError(f"a percentile's share lies in (0, 1], got {share}")
    rank = math.ceil(round(len(samples) * share, 9))  # 0.9 x 10 is 9 and not a shade more
    return sorted(samples)[rank - 1]


def summarise(samples: Sequence[float]) -> Summary:
    return Summary(
        len(samples), percentile(samples, 0.5), percentile(samples, 0.9), percentile(samples, 0.99), max(samples)
    )


def ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """a / b of samples that were taken in turns.

    Raises:
        ValueError: not as many of one as of the other, or none.
    """
    if len(a) != len(b) or not a:
        raise ValueError(f"paired samples are needed, got {len(a)} and {len(b)}")
    pairs = [left / right for left, right in zip(a, b, strict=True)]
    return Ratio(percentile(pairs, 0.5), min(pairs), max(pairs))
