"""A pool's run directory: what is in it, whose turn it is there, and what must not be left behind.

    run_dir/            mode 0700
      rank.json           what the ranks are told (0600: it holds the pool's key); those that find it gone end
      launch.json         mpiexec's pid and start time, and the prefix of every name that the pool makes
      wanted.json         which ranks there shall be: what the keeper goes by
      keeper.json         the keeper's pid, and what it did; keeper.lock: there is one at most
      pool.json           written by the ranks: where they are (0600)
      pool.log            what ranks and mpiexec said; outlives the pool, and carries the lock
      PREFIX-N.sock       control sockets; PREFIX-N under /dev/shm: segments
      files.json          which block files are the pool's (see `pool.filetier`); outlives the pool, as they do

Processes are known by pid and start time, so never somebody else's; ranks that lost their mpiexec are found by their
command line. Whoever was killed -9 leaves names behind, all with the prefix.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtool.errors import PoolUnavailable, Refused
from kvtool.pool.names import CONFIG, LAUNCH, LOG
from kvtool.pool.names import MPI_TMP as MPI_TMP
from kvtool.pool.state import FILE, runs, started_at
from kvtool.transfer.segment import unlink_prefix

_POLL_S = 0.02


def own(run_dir: Path) -> None:
    """Make the directory, or check that it is ours.

    Raises:
        Refused: it belongs to another user.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if run_dir.stat().st_uid != os.geteuid():
        raise Refused(f"{run_dir} belongs to another user; give a run directory of your own")
    run_dir.chmod(0o700)


@contextlib.contextmanager
def turn(run_dir: Path, wait_s: float) -> Iterator[None]:
    """Nobody else starts or stops a pool in `run_dir` meanwhile. The kernel ends the turn of a process that dies.

    The lock is on the log, which stays when the pool goes: a lock file that is removed could be held twice. Without
    the directory there is nothing to take turns over.

    Raises:
        PoolUnavailable: another's turn lasted longer than `wait_s`.
    """
    try:
        fd = os.open(run_dir / LOG, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        yield
        return
    try:
        until_s = time.monotonic() + wait_s
        while not _take(fd):
            if time.monotonic() >= until_s:
                raise PoolUnavailable(f"another process starts or stops a pool in {run_dir} right now; try again later")
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _take(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pool_runs(run_dir: Path) -> bool:
    launch = read_launch(run_dir)
    launcher_runs = bool(launch and runs(launch["pid"], launch["started"]))
    return launcher_runs or bool(rank_processes(run_dir) or keeper_processes(run_dir))


def read_launch(run_dir: Path) -> dict[str, Any] | None:
    """The launcher's note; None when there is none."""
    return read_json(run_dir / LAUNCH)


def named(run_dir: Path) -> dict[str, Any] | None:
    """`prefix` and `file_dir` of the pool that is or was here; a launcher may have died before it left its note."""
    return read_launch(run_dir) or read_json(run_dir / CONFIG)


def untouched(run_dir: Path) -> bool:
    """Whether no pool was ever started here, as far as files tell."""
    return not any((run_dir / name).exists() for name in (LOG, LAUNCH, CONFIG, FILE))


def tail(run_dir: Path, lines: int = 12) -> str:
    """What the log ends with: a rank's own sentence if there is one, not what mpiexec says of it."""
    try:
        text = (run_dir / LOG).read_text(errors="replace").splitlines()
    except OSError:
        return "(no log)"
    said = [line for line in text if line.startswith("rank ")]
    return "\n".join(said or text[-lines:]) or "(the log is empty)"


def rank_processes(run_dir: Path) -> list[tuple[int, int]]:
    """(pid, start) of every rank with this run directory's configuration, whoever its parent is by now."""
    return processes_with(f"kvtool.pool.rank\0--config\0{run_dir / CONFIG}\0")


def keeper_processes(run_dir: Path) -> list[tuple[int, int]]:
    """(pid, start) of the keepers of this run directory: one, or none."""
    return processes_with(f"kvtool.pool.keeper\0{run_dir}\0")


def processes_with(arguments: str) -> list[tuple[int, int]]:
    """(pid, start) of those who have these `arguments` on their command line, each ended by a zero byte."""
    mark = arguments.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            started = started_at(int(entry.name))
            if mark in command and b"mpiexec" not in command and b"prterun" not in command and started is not None:
                found.append((int(entry.name), started))
    return found


def remove_names(run_dir: Path, prefix: str) -> None:
    """Segments and sockets of the pool with this prefix. Its block files stay, for the next one."""
    unlink_prefix(prefix)
    for pattern in (f"{prefix}-*.sock", f"{prefix}-*.lock"):
        for path in run_dir.glob(pattern):
            path.unlink(missing_ok=True)


def flush_s(run_dir: Path) -> float:
    """How long the ranks of the pool that runs here may take to write their memory to files when they stop."""
    config = read_json(run_dir / CONFIG) or {}
    found = config.get("flush_s", 0.0)
    return float(found) if isinstance(found, (int, float)) else 0.0


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found
