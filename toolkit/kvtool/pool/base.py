"""What a pool is to its callers: match, read under leases, write in two phases.

`PoolClient` (ranks over sockets, shared memory and UCX), and `EmbeddedPool` (the same rules in this process) stand
behind it. All calls are thread-safe, bounded by `budget_s`, and never raise for a missing, slow or dead rank: what
could not be had in time is a miss, counted with its reason. They raise only for misuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Protocol

from kvtool.kv.block import BlockKey
from kvtool.kv.retention import DEFAULT, Retention

Fill = Callable[[memoryview], None]
"""Writes one block's bytes into the memory it is given, which may be the pool's own slot."""


class Tier(str, Enum):
    """Where a block was when it was asked for."""

    DRAM = "dram"
    FILE = "file"


class Path(str, Enum):
    """How its bytes came to the reader."""

    EMBEDDED = "embedded"
    SHM = "shm"
    UCX = "ucx"
    SOCKET = "socket"


@dataclass(frozen=True)
class BlockView:
    """One verified block. `data` is read-only; in place in the pool's memory (SHM, EMBEDDED) or the reader's copy."""

    key: BlockKey
    data: memoryview
    tier: Tier
    path: Path


class Read(Protocol):
    """The leading run of resident blocks, leased. Use as a context manager; leaving releases every lease.

    Bytes are checked against key and checksum before they are handed out. Views in place stay whole while the lease
    lives; `whole()` says, after the last byte was used, how many leading blocks were whole all along. What lies behind
    must be thrown away.
    """

    blocks: Sequence[BlockView]

    def whole(self) -> int: ...

    def release(self) -> None: ...

    def __enter__(self) -> Read: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class Put:
    """One block to store. `parent` is the key before it in the chain (None for the first): eviction is leaf-first.

    `transient_s`: forget it after that many seconds, and never write it to files: a hand-off's trailing partial block.
    `retention`: priority, pin and copies; how they count is for the rank to decide.
    """

    key: BlockKey
    size: int
    fill: Fill
    parent: BlockKey | None = None
    transient_s: float | None = None
    retention: Retention = DEFAULT


class Outcome(str, Enum):
    STORED = "stored"
    DUPLICATE = "duplicate"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True)
class PutResult:
    """Per block of a batch, in its order; `reason` is set for REFUSED (pool full, too large) and FAILED (rank gone)."""

    outcome: Outcome
    path: Path | None = None
    reason: str = ""
    durable: bool = False
    """It is on its rank's disk: a restart finds it."""


@dataclass
class PoolCounts:
    """What one client did; a snapshot. Bytes are payload."""

    blocks_read: dict[str, int] = field(default_factory=dict)
    """By "tier/path", such as "dram/shm"."""
    bytes_read: dict[str, int] = field(default_factory=dict)
    blocks_put: dict[str, int] = field(default_factory=dict)
    """By outcome, and "stored/shm" by path."""
    bytes_put: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)
    """By reason: absent, rank_down, timeout, corrupt, lapsed, full."""


class Pool(Protocol):
    def match(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        """How many leading `keys` are resident. Grants nothing, renews nothing."""
        ...

    def read(self, keys: Sequence[BlockKey], budget_s: float = 2.0) -> Read:
        """Lease, fetch and verify the leading run of `keys` that is resident."""
        ...

    def write(self, blocks: Sequence[Put], budget_s: float = 2.0) -> list[PutResult]:
        """Reserve, fill, checksum, commit. A block is visible only when whole; a duplicate costs no copy."""
        ...

    def drop(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        """Forget transient blocks early; how many went. Blocks under a lease go when it ends."""
        ...

    def alive(self) -> bool:
        """Whether any rank answers; cheap, from the last contacts and at most one probe a second."""
        ...

    def counts(self) -> PoolCounts: ...

    def close(self) -> None: ...
