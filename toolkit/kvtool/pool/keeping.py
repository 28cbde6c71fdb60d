"""The keeper from outside: leaving one behind, asking after it, ending it. See `pool.keeper`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvtool.errors import PoolUnavailable
from kvtool.pool.names import CONFIG, KEEPER, LOG, STATE, WANTED
from kvtool.pool.rundir import read_json
from kvtool.pool.state import runs, started_at, write_private

START_S = 10.0
_POLL_S = 0.02


@dataclass
class KeeperStatus:
    """`starts`: how often it started each rank; `given_up`: ranks that ended too often."""

    runs: bool
    pid: int = 0
    starts: dict[int, int] = field(default_factory=dict)
    given_up: list[int] = field(default_factory=list)


def keeper_status(run_dir: Path) -> KeeperStatus:
    note = read_json(run_dir / KEEPER)
    if note is None:
        return KeeperStatus(False)
    starts = {int(rank): count for rank, count in note["starts"].items()}
    return KeeperStatus(runs(note["pid"], note["started"]), note["pid"], starts, note["given_up"])


def wanted(run_dir: Path) -> list[int]:
    """Ranks that there shall be."""
    note = read_json(run_dir / WANTED)
    return [] if note is None else sorted(note["ranks"])


def want(run_dir: Path, ranks: list[int]) -> None:
    """Have the keeper see to it that these ranks run, and no longer to others."""
    write_private(run_dir / WANTED, json.dumps({"ranks": sorted(ranks)}))


def attach_keeper(run_dir: Path) -> bool:
    """Leave a keeper behind for the pool of `run_dir`, unless one is there that has not given up any rank. Whether it
    was missing. If no rank is left of a pool that nobody took down, the keeper starts all of them.

    Raises:
        PoolUnavailable: no pool runs there, or the keeper does not start.
    """
    run_dir = run_dir.absolute()
    if not all((run_dir / name).exists() for name in (CONFIG, STATE)):
        raise PoolUnavailable(f"no pool runs in {run_dir}; start one with: kvtool pool up")
    status = keeper_status(run_dir)
    if status.runs and not status.given_up:
        return False
    if status.runs:  # another one tries again
        _end(status.pid)
    start_keeper(run_dir, dict(os.environ))
    return True


def start_keeper(run_dir: Path, environment: dict[str, str]) -> None:
    """
    Raises:
        PoolUnavailable: it does not start.
    """
    fd = os.open(run_dir / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtool.pool.keeper", str(run_dir)],
            stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, env=environment, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(fd)
    _children.append(process)
    until_s = time.monotonic() + START_S
    while not keeper_status(run_dir).runs:  # this one, or another that was faster
        if time.monotonic() >= until_s:
            process.kill()
            raise PoolUnavailable(f"the pool's keeper did not start in {START_S:g} s; see {run_dir / LOG}")
        time.sleep(_POLL_S)


def _end(pid: int) -> None:
    started = started_at(pid)
    until_s = time.monotonic() + START_S
    os.kill(pid, signal.SIGTERM)
    while started is not None and runs(pid, started):
        if time.monotonic() >= until_s:
            raise PoolUnavailable(f"the pool's keeper, process {pid}, does not end")
        reap_keepers()
        time.sleep(_POLL_S)


def reap_keepers() -> None:
    """Take the exit status of those that this process started."""
    _children[:] = [child for child in _children if child.poll() is None]


_children: list[subprocess.Popen[bytes]] = []
