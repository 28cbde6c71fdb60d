"""The keeper: starts a rank again that died. `python -m kvtool.pool.keeper RUN_DIR`, left behind by `kvtool pool up`.

It reads which ranks are wanted (wanted.json) and which process is which rank (pool.json), waits on their pidfds, and
starts a replacement, without MPI, milliseconds after one ended: `kvtool.pool.rank --join RANK`, which joins the others
by itself. When all have died it starts all of them. A rank that ends again and again is started ever more slowly and at
last given up, which is said in keeper.json and so in `kvtool pool status`.

There is one for a run directory (a lock says so; the kernel ends it with the process), and none is needed for ranks to
go on: killed, it takes nothing with it, and `kvtool pool up` leaves another. It imports next to nothing, since it lives
as long as the pool: about 10 MB, and two looks at two files a second.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from kvtool.pool.names import CONFIG, KEEPER, KEEPER_LOCK, STATE, WANTED
from kvtool.pool.process import runs, started_at

LOOK_S = 0.5
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the n-th start in a row of a rank that did not live for HEALTHY_S."""
HEALTHY_S = 60.0
FAILURES_MAX = 8


class Backoff:
    """When one rank may be started again. Pure: the time is passed in."""

    def __init__(self) -> None:
        self.starts = 0
        self.failures = 0
        self._began_s = self._ended_s = -HEALTHY_S

    @property
    def given_up(self) -> bool:
        return self.failures >= FAILURES_MAX

    def started(self, now_s: float) -> None:
        self.starts, self._began_s = self.starts + 1, now_s

    def ended(self, now_s: float) -> None:
        """It had been started here, and is over."""
        self._ended_s = now_s
        self.failures = 0 if now_s - self._began_s >= HEALTHY_S else self.failures + 1

    @property
    def due_s(self) -> float:
        return self._ended_s + BACKOFF_S[min(self.failures, len(BACKOFF_S) - 1)]


class _File:
    """A JSON file that is read again when it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._stamp = path, (0, 0)
        self.content: dict[str, Any] = {}

    def look(self) -> None:
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self._stamp:
                self.content, self._stamp = json.loads(self._path.read_text()), stamp
        except (OSError, ValueError):
            pass  # what was known last still holds


class Keeper:
    """Everything happens in `run`, one pass after another."""

    def __init__(self, run_dir: Path) -> None:
        self._dir, self._host = run_dir, socket.gethostname()
        self._wanted, self._state = _File(run_dir / WANTED), _File(run_dir / STATE)
        self._backoffs: dict[int, Backoff] = {}
        self._children: dict[int, tuple[int, int]] = {}  # rank -> (pid, start)
        self._pidfds: dict[tuple[int, int], int] = {}
        self._said: dict[str, Any] = {}
        self._stopping = False

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.set_wakeup_fd(self._wakeup())
        say(f"keeper keeps run_dir={str(self._dir)!r} pid={os.getpid()}")
        while not self._stopping and (self._dir / CONFIG).exists():
            self._wait(self.look(time.monotonic()))
        say(f"keeper stops pid={os.getpid()}")

    def look(self, now_s: float) -> float:
        """Start who is wanted and does not run; how long to wait until the next look."""
        self._reap()
        self._wanted.look()
        self._state.look()
        ranks = {rank["rank"]: rank for rank in self._state.content.get("ranks", [])}
        living: set[tuple[int, int]] = set()
        wait_s = LOOK_S
        for rank in self._wanted.content.get("ranks", []) if ranks else []:
            process = self._process(rank, ranks.get(rank))
            if process is not None:
                living.add(process)
            elif ranks.get(rank, {}).get("host", self._host) == self._host:
                wait_s = min(wait_s, self._start_when_due(rank, now_s))
        self._watch(living)
        self._report()
        return wait_s

    # How

    def _process(self, rank: int, known: dict[str, Any] | None) -> tuple[int, int] | None:
        """The process that is this rank, or is about to be; None when there is none."""
        child = self._children.get(rank)
        if child is not None and runs(*child):
            return child
        process = (known["pid"], known["started"]) if known is not None and known["host"] == self._host else None
        return process if process is not None and runs(*process) else None

    def _start_when_due(self, rank: int, now_s: float) -> float:
        backoff = self._backoffs.setdefault(rank, Backoff())
        if self._children.pop(rank, None) is not None:
            backoff.ended(now_s)
            if backoff.given_up:
                say(f"rank given up rank={rank} starts={backoff.starts} failures={backoff.failures}")
        if backoff.given_up:
            return LOOK_S
        if now_s < backoff.due_s:
            return backoff.due_s - now_s
        backoff.started(now_s)
        command = [sys.executable, "-m", "kvtool.pool.rank", "--config", str(self._dir / CONFIG), "--join", str(rank)]
        pid = os.posix_spawn(
            sys.executable, command, os.environ, setsid=True, setsigdef=[signal.SIGTERM, signal.SIGINT]
        )
        self._children[rank] = (pid, started_at(pid) or 0)
        say(f"rank started rank={rank} pid={pid} starts={backoff.starts} failures={backoff.failures}")
        return 0.0

    def _reap(self) -> None:
        for rank, (pid, _) in self._children.items():
            try:
                ended, status = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
            if ended:
                code = os.waitstatus_to_exitcode(status)
                say(f"rank ended rank={rank} pid={pid} " + (f"signal={-code}" if code < 0 else f"status={code}"))

    def _watch(self, living: set[tuple[int, int]]) -> None:
        for process in set(self._pidfds) - living:
            os.close(self._pidfds.pop(process))
        for process in living - set(self._pidfds):
            try:
                self._pidfds[process] = os.pidfd_open(process[0])
            except OSError:  # it ended just now, or this kernel has none: the next look tells
                pass

    def _wakeup(self) -> int:
        self._woken, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        return write

    def _wait(self, wait_s: float) -> None:
        """Until a rank ends, a signal comes, or the time is up."""
        poll = select.poll()
        for fd in (self._woken, *self._pidfds.values()):
            poll.register(fd, select.POLLIN)
        poll.poll(max(1, int(wait_s * 1000)))

    def _report(self) -> None:
        """For `kvtool pool status`; written when something changed."""
        report = {
            "pid": os.getpid(),
            "started": started_at(os.getpid()),
            "starts": {str(rank): backoff.starts for rank, backoff in self._backoffs.items()},
            "given_up": [rank for rank, backoff in self._backoffs.items() if backoff.given_up],
        }
        if report == self._said:
            return
        draft = self._dir / f".{KEEPER}"
        try:
            draft.unlink(missing_ok=True)
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(json.dumps(report))
            draft.replace(self._dir / KEEPER)
            self._said = report
        except OSError as error:
            say(f"keeper's note not written why={str(error)!r}")

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True


def only_one(run_dir: Path) -> int | None:
    """The lock of the one keeper of `run_dir`, held until this process ends; None when another holds it."""
    fd = os.open(run_dir / KEEPER_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def say(event: str) -> None:
    """Into the pool's log, which is this process's stderr."""
    now_s = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now_s))
    try:
        print(f"{stamp},{int(now_s * 1000) % 1000:03d} INFO kvtool.pool.keeper {os.getpid()} {event}", file=sys.stderr)
    except OSError:
        pass  # a full disk is no reason to let ranks lie


def main() -> int:
    run_dir = Path(sys.argv[1]).absolute()
    lock = only_one(run_dir)
    if lock is not None:
        Keeper(run_dir).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
