"""What a rank wants copied to other ranks, what came of it, and how much of it may go on at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from kvtool.kv.block import BlockKey


class Why(IntEnum):
    """What a copy is for, most urgent first."""

    PUT = 0
    """A block that was just put is wanted more than once, or belongs elsewhere. Makes room as its put did."""
    MEND = 1
    """Ranks came or went. Takes free room only: evicting a block to save another one helps nobody."""
    NEAR = 2
    """Readers on another host read it often: a copy there that ends by the clock. Takes free room only."""


@dataclass(frozen=True, slots=True)
class CopyOf:
    """One block of a `Copy`. `ttl_s`: a near copy lives so long; None for a copy that stays."""

    key: BlockKey
    length: int
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy `blocks` to rank `to`, then call `ended(number, ...)` with one outcome for each."""

    number: int
    to: int
    why: Why
    blocks: tuple[CopyOf, ...]


class Outcome(IntEnum):
    """What came of the copy of one block."""

    STORED = 0
    THERE = 1
    """The other rank held it already."""
    NO_ROOM = 2
    GONE = 3
    """It was evicted here before it was copied."""
    RETRY = 4
    """The other rank did not answer, or another writer is at it."""
    DAMAGED = 5
    """Its bytes here are not its own any more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block that is here, for good, and how many ranks shall hold it."""

    key: BlockKey
    length: int
    copies: int


class Catalog(Protocol):
    """The blocks of this rank."""

    def catalog(self) -> Sequence[BlockKey]:
        """Keys of all blocks that are here now, those first that came last."""
        ...

    def wanted(self, keys: Iterable[BlockKey]) -> list[Wanted]:
        """Those of `keys` that are here still, and for good: transient blocks are nobody's to copy."""
        ...


@dataclass(frozen=True)
class CopyLimits:
    """How much copying may go on at once, in one rank. Sizes in bytes."""

    blocks_max: int = 32
    """In flight, to all ranks together."""
    bytes_max: int = 64 * 2**20
    batch_max: int = 8
    """Blocks in one message: what a foreground request may have to wait for."""
    rate: float = 1 * 2**30
    """Bytes a second."""
    pending_max: int = 16384
    """Blocks that wait to be copied. What is beyond that is found again by looking through all blocks later."""
    tries_max: int = 5
    backoff_s: float = 0.1
    backoff_max_s: float = 5.0
    stagger_s: float = 0.5
    """Of several ranks that hold a block the first sees to its copies; each next one looks after it so much later."""
    rescan_s: float = 20.0
    """After copies to a rank were given up, or had no room: when to look again, doubled each time."""
    rescan_max_s: float = 600.0
    leave_s: float = 2.0
    """The same, for a rank that is to leave."""
    trickle_s: float = 0.5
    """While foreground requests wait for room or files, one block goes so often: a busy pool may be one for hours."""

    def __post_init__(self) -> None:
        for name in ("blocks_max", "bytes_max", "batch_max", "rate", "pending_max", "tries_max", "backoff_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: wanted more than 0, found {getattr(self, name)}")


@dataclass
class CopyCounts:
    """What came of copies to other ranks, in blocks, since the start."""

    stored: int = 0
    there: int = 0
    """Offered, and found to be there already."""
    no_room: int = 0
    gone: int = 0
    damaged: int = 0
    retried: int = 0
    gave_up: int = 0
    bytes: int = 0
    overflowed: int = 0
    """Not queued, as too many waited; found again by a later look through all blocks."""
    scans: int = 0
