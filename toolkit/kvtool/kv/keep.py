"""Keep: which blocks are wanted more than others, how firmly, and until when.

A block's *level* orders it among the candidates for eviction: its priority, 0 to 100, and above all of them those that
are pinned. Lower levels go first, and within a level the eviction policy decides (TensorRT-LLM's rule for priorities).
When a duration is over the block falls back to the default priority. A soft pin is a level and no more; a hard pin
says that the block may not go at all, so at most a share of the slots may be pinned so: one pin more is a soft one,
and counted. A block that is put again with more is raised; it is never lowered before its time.

Pure rules: callers pass the time in, and call `end_due` when `next_due_s` says so.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

from kvtool.kv.record import Entry
from kvtool.kv.retention import NEVER, PRIORITY_DEFAULT, PRIORITY_MAX, Kept, Pin, Retention

HARD_SHARE = 4
"""One slot of so many may be pinned hard."""


class Keeping:
    """The wishes for the blocks of one rank; `hard_max`: how many blocks may be pinned hard."""

    def __init__(self, hard_max: int) -> None:
        self.hard_max = hard_max
        self.softened = 0
        self._kept: dict[int, Entry] = {}  # id of an entry -> the entry, while something is wanted of it
        self._hard: set[int] = set()
        self._due: list[tuple[float, int, Entry]] = []
        self._serial = itertools.count()

    def begin(self, entry: Entry) -> None:
        """`entry` is stored now, with the retention that it has, until `wanted_until_s`."""
        wanted = entry.retention
        if wanted.priority != PRIORITY_DEFAULT or wanted.pin is not Pin.NONE:
            until_s = NEVER if entry.wanted_until_s is None else entry.wanted_until_s
            self._keep(entry, Kept(wanted.priority, until_s), wanted.pin, until_s)

    def put_again(self, entry: Entry, wanted: Retention, now_s: float, stored: bool) -> None:
        """Raise what is wanted of `entry`, if `wanted` is more, and offer it anew then. `stored`: it has begun."""
        until_s = NEVER if wanted.duration_s is None else now_s + wanted.duration_s
        if _much(wanted) > _much(entry.retention):
            entry.retention = replace(wanted, copies=max(wanted.copies, entry.retention.copies))
            entry.wanted_until_s = now_s + wanted.duration_s if stored and wanted.duration_s is not None else None
        elif wanted.copies > entry.retention.copies:
            entry.retention = replace(entry.retention, copies=wanted.copies)
        kept = entry.kept or Kept()
        if not stored or (entry.kept is None and wanted.pin is Pin.NONE and wanted.priority <= kept.priority):
            return
        if wanted.priority > kept.priority:
            kept.priority, kept.priority_until_s = wanted.priority, until_s
        elif wanted.priority == kept.priority:
            kept.priority_until_s = max(kept.priority_until_s, until_s)
        self._keep(entry, kept, wanted.pin, until_s)

    def _keep(self, entry: Entry, kept: Kept, pin: Pin, until_s: float) -> None:
        if pin is Pin.HARD and (id(entry) in self._hard or len(self._hard) < self.hard_max):
            kept.hard_until_s = max(kept.hard_until_s, until_s)
            self._hard.add(id(entry))
        elif pin is not Pin.NONE:
            self.softened += pin is Pin.HARD
            kept.soft_until_s = max(kept.soft_until_s, until_s)
        entry.kept, self._kept[id(entry)] = kept, entry
        self._settle(entry, kept)
        if until_s < NEVER:
            heapq.heappush(self._due, (until_s, next(self._serial), entry))
        self._compact()

    def _compact(self) -> None:
        """Blocks that went, or were raised, leave their times in the heap."""
        if len(self._due) > 64 + 4 * len(self._kept):
            kept = [(entry, entry.kept) for entry in self._kept.values() if entry.kept is not None]
            ends = [(end, entry) for entry, its in kept for end in _ends(its)]
            self._due = [(end, next(self._serial), entry) for end, entry in ends]
            heapq.heapify(self._due)

    def unpin(self, entry: Entry) -> bool:
        """Take the pins off `entry`; whether it had one."""
        kept = entry.kept
        if kept is None or kept.level <= PRIORITY_MAX:
            return False
        kept.soft_until_s = kept.hard_until_s = 0.0
        self._settle(entry, kept)
        return True

    def hard(self, entry: Entry) -> bool:
        """Whether `entry` may not go. True until `end_due` has run: never too early."""
        return entry.kept is not None and entry.kept.hard_until_s > 0

    def gone(self, entry: Entry) -> None:
        """`entry` is forgotten."""
        if entry.kept is not None:
            entry.kept = None
            self._kept.pop(id(entry), None)
            self._hard.discard(id(entry))

    def end_due(self, now_s: float) -> list[Entry]:
        """End what is due; the entries whose level or hard pin ended."""
        ended = []
        while self._due and self._due[0][0] <= now_s:
            entry = heapq.heappop(self._due)[2]
            kept = entry.kept
            if kept is None or not any(end <= now_s for end in _ends(kept)):
                continue
            if kept.priority_until_s <= now_s:
                kept.priority, kept.priority_until_s = PRIORITY_DEFAULT, NEVER
            if kept.soft_until_s <= now_s:
                kept.soft_until_s = 0.0
            if kept.hard_until_s <= now_s:
                kept.hard_until_s = 0.0
            self._settle(entry, kept)
            ended.append(entry)
        return ended

    def _settle(self, entry: Entry, kept: Kept) -> None:
        """What is wanted of `entry` changed."""
        entry.level = kept.level
        if not kept.hard_until_s:
            self._hard.discard(id(entry))
        if entry.level == PRIORITY_DEFAULT:
            entry.retention, entry.wanted_until_s = Retention(copies=entry.retention.copies), None
            entry.kept = None
            del self._kept[id(entry)]

    def next_due_s(self) -> float | None:
        while self._due and self._due[0][2].kept is None:
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def pinned(self) -> list[tuple[Entry, float, bool]]:
        """(entry, when its pin ends, whether it is a hard one); for the audit, O(n)."""
        kept = [(entry, entry.kept) for entry in self._kept.values() if entry.kept is not None]
        return [(e, max(k.soft_until_s, k.hard_until_s), k.hard_until_s > 0) for e, k in kept if k.level > PRIORITY_MAX]

    @property
    def hard_count(self) -> int:
        return len(self._hard)


def _ends(kept: Kept) -> list[float]:
    """The times at which something ends."""
    times = (kept.priority_until_s, kept.soft_until_s, kept.hard_until_s)
    return [time_s for time_s in times if 0 < time_s < NEVER]


def _much(wanted: Retention) -> tuple[int, int, float]:
    return wanted.pin, wanted.priority, NEVER if wanted.duration_s is None else wanted.duration_s
