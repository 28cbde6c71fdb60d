"""The view: which ranks a pool has, in which incarnation, and how each of them stands. A lattice.

Every rank keeps a view and tells the others what it learns. Two views are merged by taking, for each identity, the
later standing: a higher incarnation wins, then the worse status, then the later step. That is a join-semilattice:
in whatever order, and however often, ranks hear of changes, those that heard the same know the same, without a leader
and without agreement (Shapiro et al., "Conflict-free replicated data types", SSS 2011, section 3).

The epoch is a number made of the view. Its high half counts steps, so it grows with every change; its low half is a
digest, so two survivors that know of different deaths, equally many of them, do not share an epoch. A client that
holds the epoch of an answer against its own therefore learns of every change (but for one in 2^32).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from blake3 import blake3


class Status(IntEnum):
    """Ordered: within one incarnation a rank only goes from smaller to larger."""

    JOINING = 0
    """Serves, and takes a growing share of the keys: see `weight`."""
    LIVE = 1
    DRAINING = 2
    """Serves what it holds and takes nothing new."""
    DEAD = 3
    """To be replaced by the next incarnation."""
    LEFT = 4
    """Gone for good: nobody replaces it."""


RAMP_STEPS = 7
"""A newcomer that holds nothing has an eighth of a rank's weight, then two, and so on; then it is LIVE."""
_WEIGHT_OF_STEP = 1 / (RAMP_STEPS + 1)


class Standing(NamedTuple):
    """Compares as the lattice does. `step`: of the ramp, while JOINING; else 0."""

    incarnation: int
    status: Status
    step: int = 0

    @property
    def serves(self) -> bool:
        return self.status < Status.DEAD

    @property
    def weight(self) -> float:
        """The share of keys it should hold, against a rank with 1."""
        if self.status is Status.JOINING:
            return (self.step + 1) * _WEIGHT_OF_STEP
        return 1.0 if self.status is Status.LIVE else 0.0

    @property
    def steps(self) -> int:
        """Grows whenever the standing does."""
        return (self.incarnation * len(Status) + self.status) * RAMP_STEPS + self.step


@dataclass(frozen=True)
class Entry:
    """What is known of one rank. `identity`, POOL/RANK, outlives restarts; `place` is its host; `record` says how to
    reach this incarnation and is nobody's business here."""

    identity: str
    standing: Standing
    place: str = ""
    record: bytes = b""

    @property
    def number(self) -> int:
        return int(self.identity.rpartition("/")[2])

    @property
    def order(self) -> tuple[Standing, str, bytes]:
        """Total, so that merging is the same for everybody even if two processes claim one incarnation."""
        return self.standing, self.place, self.record


_ENTRY = struct.Struct("<QBB")


class View:
    """One entry for each identity. `base` is added to the epoch's count: later starts of a pool have later epochs."""

    def __init__(self, entries: Iterable[Entry] = (), base: int = 0) -> None:
        self._entries: dict[str, Entry] = {}
        self._base, self._epoch = base, -1
        self._sorted: list[Entry] = []
        self.merge(entries)

    def get(self, identity: str) -> Entry | None:
        return self._entries.get(identity)

    def __getitem__(self, identity: str) -> Entry:
        return self._entries[identity]

    @property
    def entries(self) -> list[Entry]:
        """By rank. Not to be changed."""
        return self._sorted

    def merge(self, entries: Iterable[Entry]) -> list[Entry]:
        """Take over what is later than what is known; those entries."""
        news = []
        for entry in entries:
            known = self._entries.get(entry.identity)
            if known is None or entry.order > known.order:
                self._entries[entry.identity] = entry
                news.append(entry)
        if news:
            self._epoch = -1
            self._sorted = sorted(self._entries.values(), key=lambda entry: entry.number)
        return news

    def beyond(self, entries: Iterable[Entry]) -> list[Entry]:
        """What is known here and not yet to somebody who knows `entries`."""
        theirs = {entry.identity: entry.order for entry in entries}
        return [entry for entry in self.entries if entry.identity not in theirs or entry.order > theirs[entry.identity]]

    @property
    def epoch(self) -> int:
        """64 bits."""
        if self._epoch < 0:
            digest, count = blake3(), self._base
            for entry in self.entries:
                standing = entry.standing
                name = entry.identity.encode()
                digest.update(_ENTRY.pack(standing.incarnation, standing.status, standing.step))
                digest.update(struct.pack("<I", len(name)) + name)
                count += standing.steps
            self._epoch = (count % 2**32) << 32 | int.from_bytes(digest.digest()[:4], "little")
        return self._epoch
