"""Placement: which rank should hold a block.

Rendezvous hashing over the live ranks of an epoch: every rank scores every key and the highest score wins. There is no
table to keep or to lose, all who know the same ranks agree, and when a rank goes only its own keys move. Scores follow
the weighted form of Schindelhauer & Schomaker, "Weighted distributed hash tables" (SPAA 2005): score = -ln(u) / weight,
lowest wins. With equal weights that is the order of the hashes themselves, which is what is compared then: exact on
every machine. With others it is a logarithm, in whose last bit two machines may differ: should two scores ever be that
close, one of the two looks in the wrong place and has a miss.

A block that is wanted more than once is on the first ranks of that order (`owners_of`): when one goes, the next takes
its place, and all others stay what they are.

While ownership moves, blocks are still where they were: a newcomer takes keys over before it holds their blocks, and a
rank that leaves holds blocks that belong elsewhere by now. `elder` says what a rank's weight was before that, and a
reader who finds nothing at an owner asks whoever the owner was by those weights (`readers_of_all`). When nobody comes
or goes there is nobody to ask.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from kvtool.kv.block import KEY_SIZE, BlockKey

_MASK = 2**64 - 1
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = ((np.uint64(30), np.uint64(_M1)), (np.uint64(27), np.uint64(_M2)))
_LAST = np.uint64(31)
_BATCH_MIN = 16
"""Fewer keys are quicker one by one."""


@dataclass(frozen=True)
class Member:
    """A live rank. `identity` outlives restarts; a weight of 0 gets nothing (an empty newcomer ramps up from there).
    `elder`: its weight before what is under way began; None: the same."""

    rank: int
    identity: str
    weight: float = 1.0
    elder: float | None = None


def _mix(value: int) -> int:
    """The finaliser of splitmix64: all output bits depend on all input bits."""
    value = ((value ^ (value >> 30)) * _M1) & _MASK
    value = ((value ^ (value >> 27)) * _M2) & _MASK
    return value ^ (value >> 31)


class Placement:
    """Owners of keys among `members`, as known under `epoch`."""

    def __init__(self, epoch: int, members: Sequence[Member]) -> None:
        self.epoch = epoch
        self.members = tuple(sorted((m for m in members if m.weight > 0), key=lambda m: m.identity))
        self._seeds = [int.from_bytes(blake3(m.identity.encode()).digest()[:8], "little") for m in self.members]
        self._columns = np.array(self._seeds, dtype=np.uint64)[:, None]
        self._weights = np.array([m.weight for m in self.members], dtype=np.float64)[:, None]
        self._even = len({m.weight for m in self.members}) <= 1

        elders = [Member(m.rank, m.identity, m.weight if m.elder is None else m.elder) for m in members]
        self.elders: Placement | None = None
        """Owners as they were; None when they are what they were."""
        if any(m.elder is not None and m.elder != m.weight for m in members):
            self.elders = Placement(epoch, elders)

    def owner(self, key: BlockKey) -> int | None:
        """The rank that should hold `key`, or None when no rank is live."""
        return self.members[self._best(key)].rank if self.members else None

    def owners_of(self, key: BlockKey, copies: int) -> tuple[int, ...]:
        """The ranks that should hold `key` when it is wanted `copies` times, first choice first; all there are when
        they are fewer. The first is `owner(key)`."""
        scores = self._scores(key)
        order = sorted(range(len(scores)), key=scores.__getitem__)
        return tuple(self.members[at].rank for at in order[:copies])

    def owners_of_all(self, keys: Sequence[BlockKey], copies: int) -> list[tuple[int, ...]]:
        """`owners_of` each of `keys`, for whole batches: about 0.5 us a key for few ranks."""
        count = min(copies, len(self.members))
        if len(keys) < _BATCH_MIN or count < 1:
            return [self.owners_of(key, count) for key in keys]
        order = self._all_scores(keys).argsort(axis=0, kind="stable")[:count].T
        return list(map(tuple, np.array([m.rank for m in self.members])[order].tolist()))

    def readers_of_all(self, keys: Sequence[BlockKey], copies: int) -> list[tuple[int, ...]]:
        """The ranks that may hold each of `keys`: its owners, and behind them the one who was its owner."""
        owners = self.owners_of_all(keys, copies)
        if self.elders is None:
            return owners
        before = self.elders.owners(keys)
        return [them if old is None or old in them else (*them, old) for them, old in zip(owners, before, strict=True)]

    def _best(self, key: BlockKey) -> int:
        scores = self._scores(key)
        return scores.index(min(scores))

    def _scores(self, key: BlockKey) -> Sequence[float]:
        """Of each member, lowest wins; of equals the first."""
        (raw,) = struct.unpack_from("<Q", key)
        hashes = [_mix(raw ^ seed) for seed in self._seeds]
        if self._even:
            return [_MASK - h for h in hashes]
        return [-math.log((float(h) + 1.0) / 2.0**64) / m.weight for h, m in zip(hashes, self.members, strict=True)]

    def _all_scores(self, keys: Sequence[BlockKey]) -> Any:
        """`_scores` of all of `keys`: an array [members, keys]."""
        value = np.frombuffer(b"".join(keys), dtype="<u8")[:: KEY_SIZE // 8] ^ self._columns
        for shift, factor in _ROUNDS:  # `_mix`
            value ^= value >> shift
            value *= factor
        value ^= value >> _LAST
        if self._even:
            return ~value
        return -np.log((value.astype(np.float64) + 1.0) / 2.0**64) / self._weights

    def owners(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """`owner` of each of `keys`."""
        found: list[int | None] = [None] * len(keys)
        for rank, positions in self.split(keys):
            for position in positions:
                found[position] = rank
        return found

    def split(self, keys: Sequence[BlockKey]) -> list[tuple[int, list[int]]]:
        """(rank, positions of its keys, ascending) of every rank that owns some, the owner of the first key first.
        Empty when no rank is live. About 0.15 us a key for large batches and few ranks."""
        if not self.members or not keys:
            return []
        if len(self.members) == 1:
            return [(self.members[0].rank, list(range(len(keys))))]
        if len(keys) < _BATCH_MIN:
            parts: dict[int, list[int]] = {}
            for position, key in enumerate(keys):
                parts.setdefault(self._best(key), []).append(position)
        else:
            parts = self._split_batch(keys)
        found = [(self.members[at].rank, positions) for at, positions in parts.items()]
        return sorted(found, key=lambda part: part[1][0])

    def _split_batch(self, keys: Sequence[BlockKey]) -> dict[int, list[int]]:
        best = self._all_scores(keys).argmin(axis=0)
        order = best.argsort(kind="stable").tolist()
        parts, start = {}, 0
        for at, count in enumerate(np.bincount(best).tolist()):
            if count:
                parts[at] = order[start : start + count]
                start += count
        return parts
