"""What a rank knows of a block, what it may be asked, and what it wants done.

Rules decide and never do: `Stamp`, `Demote` and `Promote` are returned to whoever drives them (a rank process, the
embedded pool, a simulator), and what came of a move is told back as an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from kvtool.kv.block import BlockKey
from kvtool.kv.lease import Lease
from kvtool.kv.retention import DEFAULT, PRIORITY_DEFAULT, Kept, Retention


class State(IntEnum):
    RESERVED = 1
    """A writer holds the slot; not visible to readers."""
    COMMITTED = 2
    """In DRAM, whole; `file_slot` >= 0 when a file holds it too."""
    DEMOTING = 3
    """In DRAM, whole and readable, while it is being written to the file tier."""
    FILED = 4
    """In the file tier only."""
    PROMOTING = 5
    """In the file tier, on its way to `slot`; or in a store below the files, if `file_slot` is -1."""
    REMOTE = 6
    """In a store below the files only. Such a block is known by its key and size, and is not indexed."""


@dataclass(eq=False, slots=True)
class Entry:
    """One block of this rank. Times on the rank's clock.

    `touched`: the store's count of uses when it was used last. `uses`: by how many requests. `born`, `turn`: which turn
    of its conversation made it, and which one used it last. `level` follows from what is `kept`: lower ones go first.
    """

    key: BlockKey
    parent: BlockKey | None
    length: int
    state: State
    owner: int
    since_s: float
    slot: int = -1
    generation: int = 0
    file_slot: int = -1
    tenant: str = ""
    checksum: int = 0
    deadline_s: float = 0.0
    unnamed: bool = False
    """Reserved for a writer who will say later what he writes; its key means nothing until then."""
    touched: int = 0
    uses: int = 0
    used_at_s: float = 0.0
    born: int = 1
    turn: int = 1
    transient_until_s: float | None = None
    transient_s: float | None = None
    holders: int = 1
    retention: Retention = DEFAULT
    wanted_until_s: float | None = None
    """When its retention ends; None: never."""
    record: int = 0
    """Number of its record in the file tier; grows from write to write, restarts included."""
    stays: bool = False
    """It is being written to a file and will not leave DRAM for that."""
    durable: bool = False
    """Its writer was told that it is on the disk."""
    filed_for: list[tuple[Committing, int]] = field(default_factory=list)
    kept: Kept | None = None
    level: int = PRIORITY_DEFAULT
    doomed: bool = False
    """Forgotten while a move was in flight: its slots come back when the move ends."""
    awaited_by: list[Reading] = field(default_factory=list)


@dataclass(frozen=True)
class Want:
    """A block that a client wants to put. `parent` is the key before it; None for the first of a chain."""

    key: BlockKey
    size: int
    parent: BlockKey | None = None
    transient_s: float | None = None
    retention: Retention = DEFAULT
    tenant: str = ""
    """Who is charged; the pool's operator is not."""


class Grant(IntEnum):
    """What a put may do next."""

    GRANTED = 0
    """Write the slot, then commit."""
    DUPLICATE = 1
    """Resident already, or being written by another client right now. Nothing to do either way: should the other
    writer fail, the block is a miss, which is slow and not wrong; waiting for him would make everybody slow."""
    WAIT = 2
    """Room is being made, or the asker's own commits will make some: ask again when a slot may have come free."""
    FULL = 3
    TOO_LARGE = 4


@dataclass(frozen=True)
class Granted:
    grant: Grant
    slot: int = -1
    generation: int = 0


class Commit(IntEnum):
    STORED = 0
    LAPSED = 1
    """The reservation had timed out; the bytes were never visible."""
    DURABLE = 2
    """Stored, and on the disk: a restart finds it."""


@dataclass(eq=False)
class Committing:
    """Commits in progress: `waiting` of them are on their way to the disk, and `results` says STORED until they are."""

    results: list[Commit] = field(default_factory=list)
    waiting: int = 0

    @property
    def done(self) -> bool:
        return self.waiting == 0


@dataclass(slots=True)
class Hit:
    """One block of a read, under the read's lease. `ready` when its bytes are in `slot`."""

    key: BlockKey
    slot: int
    generation: int
    length: int
    checksum: int
    filed: bool
    """It had to come from the file tier."""
    ready: bool
    entry: Entry


