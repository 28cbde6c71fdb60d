"""Hot blocks: which ones readers on another host ask for so often that a copy near them pays.

A prefix that everybody uses has one owner, and every other host reads it over the network again and again. The owner
counts reads by key and the reader's host, in a bounded table that forgets: counts halve every `half_life_s`, and when
the table is full all of them go down by one, so that what is read more than once in `keys_max` reads is never missed
(Misra & Gries, "Finding repeated elements", 1982). A block that passes `reads_min` is copied to a rank on that host,
one that all agree on, for `ttl_s`; as long as it stays hot its owner renews that, else it ends by the clock. Readers
are told of it with the answers to their lookups.

Pure rules: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtool.kv.block import BlockKey
from kvtool.kv.placement import Member, Placement


@dataclass(frozen=True)
class HotLimits:
    """When a block is hot, and for how long a copy of it lives near its readers."""

    reads_min: float = 8.0
    half_life_s: float = 10.0
    keys_max: int = 4096
    ttl_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Near:
    """Where a copy of a block is, on the host of whoever asked, and for how much longer."""

    position: int
    rank: int
    left_s: float


class HotBlocks:
    """Reads of one rank's blocks from other hosts."""

    def __init__(self, limits: HotLimits | None = None) -> None:
        self.limits = limits or HotLimits()
        self._counts: dict[tuple[str, BlockKey], float] = {}
        self._halved_s = float("-inf")
        self._on_host: dict[str, Placement] = {}
        self._there: dict[tuple[str, BlockKey], tuple[int, float]] = {}  # -> (rank, until)
        self._asked: dict[tuple[str, BlockKey], float] = {}  # -> when to ask for it again
        self._host_of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def near(self) -> int:
        """Copies that are known to be near readers, or were of late."""
        return len(self._there)

    def view(self, epoch: int, members: Iterable[Member], hosts: Mapping[int, str]) -> None:
        """Which ranks there are, and on which hosts. Copies at ranks that are gone are forgotten."""
        self._host_of = dict(hosts)
        by_host: dict[str, list[Member]] = {}
        for member in members:
            by_host.setdefault(hosts[member.rank], []).append(member)
        self._on_host = {host: Placement(epoch, them) for host, them in by_host.items()}
        taking = {member.rank for placement in self._on_host.values() for member in placement.members}
        self._there = {of: there for of, there in self._there.items() if there[0] in taking}
        self._asked.clear()

    def read(self, host: str, keys: Sequence[BlockKey], now_s: float) -> list[tuple[BlockKey, int]]:
        """Somebody on another host read `keys`; those that shall be copied now, and to which rank there."""
        placement = self._on_host.get(host)
        if placement is None or not placement.members:
            return []
        self._forget(now_s)
        wanted = []
        for key in keys:
            of = host, key
            count = self._counts.get(of)
            if count is None and len(self._counts) >= self.limits.keys_max:
                self._lower()
                if len(self._counts) >= self.limits.keys_max:
                    continue
            self._counts[of] = count = (count or 0.0) + 1.0
            if count >= self.limits.reads_min and now_s >= self._asked.get(of, now_s):
                self._asked[of] = now_s + self.limits.ttl_s / 2
                rank = placement.owner(key)
                assert rank is not None
                wanted.append((key, rank))
        return wanted

    def copied(self, key: BlockKey, rank: int, there: bool, now_s: float) -> None:
        """A copy was made, or renewed, or could not be had."""
        of = self._host_of.get(rank, ""), key
        if there:
            self._there.pop(of, None)  # to the end of the line
            self._there[of] = rank, now_s + self.limits.ttl_s
            while len(self._there) > self.limits.keys_max:
                del self._there[next(iter(self._there))]
        else:
            self._there.pop(of, None)

    def hints(self, host: str, keys: Sequence[BlockKey], now_s: float) -> list[Near]:
        """Which of `keys` are near readers on `host`."""
        if not self._there:
            return []
        found = []
        for position, key in enumerate(keys):
            there = self._there.get((host, key))
            if there is not None and there[1] > now_s:
                found.append(Near(position, there[0], there[1] - now_s))
        return found

    def left_s(self, now_s: float) -> list[float]:
        """For how much longer each copy lives that was made, unless it is renewed."""
        return [until_s - now_s for _, until_s in self._there.values() if until_s > now_s]

    def _forget(self, now_s: float) -> None:
        if now_s - self._halved_s < self.limits.half_life_s:
            return
        halvings = min((now_s - self._halved_s) / self.limits.half_life_s, 64.0)
        self._halved_s = now_s
        self._counts = {of: left for of, count in self._counts.items() if (left := count * 0.5**halvings) >= 0.5}
        self._asked = {of: at_s for of, at_s in self._asked.items() if of in self._counts}
        self._there = {of: there for of, there in self._there.items() if there[1] > now_s}

    def _lower(self) -> None:
        self._counts = {of: count - 1.0 for of, count in self._counts.items() if count > 1.0}
