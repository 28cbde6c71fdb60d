"""What processes cost: CPU seconds and resident memory, read from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Process:
    """One process at one moment. `cpu_s`: user and system time since its start. `resident` includes shared pages,
    `shared` is that part of it (shared memory counts in every process that touches it)."""

    pid: int
    name: str
    cpu_s: float
    resident: int
    shared: int
    started_ticks: int
    """Since boot; with the pid it names a process for good."""


def look(pid: int) -> Process | None:
    """The process `pid`, or None when it is gone."""
    folder = Path("/proc") / str(pid)
    try:
        stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        pages = (folder / "statm").read_text().split()
        command = (folder / "cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return Process(
        pid, _name(command, stat), (int(fields[11]) + int(fields[12])) * _TICKS_S, int(pages[1]) * _PAGE,
        int(pages[2]) * _PAGE, int(fields[19]),
    )  # fmt: skip


def family(roots: Iterable[int]) -> list[Process]:
    """The processes `roots` and all that descend from them, by pid."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            parent = _parent(folder)
            if parent is not None:
                children.setdefault(parent, []).append(int(folder.name))
    pids, seen = list(roots), set[int]()
    while pids:
        pid = pids.pop()
        if pid not in seen:
            seen.add(pid)
            pids.extend(children.get(pid, ()))
    return [process for pid in sorted(seen) if (process := look(pid)) is not None]


def cpu_between(before: Iterable[Process], after: Iterable[Process]) -> dict[int, float]:
    """CPU seconds that each process of `after` used since `before`; one that is new counts from its start."""
    earlier = {(process.pid, process.started_ticks): process.cpu_s for process in before}
    return {p.pid: p.cpu_s - earlier.get((p.pid, p.started_ticks), 0.0) for p in after}


def _parent(folder: Path) -> int | None:
    try:
        return int((folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _name(command: list[bytes], stat: str) -> str:
    """What a person would call it: the program, and the module or model that it runs."""
    words = [word.decode(errors="replace") for word in command if word]
    if not words:
        return stat[stat.index("(") + 1 : stat.rindex(")")]
    program = Path(words[0]).name
    if "-m" in words[1:-1]:
        return f"{program} {words[words.index('-m') + 1]}"
    if program == "triton_python_backend_stub" and len(words) > 1:
        return f"{program} {Path(words[1]).parent.parent.name}"
    return program
