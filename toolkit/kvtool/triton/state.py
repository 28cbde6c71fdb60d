"""`deploy.json`: what a deployment consists of now, and how to end one whose supervisor is no more.

Written whole by the supervisor at each change; read by `deploy status`, `deploy down` and clients that look for the
front's address. The run directory is 0700 and the file 0600: ports of servers without authentication are in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtool.errors import Refused, Unavailable
from kvtool.triton import process
from kvtool.triton.peers import FILE as PEERS_FILE
from kvtool.triton.server import unlink_shm

FILE = "deploy.json"
LOCK = "lock"
CONTROL_SUFFIX = ".control"
"""Of the socket where the ranks of an instance over TensorRT-LLM meet their connector's scheduler."""
STOP_TIMEOUT_S = 30.0
"""A supervisor that was asked to stop has this long."""


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The recorded state; None where there is no deployment."""
    try:
        state = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"{run_dir / FILE} cannot be read: {error}; end the deployment with: kvtool deploy down"
        ) from None
    return state if isinstance(state, dict) else None


def supervised(state: dict[str, Any] | None) -> bool:
    """Whether the supervisor that wrote `state` still lives."""
    supervisor = (state or {}).get("supervisor", {})
    return bool(supervisor) and process.same(int(supervisor["pid"]), int(supervisor["started_ticks"]))


def front_url(run_dir: Path) -> str:
    """gRPC address of the front server.

    Raises:
        Unavailable: nothing runs there, or it is still starting.
    """
    state = read_state(run_dir)
    if state is None or not supervised(state):
        raise Unavailable(f"no deployment runs in {run_dir}; start one with: kvtool deploy up SPEC")
    for server in state.get("servers", []):
        if server["role"] == "front" and server.get("grpc_port"):
            return f"{state['host']}:{server['grpc_port']}"
    raise Unavailable(f"the deployment in {run_dir} is {state.get('phase')}; its front has no address yet")


def engine_of(run_dir: Path) -> Path:
    """The engine directory of the deployment in `run_dir`.

    Raises:
        Unavailable: there is none.
    """
    path = run_dir / "spec.json"
    try:
        return Path(json.loads(path.read_text(encoding="utf-8"))["engine"])
    except (OSError, ValueError, KeyError):
        raise Unavailable(f"no deployment in {run_dir}; start one with: kvtool deploy up SPEC") from None


def make_run_dir(run_dir: Path) -> None:
    """Create `run_dir`, for the user alone. Raises Refused: it belongs to somebody else."""
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if run_dir.stat().st_uid != os.getuid():
        raise Refused(f"run_dir {run_dir} belongs to another user; give another run_dir")
    run_dir.chmod(0o700)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """One supervisor for each run directory; the kernel lets go when the process ends, however it ends.

    Raises:
        Refused: another holds it.
    """
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(
                f"a deployment runs in {run_dir} already; end it with: kvtool deploy down, or give another run_dir"
            ) from None
        yield
    finally:
        os.close(descriptor)


def stop(run_dir: Path, *, purge: bool = False) -> list[str]:
    """End whatever runs in `run_dir`, with or without its supervisor; what was done, in words. Idempotent.

    The pool's block files stay for the next start, unless `purge`.
    """
    said = _stop(run_dir)
    if purge and (run_dir / "pool").is_dir():
        from kvtool.pool.launch import stop_pool

        if stop_pool(run_dir / "pool", purge=True):
            said.append("block files removed")
    return said


def _stop(run_dir: Path) -> list[str]:
    state = read_state_or_nothing(run_dir)
    if state is None:
        return []
    said = []
    if supervised(state):
        pid = int(state["supervisor"]["pid"])
        os.kill(pid, signal.SIGTERM)
        said.append(f"supervisor {pid} stopped")
        until_s = time.monotonic() + STOP_TIMEOUT_S
        while supervised(state) and time.monotonic() < until_s:
            time.sleep(0.05)
        if supervised(state):
            os.kill(pid, signal.SIGKILL)
            said[-1] = f"supervisor {pid} killed: it did not stop in {STOP_TIMEOUT_S:g} s"
    return said + clean(run_dir, state)


def clean(run_dir: Path, state: dict[str, Any]) -> list[str]:
    """Stop the pool, kill processes and remove shared memory that carry the deployment's id, forget the deployment."""
    said = []
    if (run_dir / "pool").is_dir():
        from kvtool.pool.launch import stop_pool

        if stop_pool(run_dir / "pool"):
            said.append("pool stopped")
    deployment = str(state.get("deployment", ""))
    if deployment:
        left = process.marked(deployment)
        if left:
            stubborn = process.kill(left, grace_s=0.0)
            said.append(f"{len(left)} processes killed")
            if stubborn:
                said.append(f"processes {', '.join(map(str, stubborn))} do not end")
        regions = unlink_shm(f"kvt-{deployment}-")
        if regions:
            said.append(f"{len(regions)} shared memory regions removed")
    for path in (run_dir / FILE, run_dir / PEERS_FILE, *run_dir.glob(f"*{CONTROL_SUFFIX}")):
        path.unlink(missing_ok=True)
    return said


def read_state_or_nothing(run_dir: Path) -> dict[str, Any] | None:
    """As `read_state`; a file that cannot be parsed counts as a deployment without facts."""
    try:
        return read_state(run_dir)
    except Unavailable:
        return {}
