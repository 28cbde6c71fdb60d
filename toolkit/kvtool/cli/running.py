"""A deployment for the length of a command: up on the way in, down on the way out, whatever happens between."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.cli import console
from kvtool.errors import KvtoolError, Refused, Unavailable

if TYPE_CHECKING:
    from kvtool.measure.deployed import Deployed

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0


@contextmanager
def running(spec: Path, state_dir: Path, keep: bool = False) -> Iterator[Deployed]:
    """A running deployment, ended on the way out unless `keep` and all went well. SIGTERM ends it too."""
    from kvtool.measure.deployed import Deployed

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    kept = False
    try:
        console.step(f"kvtool deploy up {short(spec)}: a pool of two ranks, and front, prefill and decode servers")
        command = [sys.executable, "-m", "kvtool.cli.main", "deploy", "up", str(spec)]
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=START_TIMEOUT_S)
        if ran.returncode != 0:
            raise Unavailable(f"the deployment did not start (exit code {ran.returncode}); logs are in {state_dir}")
        deployed = Deployed(state_dir)
        console.done(f"gRPC on {deployed.url}")
        yield deployed
        kept = keep
    finally:
        if not kept:
            stop_all(state_dir)
        signal.signal(signal.SIGTERM, before)


def stop_all(state_dir: Path) -> None:
    """End the deployment and look for leftovers. A supervisor that is only just starting has its lock already but no
    state yet, so this goes on until the lock is free.

    Raises:
        KvtoolError: something is left.
    """
    from kvtool.triton.process import marked
    from kvtool.triton.state import locked, read_state_or_nothing, stop

    console.step("kvtool deploy down: stop everything, look for leftovers")
    deployment = (read_state_or_nothing(state_dir) or {}).get("deployment", "")
    until_s = time.monotonic() + STOP_TIMEOUT_S
    while state_dir.is_dir():
        stop(state_dir, purge=True)
        try:
            with locked(state_dir):
                break
        except Refused:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.1)
    processes = marked(deployment) if deployment else []
    memory = sorted(path.name for path in Path("/dev/shm").glob(f"kvt-{deployment}-*")) if deployment else []
    if processes or memory:
        left = ", ".join([*(f"process {process.pid} ({process.name})" for process in processes), *memory])
        raise KvtoolError(f"the deployment was stopped, but this is left: {left}")
    console.done("stopped; no process and no shared memory is left")


def short(path: Path) -> Path:
    """Relative to the working directory where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
