"""Retention: how long a block is wanted, and how firmly.

The words are TensorRT-LLM's (`KvCacheRetentionConfig`): a priority of 0 to 100, 35 where nobody says, and a duration
after which the priority falls back to 35. A pin is the owner's promise not to evict: soft, the block goes after
everything else; hard, it stays. Every pin ends by the clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

PRIORITY_DEFAULT = 35
PRIORITY_MAX = 100
COPIES_MAX = 8
NEVER = float("inf")


class Pin(IntEnum):
    NONE = 0
    SOFT = 1
    """Evicted only when nothing else can be."""
    HARD = 2
    """Not evicted before it ends. Pools cap the share of their slots that may be pinned so."""


@dataclass(frozen=True, slots=True)
class Retention:
    """`duration_s` None: for good, which a pin may not be. `copies`: how many ranks hold it; 0: the pool's default.

    Raises:
        ValueError: out of range, or a pin without an end.
    """

    priority: int = PRIORITY_DEFAULT
    duration_s: float | None = None
    pin: Pin = Pin.NONE
    copies: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= PRIORITY_MAX:
            raise ValueError(f"priority: wanted 0 to {PRIORITY_MAX}, found {self.priority}")
        if self.duration_s is not None and not 0 < self.duration_s < float("inf"):
            raise ValueError(f"duration_s: wanted more than 0 s, found {self.duration_s}")
        if self.pin is not Pin.NONE and self.duration_s is None:
            raise ValueError("a pin must end by the clock; give it a duration_s")
        if not 0 <= self.copies <= COPIES_MAX:
            raise ValueError(f"copies: wanted 0 (the pool's default) to {COPIES_MAX}, found {self.copies}")


DEFAULT = Retention()


@dataclass(slots=True)
class Kept:
    """What is wanted of one block; each part ends at its own time, and 0 is no pin."""

    priority: int = PRIORITY_DEFAULT
    priority_until_s: float = NEVER
    soft_until_s: float = 0.0
    hard_until_s: float = 0.0

    @property
    def level(self) -> int:
        pinned = self.soft_until_s > 0 or self.hard_until_s > 0
        return self.priority + (PRIORITY_MAX + 1) * pinned


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Tokens from `start` up to but not including `end` (None: to the last), and how they are wanted.

    The fields of TensorRT-LLM's `KvCacheRetentionConfig.TokenRangeRetentionConfig`, durations in seconds.
    """

    start: int
    end: int | None
    priority: int
    duration_s: float | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise ValueError(f"token range: wanted 0 <= start < end, found {self.start} to {self.end}")
        Retention(self.priority, self.duration_s)


def for_ranges(
    ranges: Sequence[TokenRange], tokens: int, block_tokens: int, after: Retention = DEFAULT
) -> list[Retention]:
    """The retention of each block of a prompt of `tokens`; `after` is that of blocks that no range reaches.

    A block takes the range of its first token, as TensorRT-LLM's block manager does. `after` stands for its
    `decode_retention_priority` and `decode_duration_ms` when the blocks were generated.

    Raises:
        ValueError: ranges overlap.
    """
    ordered = sorted(ranges, key=lambda wanted: wanted.start)
    for one, other in itertools.pairwise(ordered):
        if one.end is None or one.end > other.start:
            raise ValueError(f"token ranges overlap: {one.start} to {one.end}, and from {other.start}")
    blocks = []
    for first in range(0, tokens, block_tokens):
        reached = (it for it in ordered if it.start <= first and (it.end is None or first < it.end))
        wanted = next(reached, None)
        blocks.append(after if wanted is None else Retention(wanted.priority, wanted.duration_s, copies=after.copies))
    return blocks
