"""Room for memory: what a directory, the control groups and the host have left.

Shared memory that does not fit is found out late and hard: the kernel answers a page fault with SIGBUS, or kills
somebody. So what is wanted is compared with every limit that would end that way, before a byte is taken.

A group's page cache that is not in use (inactive_file) counts as free, as the kernel reclaims it before it kills.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import Refused
from kvtool.units import show_size

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number near 2**63


@dataclass(frozen=True)
class Room:
    """`free` bytes are left under the limit that `where` names for people."""

    where: str
    free: int


def rooms(directory: Path, root: Path = Path("/")) -> Iterator[Room]:
    """Every limit on memory-backed files in `directory` for this process. `root`: where /proc and /sys are found."""
    yield file_room(directory)
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield Room("the host's available memory", int(line.split()[1]) * 1024)
    yield from _groups(root)


def file_room(directory: Path) -> Room:
    """What the file system of `directory` has left for this user."""
    fs = os.statvfs(directory)
    return Room(f"the file system of {directory}", fs.f_bavail * fs.f_frsize)


def demand(what: str, size: int, found: Iterator[Room] | list[Room], lower: str) -> None:
    """Refuse `size` bytes for `what` unless every room has them; `lower` names the setting to lower.

    Raises:
        Refused: with what was wanted, the tightest room and its name, and what to lower.
    """
    tightest = min(found, key=lambda room: room.free, default=None)
    if tightest is not None and size > tightest.free:
        raise Refused(
            f"{what}: wanted {show_size(size)}, {tightest.where} has {show_size(max(tightest.free, 0))} left; "
            f"lower {lower} or make room there"
        )


def _groups(root: Path) -> Iterator[Room]:
    """Limits of this process's memory control groups, versions 2 and 1, from its own group up to the root's."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = base / path.lstrip("/")
        for group in (own, *own.parents):
            if group == base or base in group.parents:
                yield from _group(group, *names)


def _group(group: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> Iterator[Room]:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return  # no limit, or seen from inside a container whose parents are hidden
    stat = dict(line.split() for line in _lines(group / "memory.stat"))
    yield Room(f"control group {group}/{limit_name}", limit - usage + int(stat.get(reclaimable_name, 0)))


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
