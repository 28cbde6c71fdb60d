"""What clients tell a rank of their reads, so that the pool has one hit ratio.

A rank cannot count hits by itself: it does not see reads in its shared memory, and of a run of keys over several ranks
it leases blocks that the reader never gets to use. The reader knows. Each block that a read asks for is counted by him
once, as a hit by tier and path or as a miss by reason, and he tells any one rank what came since he told last: about
once a second while he reads, and when he leaves. So over all ranks, exactly,

    blocks asked for = hits + misses

and in tokens the same, times the tokens of a block. A client that is killed takes up to its last second with it, a rank
that dies what it was told; neither can count anything twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtool.errors import KvtoolError, ProtocolError
from kvtool.pool import wire
from kvtool.pool.base import Path, PoolCounts, Tier
from kvtool.pool.line import Line
from kvtool.pool.reading import Counting

TELL_S, SAY_S = 1.0, 0.1
COUNT_MAX = 2**53
WAYS = frozenset(f"{tier.value}/{path.value}" for tier in Tier for path in Path)
REASONS = frozenset(
    ("absent", "rank_down", "timeout", "corrupt", "lapsed", "full", "cancelled", "too_small", "too_long", "held")
)
OTHER = "other"


@dataclass
class ReadsTold:
    """Reads in blocks and bytes; `hits` and `bytes` by "tier/path", such as "dram/shm", `misses` by reason."""

    asked: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    misses: dict[str, int] = field(default_factory=dict)

    def add(self, more: Mapping[str, Any]) -> None:
        """
        Raises:
            ProtocolError: not such counts. Nothing was added.
        """
        hits, size, misses = (_counts(more.get(name)) for name in ("hits", "bytes", "misses"))
        if not (hits.keys() <= WAYS and size.keys() <= WAYS):
            raise ProtocolError(f"counted: wanted reads by {', '.join(sorted(WAYS))}, found others")
        self.asked += sum(hits.values()) + sum(misses.values())
        for mine, theirs in ((self.hits, hits), (self.bytes, size), (self.misses, misses)):
            for name, count in theirs.items():
                known = name if mine is not self.misses or name in REASONS else OTHER
                mine[known] = mine.get(known, 0) + count


def _counts(found: Any) -> dict[str, int]:
    if not isinstance(found, dict) or len(found) > 64:
        raise ProtocolError(f"counted: wanted maps of counts, found {type(found).__name__}")
    for name, count in found.items():
        if not isinstance(name, str) or not isinstance(count, int) or not 0 <= count < COUNT_MAX:
            raise ProtocolError("counted: wanted names with counts, 0 or more, found something else")
    return found


class Untold:
    """A client's side: what it counted and has not told yet. From any thread."""

    def __init__(self, counting: Counting) -> None:
        self._counting, self._told = counting, PoolCounts()
        self._lock = threading.Lock()
        self._tried_s = float("-inf")

    def tell(self, lines: Iterable[Line], now_s: float, at_once: bool = False) -> None:
        """Tell the first of `lines` that takes it, if it is time; `at_once`, for the last time. Waits for nothing."""
        if (not at_once and now_s - self._tried_s < TELL_S) or not self._lock.acquire(blocking=False):
            return
        try:
            self._tried_s = now_s
            counts = self._counting.snapshot()
            more = {
                "hits": _since(self._told.blocks_read, counts.blocks_read),
                "bytes": _since(self._told.bytes_read, counts.bytes_read),
                "misses": _since(self._told.misses, counts.misses),
            }
            if not (more["hits"] or more["misses"]):
                return
            body = wire.pack_map(more)
            for line in lines:
                if line.connected and line.usable and _said(line, body, now_s):
                    self._told = counts
                    return
        finally:
            self._lock.release()


def _said(line: Line, body: bytes, now_s: float) -> bool:
    try:
        line.say(wire.Op.COUNTED, body, now_s + SAY_S)
    except KvtoolError:
        return False
    return True


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: more for name, count in now.items() if (more := count - before.get(name, 0))}
