"""What a pool is to its callers: match, read under leases or into buffers, write in two phases.

`PoolClient` (ranks over sockets, shared memory and UCX), and `EmbeddedPool` (the same rules in this process) stand
behind it; `AsyncPoolClient` has the same calls to await. All calls take batches, are thread-safe, bounded by
`budget_s`, and never raise for a missing, slow or dead rank: what could not be had in time is a miss, counted with its
reason. They raise only for misuse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Protocol

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


class Cancelling(Protocol):
    """Says whether to stop: a `Cancel`, a threading.Event, or anything like it. Looked at between the parts of a call;
    what was read by then is whole, the rest is a miss with the reason "cancelled"."""

    def is_set(self) -> bool: ...


class Cancel:
    """A `Cancelling`; from any thread."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set


@dataclass(frozen=True, slots=True)
class Got:
    """What came of one key of a `get_into`. A miss has no tier and no path, and a `reason`; what its buffer holds then
    is nobody's block."""

    size: int = 0
    """Bytes written to the buffer."""
    tier: Tier | None = None
    path: Path | None = None
    reason: str = ""

    @property
    def hit(self) -> bool:
        return self.tier is not None


@dataclass(frozen=True)
class GetResult:
    """Of a `get_into`, in the order of its keys. `count`: how many leading blocks are there, whole and checked.

    `held`: positions whose registered buffer a hung rank may still write to (see `register`); leave it alone until its
    handle says that it is free.
    """

    blocks: Sequence[Got]
    count: int
    held: Sequence[int] = ()

    @property
    def hits(self) -> int:
        return sum(got.tier is not None for got in self.blocks)


ONE_BLOCK = frozenset(("corrupt", "lapsed", "too_small", "held"))
"""Reasons for the miss of one block; those behind it in a leading run may be there or not, and count as absent."""


@functools.lru_cache(256)
def hit_of(size: int, filed: bool, path: Path) -> Got:
    return Got(size, Tier.FILE if filed else Tier.DRAM, path)


def leading_run(blocks: Sequence[Got]) -> int:
    return next((at for at, got in enumerate(blocks) if got.tier is None), len(blocks))


def finished(got: Sequence[Got | None], reason: str) -> list[Got]:
    """What was never come to (None) is a miss for the reason that the run ended."""
    rest, next_ = Got(reason="absent" if reason in ONE_BLOCK else reason), Got(reason=reason)
    whole = []
    for one in got:
        whole.append(next_ if one is None else one)
        next_ = rest if one is None or one.tier is None else next_
    return whole


@dataclass(frozen=True)
class Put:
    """One block to store. `parent` is the key before it in the chain (None for the first): eviction is leaf-first.

    `fill` writes the bytes; or they are `data`, which is quicker: copied and hashed in one pass.
    `transient_s`: forget it after that many seconds, and never write it to files: a hand-off's trailing partial block.
    `retention`: priority, pin and copies; how they count is for the rank to decide.
    """

    key: BlockKey
    size: int
    fill: Fill | None
    parent: BlockKey | None = None
    transient_s: float | None = None
    retention: Retention = DEFAULT
    data: memoryview | None = None
    """Flat bytes, `size` of them."""


class Outcome(str, Enum):
    STORED = "stored"
    DUPLICATE = "duplicate"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True)
class PutResult:
    """Per block of a batch, in its order; `reason` is set for REFUSED (pool full, too large) and FAILED (rank gone).

    STORED and `durable` speak of one rank. A block that is wanted more than once is copied on by that rank as soon as
    it is stored; were it to die within these moments, the block is lost with it.
    """

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
    """By reason: absent, rank_down, timeout, corrupt, lapsed, full, cancelled, too_long (for one lease), too_small (the
    buffer), held (its buffer)."""
    blocks_asked: int = 0
    """By reads of either kind: the one denominator. Each block asked for is in `hits` once or in `misses` once."""
    hits: dict[str, int] = field(default_factory=dict)
    """By tier."""
    tokens_per_block: int = 0
    breakers: dict[str, str] = field(default_factory=dict)
    """What is not asked now, and why it would be: "pool/0 ucx" -> "open", "half-open"; closed ones are left out."""
    breaks: dict[str, int] = field(default_factory=dict)
    """How often each opened."""
    hedges: dict[str, int] = field(default_factory=dict)
    """Second owners asked since the first was slow: "asked", and "won" by the second."""

    @property
    def tokens_asked(self) -> int:
        return self.blocks_asked * self.tokens_per_block

    @property
    def tokens_hit(self) -> int:
        return sum(self.hits.values()) * self.tokens_per_block

    @property
    def hit_rate(self) -> float:
        """Blocks that were served over blocks asked for; 0 when none were."""
        return sum(self.hits.values()) / self.blocks_asked if self.blocks_asked else 0.0


class Pool(Protocol):
    def match(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        """How many leading `keys` are resident. Grants nothing, renews nothing."""
        ...

    def exists(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> list[bool]:
        """Which of `keys` are resident, each on its own. Grants nothing, renews nothing."""
        ...

    def read(self, keys: Sequence[BlockKey], budget_s: float = 2.0) -> Read:
        """Lease, fetch and verify the leading run of `keys` that is resident; no more than can be verified in half a
        lease term (the rest is a miss, "too_long": use `get_into`, or read on from there)."""
        ...

    def get_into(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        budget_s: float = 2.0,
        *,
        leading: bool = True,
        cancel: Cancelling | None = None,
    ) -> GetResult:
        """Copy blocks into `buffers`, one for each of `keys`, and check the copies; as many parts as that takes.

        `leading`: the run from the first key, up to the first that is not there; else every key that is there. The
        buffer of a miss may have been written to. Raises ValueError or TypeError for what is no writable buffer.
        """
        ...

    def write(self, blocks: Sequence[Put], budget_s: float = 2.0) -> list[PutResult]:
        """Reserve, fill, checksum, commit. A block is visible only when whole; a duplicate costs no copy."""
        ...

    def drop(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        """Forget transient blocks early; how many went. Blocks under a lease go when it ends."""
        ...

    def delete(self, keys: Sequence[BlockKey], budget_s: float = 2.0) -> int:
        """Forget blocks of any kind, in every tier, for good: no restart finds them. How many went. Readers under
        a lease read on to its end."""
        ...

    def alive(self) -> bool:
        """Whether any rank answers; cheap, from the last contacts and at most one probe a second."""
        ...

    def counts(self) -> PoolCounts: ...

    def close(self) -> None: ...
