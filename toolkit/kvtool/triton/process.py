"""Processes of one deployment: found by a mark in their environment, so that none outlives it unseen.

A tritonserver's Python stubs can outlive it, and a supervisor that was killed leaves servers and ranks behind. Process
ids are reused, so a recorded id alone must never be killed. Every process of a deployment is started with
KVTOOL_DEPLOYMENT=<id> in its environment, which its children inherit; `marked` reads /proc and finds them all. Linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

MARK = "KVTOOL_DEPLOYMENT"
PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """`started_ticks` since boot tells this process from a later one with the same id."""

    pid: int
    parent: int
    group: int
    state: str
    started_ticks: int
    cpu_s: float
    rss_size: int
    name: str
    session: int = 0

    @property
    def alive(self) -> bool:
        return self.state not in "ZX"


def look(pid: int) -> Process | None:
    """The process `pid`, or None when there is none. About 20 us."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Process(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        state=fields[0],
        started_ticks=int(fields[19]),
        cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
        rss_size=int(fields[21]) * _PAGE,
        name=name,
        session=int(fields[3]),
    )


def same(pid: int, started_ticks: int) -> bool:
    """Whether `pid` is still the live process that started at `started_ticks`."""
    found = look(pid)
    return found is not None and found.alive and found.started_ticks == started_ticks


def everyone() -> list[Process]:
    found = (look(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def children(pid: int) -> list[Process]:
    """Direct children, zombies included. Cheap: reads the kernel's own list where it is there."""
    try:
        listed = [int(child) for task in (PROC / str(pid) / "task").iterdir() for child in _kids(task)]
    except OSError:
        return []
    found = (look(child) for child in listed)
    return [process for process in found if process is not None and process.parent == pid]


def _kids(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []


def marked(deployment: str) -> list[Process]:
    """Live processes of this user that carry the deployment's mark, besides the caller."""
    wanted = f"{MARK}={deployment}".encode()
    found = []
    for process in everyone():
        if process.pid == os.getpid() or not process.alive:
            continue
        try:
            environment = (PROC / str(process.pid) / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            found.append(process)
    return found


def kill(processes: list[Process], grace_s: float) -> list[int]:
    """SIGTERM, then after `grace_s` SIGKILL to what is left; the ids that a second of waiting did not see end."""
    for process in processes:
        _signal(process, signal.SIGTERM if grace_s > 0 else signal.SIGKILL)
    if grace_s > 0 and _wait_gone(processes, grace_s):
        return []
    for process in processes:
        _signal(process, signal.SIGKILL)
    _wait_gone(processes, 1.0)
    return [process.pid for process in processes if same(process.pid, process.started_ticks)]


def _signal(process: Process, number: int) -> None:
    if same(process.pid, process.started_ticks):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _wait_gone(processes: list[Process], seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while any(same(process.pid, process.started_ticks) for process in processes):
        if time.monotonic() >= until_s:
            return False
        time.sleep(0.02)
    return True