@dataclass(eq=False)
class Reading:
    """A read in progress: `hits` is the leading run found so far, `waiting` how many promotions it waits for."""

    lease: Lease
    keys: list[BlockKey]
    hits: list[Hit] = field(default_factory=list)
    waiting: int = 0
    stalled: bool = False
    """The next block needs a slot that is being freed."""
    full: bool = False
    """The run was cut because no slot could be freed."""

    @property
    def done(self) -> bool:
        return self.waiting == 0 and not self.stalled

    @property
    def run(self) -> list[Hit]:
        """The leading hits that are ready; what lies behind a block that is not there yet is of no use."""
        for at, hit in enumerate(self.hits):
            if not hit.ready:
                return self.hits[:at]
        return self.hits


@dataclass(frozen=True)
class Stamp:
    """Write the header of `slot`, before anybody is told of it. An empty key: the slot is about to be rewritten."""

    slot: int
    generation: int
    key: BlockKey = b""
    length: int = 0
    checksum: int = 0


@dataclass(frozen=True)
class Demote:
    """Copy `length` bytes of `slot` to `file_slot`, to the disk itself if `durable`, then call `demoted(move, ...)`.

    What follows `checksum` goes into the file's record; `wanted_s`: for how long the block is wanted from now on.
    """

    move: int
    key: BlockKey
    slot: int
    file_slot: int
    length: int
    checksum: int
    record: int = 0
    parent: BlockKey | None = None
    retention: Retention = DEFAULT
    wanted_s: float | None = None
    durable: bool = False


@dataclass(frozen=True)
class Promote:
    """Copy `length` bytes of `file_slot` to `slot`, check them, then call `promoted(move, ...)`."""

    move: int
    key: BlockKey
    file_slot: int
    slot: int
    length: int
    checksum: int
    record: int = 0


@dataclass(frozen=True)
class Erase:
    """Clear the record in `file_slot`, for good, then call `erased(file_slot, ...)`."""

    file_slot: int


@dataclass(frozen=True)
class Archive:
    """Copy the record in `file_slot` to the store below, then call `archived(move, ...)`."""

    move: int
    key: BlockKey
    file_slot: int
    record: int
    length: int


@dataclass(frozen=True)
class Fetch:
    """Copy a block of `length` bytes from the store below to `slot`, check it, then call `fetched(move, ...)`."""

    move: int
    key: BlockKey
    slot: int
    length: int


@dataclass(frozen=True)
class Discard:
    """Remove a block from the store below. Nothing is told of what came of it."""

    key: BlockKey


Action = Stamp | Demote | Promote | Erase | Archive | Fetch | Discard


@dataclass(frozen=True)
class Filed:
    """A block that was found in the file tier at the start: what its record says."""

    file_slot: int
    key: BlockKey
    length: int
    checksum: int
    record: int
    parent: BlockKey | None = None
    retention: Retention = DEFAULT
    wanted_s: float | None = None


IN_FILE, NOWHERE = -1, -2


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a block can be read now, for a directory: in DRAM slot `slot`, only `IN_FILE`, or `NOWHERE`. `was`: where
    it was listed before."""

    key: BlockKey
    was: int
    slot: int = NOWHERE
    transient: bool = False


@dataclass
class Quarantined:
    """A slot that nobody may have yet. It is free once every reader's lease ended and, when a writer may still hold
    it, he said that he is done, went away, or `safe_at_s` passed."""

    slot: int
    generation: int
    key: BlockKey
    why: str
    owner: int
    since_s: float
    writer: bool = False
    safe_at_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True)
class Holding:
    """One line of the leak audit: how many of a kind there are, and the oldest of them.

    `deadline_s`: seconds until it ends by the clock, below 0 when it is overdue, None when it ends by an event.
    """

    kind: str
    count: int
    owner: int = 0
    age_s: float = 0.0
    deadline_s: float | None = None


@dataclass
class StoreCounts:
    """What happened to blocks since the start."""

    stored: int = 0
    duplicates: int = 0
    refused: int = 0
    aborted: int = 0
    timed_out: int = 0
    """Reservations that were not committed in time."""
    evicted: int = 0
    """Forgotten for room: they were in no tier any more."""
    demoted: int = 0
    filed: int = 0
    """Written to a file while they stayed in DRAM: to be durable, before their children, or at the end."""
    demote_failed: int = 0
    promoted: int = 0
    promote_failed: int = 0
    corrupt: int = 0
    archived: int = 0
    fetched: int = 0
    fetch_failed: int = 0
    """To and from the store below the files."""
    recovered: int = 0
    """Found in the file at the start."""
    expired: int = 0
    """Transient blocks whose time was up."""
    dropped: int = 0
    deleted: int = 0
    erase_failed: int = 0
    """Records of deleted blocks that the disk would not clear: a restart may find them."""
    leases_lapsed: int = 0
