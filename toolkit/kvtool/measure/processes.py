"""What the processes of a deployment cost: CPU seconds between two looks, and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.triton.process import PROC, Process, look, marked

_PAGE = os.sysconf("SC_PAGE_SIZE")
QUIET_SHARE = 0.10
"""A deployment that uses less than this share of one core counts as idle."""


@dataclass(frozen=True)
class Cost:
    """One process over a stretch of time. `resident` includes `shared`, which counts in every process that maps it."""

    pid: int
    name: str
    cpu_s: float
    resident: int
    shared: int


def cpu_between(before: Iterable[Process], after: Iterable[Process]) -> dict[int, float]:
    """CPU seconds that each process of `after` used since `before`; one that is new counts from its start."""
    earlier = {(process.pid, process.started_ticks): process.cpu_s for process in before}
    return {p.pid: p.cpu_s - earlier.get((p.pid, p.started_ticks), 0.0) for p in after}


class Watch:
    """What each process of a deployment costs inside a `with` block; `costs`, by pid, is there afterwards. `also`:
    processes without the deployment's mark that belong to it, such as its supervisor."""

    def __init__(self, deployment: str, also: Sequence[int] = ()) -> None:
        self._deployment, self._also = deployment, also
        self.costs: list[Cost] = []

    def __enter__(self) -> Watch:
        self._before = self._look()
        return self

    def __exit__(self, *_: object) -> None:
        after = sorted(self._look(), key=lambda process: process.pid)
        used = cpu_between(self._before, after)
        self.costs = [Cost(p.pid, _called(p), used[p.pid], p.rss_size, _shared(p.pid)) for p in after]

    def _look(self) -> list[Process]:
        return [*marked(self._deployment), *(found for pid in self._also if (found := look(pid)) is not None)]


def watch(deployment: str, seconds: float, also: Sequence[int] = ()) -> list[Cost]:
    """What each process of the deployment costs over the next `seconds`. Blocks for that long."""
    with Watch(deployment, also) as watched:
        time.sleep(seconds)
    return watched.costs


def settle(deployment: str, timeout_s: float = 60.0, window_s: float = 0.5) -> bool:
    """Wait until the deployment is idle, such as after it stored an answer's blocks; False if it never was."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        if sum(cost.cpu_s for cost in watch(deployment, window_s)) < QUIET_SHARE * window_s:
            return True
    return False


def _shared(pid: int) -> int:
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[2]) * _PAGE
    except OSError:
        return 0


def _called(process: Process) -> str:
    """What a person would call it: the program, and the module or model that it runs."""
    try:
        raw = (PROC / str(process.pid) / "cmdline").read_bytes()
    except OSError:
        return process.name
    words = [word.decode(errors="replace") for word in raw.split(b"\0") if word]
    if not words:
        return process.name
    if "-m" in words[1:-1]:
        return f"{Path(words[0]).name} -m {words[words.index('-m') + 1]}"
    if process.name.startswith("triton_python") and len(words) > 1:
        return f"stub of {Path(words[1]).parent.parent.name}"
    repository = next((word for word in words if word.startswith("--model-repository=")), "")
    return f"{Path(words[0]).name} {Path(repository).name}".rstrip()
