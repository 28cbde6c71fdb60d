"""What happens in a pool per second, out of two looks at it; and what somebody should know.

Pure: two statuses and the time between them go in. A status that lacks something, since its rank is of another version
or has no such part, shows as None and not as 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Status = Mapping[str, Any]

HELD_SHARE_MAX = 0.8
"""More of a rank's memory than that under leases, pins and reservations leaves eviction next to nothing to choose."""


@dataclass(frozen=True)
class RankRates:
    """One rank now. Shares of its slots; rates since the look before, None when there was none of this process."""

    rank: int
    state: str
    clients: int | None
    dram_share: float
    file_share: float | None
    held_share: float | None
    in_bytes_s: float | None
    out_bytes_s: float | None
    evictions_s: float | None
    leases: int
    owed: int | None
    """Copies that it owes to other ranks."""
    policy: str
    cpu_share: float | None


def rates(before: Status | None, now: Status, seconds: float) -> RankRates:
    if before is not None and before.get("pid") != now.get("pid"):
        before = None

    def rate(*path: str) -> float | None:
        was, is_ = _at(before, *path), _at(now, *path)
        return None if was is None or is_ is None or seconds <= 0 else max(0.0, is_ - was) / seconds

    cpu = rate("cpu_s")
    return RankRates(
        rank=int(now["rank"]),
        state=str(now.get("status", "serves")),
        clients=now.get("clients"),
        dram_share=now["slots_used"] / now["slots"],
        file_share=now["file_slots_used"] / now["file_slots"] if now.get("file_slots") else None,
        held_share=now.get("held_share"),
        in_bytes_s=rate("bytes_in"),
        out_bytes_s=rate("bytes_out"),
        evictions_s=rate("counts", "evicted"),
        leases=int(now["leases"]),
        owed=_whole(_at(now, "copying", "owed")),
        policy=str(now.get("eviction", {}).get("dram", {}).get("policy", "")),
        cpu_share=cpu,
    )


def hit_ratio(before: Sequence[Status], now: Sequence[Status]) -> float | None:
    """Of the whole pool, between two looks; over all time when there was only one. None: nothing was asked for."""
    was = {status.get("pid"): status for status in before}
    hits = asked = 0.0
    for status in now:
        hits += _since(was.get(status.get("pid")), status, "reads", "hits") or 0.0
        asked += _since(was.get(status.get("pid")), status, "reads", "asked") or 0.0
    return hits / asked if asked else None


def alarms(statuses: Iterable[Status]) -> list[str]:
    """What should not go on like this, one sentence each."""
    found = []
    for status in statuses:
        rank = f"rank {status['rank']}"
        held = status.get("held_share") or 0.0
        if held > HELD_SHARE_MAX:
            found.append(
                f"{rank}: {held:.0%} of its memory cannot be evicted, as it is leased, pinned or being written; puts "
                "will be refused; kvtool pool audit says who holds it"
            )
        failures = _at(status, "files", "failures")
        if failures:
            why = str(status["files"].get("why", ""))
            found.append(
                f"{rank}: its file tier failed {failures:.0f} times in a row ({why}); blocks stay in memory only"
            )
        homeless = _at(status, "copying", "homeless")
        if homeless:
            found.append(
                f"{rank}: {homeless:.0f} blocks have fewer copies than wanted, as others have no room for them"
            )
        for other in status.get("hung") or ():
            found.append(f"{rank}: has not heard of rank {other} for some seconds")
    return found


def _at(status: Status | None, *path: str) -> float | None:
    found: Any = status
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        return float(sum(found.values()))
    return float(found) if isinstance(found, (int, float)) else None


def _since(before: Status | None, now: Status, *path: str) -> float | None:
    is_, was = _at(now, *path), _at(before, *path)
    return None if is_ is None else is_ - (was or 0.0)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
