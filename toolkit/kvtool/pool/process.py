"""Telling processes apart: by pid and start time, since a pid alone may be somebody else's by now."""

from __future__ import annotations

from pathlib import Path


def started_at(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def runs(pid: int, started: int) -> bool:
    """Whether the process that was `pid` when it started at `started` still runs."""
    return started_at(pid) == started
