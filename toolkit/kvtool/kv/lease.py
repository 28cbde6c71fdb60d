"""Leases: who may read a slot, and until when.

A transfer reads memory that eviction wants back. While a lease is live its slots stay as they are; once it lapses they
may be given to another block, whether or not the reader came back. A dead reader therefore costs one term of memory at
most, and never leaks. One lease covers one read, however many slots that touches, and has the id of that read: looking
a block up again is another read, so nothing is ever renewed, and no probe can keep a block in memory (Mooncake #2187).

Pure rules: callers pass the time in. All times are on the clock of the process that owns the memory. After Gray &
Cheriton, "Leases" (SOSP 1989), section 2.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvtool.errors import LeaseLapsed

ReadId = tuple[int, int]
"""(owner, number): a client connection and its count of reads; new for every attempt."""


@dataclass
class Lease:
    """The right of one read to `slots`, from `granted_at_s` up to but not including `lapses_at_s`."""

    read: ReadId
    granted_at_s: float
    lapses_at_s: float
    slots: set[int] = field(default_factory=set)
    told: dict[int, int] = field(default_factory=dict)
    """Slot -> length of the blocks that the reader was told of: what he may have sent to him."""


class LeaseTable:
    """The leases on the slots of one DRAM tier."""

    def __init__(self, term_s: float) -> None:
        if term_s <= 0:
            raise ValueError(f"lease term must be positive, got {term_s} s")
        self.term_s = term_s
        self._leases: dict[ReadId, Lease] = {}
        self._readers: dict[int, int] = {}  # slot -> how many leases hold it
        self._due: list[tuple[float, ReadId]] = []  # heap; entries of released leases are skipped

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def grant(self, read: ReadId, now_s: float, wait_s: float = 0.0) -> Lease:
        """A lease without slots yet; `wait_s`: how long the answer to the reader may be held back."""
        assert read not in self._leases, f"read {read} holds a lease already"
        lease = Lease(read, now_s, now_s + wait_s + self.term_s)
        self._leases[read] = lease
        heapq.heappush(self._due, (lease.lapses_at_s, read))
        return lease

    def has(self, read: ReadId) -> bool:
        return read in self._leases

    def cover(self, lease: Lease, slot: int) -> None:
        """Let a lease that nobody was told of yet hold one more slot; again is a no-op."""
        if slot not in lease.slots:
            lease.slots.add(slot)
            self._readers[slot] = self._readers.get(slot, 0) + 1

    def answered(self, lease: Lease, now_s: float) -> None:
        """The reader is told now: one term from here on, not from when he would have stopped waiting."""
        if now_s + self.term_s < lease.lapses_at_s and lease.read in self._leases:
            lease.lapses_at_s = now_s + self.term_s
            heapq.heappush(self._due, (lease.lapses_at_s, lease.read))

    def told(self, read: ReadId) -> Mapping[int, int]:
        """Slot -> length of what this read may have sent to it, in order; empty when its lease is over."""
        lease = self._leases.get(read)
        return {} if lease is None else lease.told

    def held(self, slot: int) -> bool:
        """Whether a lease is on `slot`. A lease that lapsed still counts until `expire` has run: never too early."""
        return slot in self._readers

    @property
    def held_slots(self) -> int:
        return len(self._readers)

    def pin(self, slots: Iterable[int]) -> None:
        """Bytes of `slots` are being sent by us: nobody may write there until `unpin`, whatever the clock says."""
        for slot in slots:
            self._readers[slot] = self._readers.get(slot, 0) + 1

    def unpin(self, slots: Iterable[int]) -> list[int]:
        """That is over; the slots that nobody holds any more."""
        return [slot for slot in slots if self._drop(slot)]

    def release(self, read: ReadId, now_s: float) -> list[int]:
        """End a read; the slots that no lease holds any more.

        Raises:
            LeaseLapsed: the lease ended by the clock; what was read since may be another block's bytes.
        """
        lease = self._leases.get(read)
        if lease is None or now_s >= lease.lapses_at_s:
            raise LeaseLapsed(
                f"read {read[1]} of client {read[0]} outlived its {self.term_s} s lease; discard what it read and "
                "recompute, or raise lease_term if this recurs"
            )
        return self._end(lease)

    def expire(self, now_s: float) -> list[int]:
        """End every lease that is due; the slots that no lease holds any more."""
        freed: list[int] = []
        while self._due and self._due[0][0] <= now_s:
            lease = self._leases.get(heapq.heappop(self._due)[1])
            if lease is not None:
                freed += self._end(lease)
        return freed

    def end_owner(self, owner: int) -> list[int]:
        """End every lease of a client that is gone."""
        freed: list[int] = []
        for lease in [lease for lease in self._leases.values() if lease.read[0] == owner]:
            freed += self._end(lease)
        return freed

    def next_due_s(self) -> float | None:
        while self._due and self._due[0][1] not in self._leases:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def _end(self, lease: Lease) -> list[int]:
        del self._leases[lease.read]
        if len(self._due) > 64 + 4 * len(self._leases):  # released leases leave their heap entries behind
            self._due = [(kept.lapses_at_s, kept.read) for kept in self._leases.values()]
            heapq.heapify(self._due)
        return [slot for slot in lease.slots if self._drop(slot)]

    def _drop(self, slot: int) -> bool:
        """One holder less; whether it was the last."""
        left = self._readers[slot] - 1
        if left:
            self._readers[slot] = left
        else:
            del self._readers[slot]
        return not left
