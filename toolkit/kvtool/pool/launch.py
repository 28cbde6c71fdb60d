"""Starting and stopping a pool: mpiexec, its ranks, and what they leave in the run directory (see `pool.rundir`).

Starting takes a turn in the run directory until the launcher's note is written; waiting for the ranks to answer does
not, so that a start can be stopped. From the note on a second start finds the first one's pool, and a start that fails
takes down its own pool only: by then another one may run there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError, Missing, PoolUnavailable, Refused
from kvtool.pool.config import PoolConfig, RankConfig
from kvtool.pool.filetier import NOTE, files_of, note_files, sealer_for, store_for
from kvtool.pool.filetier import purge as purge_files
from kvtool.pool.keeping import KeeperStatus, keeper_status, reap_keepers, start_keeper, want
from kvtool.pool.link import Link
from kvtool.pool.names import CONFIG, KEEPER, KEEPER_LOCK, LAUNCH, LOG, MPI_TMP, WANTED
from kvtool.pool.rundir import (
    flush_s,
    keeper_processes,
    named,
    own,
    pool_runs,
    rank_processes,
    read_launch,
    remove_names,
    tail,
    turn,
    untouched,
)
from kvtool.pool.state import FILE, PoolState, read_state, runs, started_at, write_private
from kvtool.pool.tenants import read_tenants, tenant_state_file
from kvtool.pool.wire import Op, unpack_map
from kvtool.transfer.room import demand, rooms
from kvtool.transfer.segment import SHM

log = logging.getLogger("kvtool.pool")

STOP_TIMEOUT_S = 5.0
TURN_S = 30.0
_POLL_S = 0.02
_BASE_S = 1_767_225_600  # 2026, so that sixteenths of a second fit into 32 bits until 2034
_HELLO_S = 1.0
_INHERITED = ("OMPI_", "PMIX_", "PRTE_")
"""An mpiexec that finds its parent's variables takes itself for one of its ranks, and hangs."""

_children: dict[int, subprocess.Popen[bytes]] = {}  # so that our own are reaped


@dataclass
class PoolHandle:
    """A pool that was started. Plain data: `stop_pool(run_dir)` works from any process."""

    run_dir: Path
    state_file: Path
    pid: int
    """mpiexec's."""
    rank_pids: list[int]
    prefix: str

    def stop(self, *, purge: bool = False) -> None:
        stop_pool(self.run_dir, purge=purge)


@dataclass
class RankStatus:
    """One rank as seen from outside. `answer`: its own report; None when it did not answer, for the reason in `why`."""

    rank: int
    identity: str
    pid: int
    runs: bool
    answer: dict[str, Any] | None = None
    audit: list[dict[str, Any]] = field(default_factory=list)
    why: str = ""


@dataclass
class PoolStatus:
    run_dir: Path
    state: PoolState
    launcher_runs: bool
    ranks: list[RankStatus]
    keeper: KeeperStatus

    @property
    def whole(self) -> bool:
        """Whether every rank answers."""
        return all(rank.answer is not None for rank in self.ranks)


def start_pool(config: PoolConfig, run_dir: Path) -> PoolHandle:
    """Start the ranks and wait until each of them answers. On failure nothing is left running.

    Raises:
        Missing: no mpiexec.
        Refused: a pool runs there already, no room in /dev/shm, or a run directory that is not ours.
        PoolUnavailable: not all ranks answered in `config.start_timeout_s`; the sentence has the end of the log.
    """
    mpiexec = find_mpiexec()
    run_dir = run_dir.absolute()
    own(run_dir)
    prefix = f"kvtool-{secrets.token_hex(5)}"
    try:
        with turn(run_dir, 0):
            process = _launch(mpiexec, config, run_dir, prefix)
    except PoolUnavailable as error:
        raise Refused(str(error)) from None
    try:
        handle = _await_ranks(config, run_dir, prefix, process)
        if config.heal:
            start_keeper(run_dir, _environment())
        return handle
    except BaseException:
        _undo(config, run_dir, prefix, process)
        raise


def _launch(mpiexec: str, config: PoolConfig, run_dir: Path, prefix: str) -> subprocess.Popen[bytes]:
    if pool_runs(run_dir):
        raise Refused(f"a pool runs in {run_dir} already; stop it with: kvtool pool down --run-dir {run_dir}")
    _check_keys(config)
    _stop(run_dir)
    demand(f"{config.ranks} ranks", config.ranks * config.dram_size, rooms(SHM), "pool.dram_size or pool.ranks")
    try:
        _write_rank_config(config, run_dir, prefix)
        want(run_dir, list(range(config.ranks)))
        return _spawn(mpiexec, config, run_dir, prefix)
    except BaseException:
        _stop(run_dir)
        raise


def _undo(config: PoolConfig, run_dir: Path, prefix: str, process: subprocess.Popen[bytes]) -> None:
    """Take down the pool that this start began, and no other."""
    with turn(run_dir, TURN_S):
        launch = read_launch(run_dir)
        if launch is not None and launch["prefix"] == prefix:
            _stop(run_dir)
        else:  # stopped by somebody else
            _reap(process.pid, STOP_TIMEOUT_S)
            remove_names(run_dir, prefix)


def stop_pool(run_dir: Path, timeout_s: float | None = None, *, purge: bool = False) -> bool:
    """Stop whatever of a pool runs in `run_dir`, however much of it is dead, and remove what it made.

    Politely first, so that ranks write their memory to files and remove their own; after `timeout_s` (None: what that
    may take) with SIGKILL. Block files stay for the next pool of that name, unless `purge`. Whether anything was there.

    Raises:
        PoolUnavailable: another process has been starting or stopping a pool there for too long.
    """
    run_dir = run_dir.absolute()
    if untouched(run_dir) and not rank_processes(run_dir):
        return False
    with turn(run_dir, TURN_S):
        stopped = _stop(run_dir, timeout_s)
        return bool(purge and purge_files(run_dir)) or stopped


def _stop(run_dir: Path, timeout_s: float | None = None) -> bool:
    timeout_s = STOP_TIMEOUT_S + flush_s(run_dir) if timeout_s is None else timeout_s
    launch, names, found = read_launch(run_dir), named(run_dir), keeper_processes(run_dir)
    _end(found, timeout_s)  # first, or it would start again what ends now
    reap_keepers()
    try:
        while ranks := rank_processes(run_dir):
            if set(ranks) <= set(found):
                break  # they outlive SIGKILL
            found += ranks
            _end(ranks, timeout_s)
        if launch is not None:
            _end([(launch["pid"], launch["started"])], timeout_s)
            _reap(launch["pid"], timeout_s)
    finally:  # whoever is left, his names go
        if names:
            remove_names(run_dir, names["prefix"])
        if not files_of(run_dir):
            (run_dir / NOTE).unlink(missing_ok=True)
        for name in (FILE, CONFIG, LAUNCH, WANTED, KEEPER, KEEPER_LOCK):
            (run_dir / name).unlink(missing_ok=True)
        for path in run_dir.glob(tenant_state_file(run_dir, "*").name):
            path.unlink(missing_ok=True)
        shutil.rmtree(run_dir / MPI_TMP, ignore_errors=True)
    return bool(found) or launch is not None


def _reap(pid: int, timeout_s: float) -> None:
    """Take the exit status of a child of ours; one that does not end stays known, for the next one who asks."""
    child = _children.get(pid)
    if child is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout_s)
            _children.pop(pid, None)


def pool_status(run_dir: Path, *, audit: bool = False, budget_s: float = _HELLO_S) -> PoolStatus:
    """What every rank says of itself, and with `audit` everything that is held there.

    Raises:
        PoolUnavailable: no pool runs in `run_dir`.
    """
    run_dir = run_dir.absolute()
    state = read_state(run_dir / FILE)
    launch = read_launch(run_dir)
    ranks = []
    for rank in state.ranks:
        if rank.status == "left":
            continue
        status = RankStatus(rank.rank, rank.identity, rank.pid, runs(rank.pid, rank.started))
        link = Link(rank, bytes.fromhex(state.key), state.kv_layout, "status", False, lambda epoch: None)
        try:
            status.answer = unpack_map(link.call(Op.STATUS, b"", time.monotonic() + budget_s))
            if audit:
                lines = unpack_map(link.call(Op.AUDIT, b"", time.monotonic() + budget_s))
                status.audit = lines["lines"]
        except KvtoolError as error:
            status.runs = runs(rank.pid, rank.started)  # it may have died of late
            status.why = str(error) if status.runs else f"rank {rank.rank} is dead"
        finally:
            link.close()
        ranks.append(status)
    launcher_runs = bool(launch and runs(launch["pid"], launch["started"]))
    return PoolStatus(run_dir, state, launcher_runs, ranks, keeper_status(run_dir))


def find_mpiexec() -> str:
    """The mpiexec of this Python's environment, else the one on the PATH.

    Raises:
        Missing: there is none, or mpi4py is not installed.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        what = "mpiexec" if found is None else "mpi4py"
        raise Missing(
            f"a pool of ranks needs Open MPI, and {what} was not found; install it: pip install 'kvtool[mpi]'"
        )
    return found


def pool_key(config: PoolConfig) -> bytes:
    """
    Raises:
        Refused: `key_file` is no key, or others may read it.
    """
    if config.key_file is None:
        return secrets.token_bytes(32)
    from kvtool.transfer.crypt import read_key

    return read_key(config.key_file, "pool.key_file")


def _check_keys(config: PoolConfig) -> None:
    """Else every rank would say the same, and later."""
    sealer_for(config.file_key)
    store_for(config.remote, config.layout.fingerprint, config.name, 0)
    key = pool_key(config)
    if config.tenants is not None:
        read_tenants(config.tenants, key, config.name, config.ranks, config.layout.block_size)


def _write_rank_config(config: PoolConfig, run_dir: Path, prefix: str) -> None:
    ucx = config.ucx
    if ucx is None:
        ucx = any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12", "nixl"))
    ranks = RankConfig(
        run_dir=str(run_dir),
        state_file=str(run_dir / FILE),
        file_dir=str(config.file_dir or run_dir),
        prefix=prefix,
        name=config.name,
        key=pool_key(config).hex(),
        base=int((time.time() - _BASE_S) * 16) % 2**32,  # later starts have later epochs, whatever died in between
        layout=asdict(config.layout),
        dram_size=config.dram_size,
        file_size=config.file_size,
        remote=config.remote,
        remote_size=config.remote_size,
        file_key=str(config.file_key or ""),
        write=config.write,
        evict=config.evict,
        flush_s=config.flush_s,
        scrub_rate=config.scrub_rate,
        lease_term_s=config.lease_term_s,
        reserve_term_s=config.reserve_term_s,
        ucx=ucx,
        host=config.host,
        tenants=str(config.tenants or ""),
        lost_s=config.lost_s,
        metrics=config.metrics,
        copies=config.copies,
        namespaces=config.namespaces,
        copy_rate=config.copy_rate,
        log_level=config.log_level,
    )
    if config.file_size:
        note_files(run_dir, config.name, config.file_dir or run_dir, asdict(config.layout))
    write_private(run_dir / CONFIG, json.dumps(ranks.as_dict(), indent=1))


def _spawn(mpiexec: str, config: PoolConfig, run_dir: Path, prefix: str) -> subprocess.Popen[bytes]:
    environment = _environment()
    tmp = run_dir / MPI_TMP
    tmp.mkdir(mode=0o700, exist_ok=True)
    environment |= {
        "TMPDIR": str(tmp),
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,tcp",  # its shared-memory transport leaves segments behind when a rank is killed
    }
    if os.geteuid() == 0:
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpiexec, "--oversubscribe", "--with-ft", "ulfm", "-n", str(config.ranks)]
    command += [sys.executable, "-m", "kvtool.pool.rank", "--config", str(run_dir / CONFIG)]
    fd = os.open(run_dir / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=fd, stderr=fd, env=environment, start_new_session=True
        )
    finally:
        os.close(fd)
    _children[process.pid] = process
    launch = {
        "pid": process.pid,
        "started": started_at(process.pid) or 0,
        "prefix": prefix,
        "file_dir": str(config.file_dir or run_dir),
    }
    write_private(run_dir / LAUNCH, json.dumps(launch))
    return process


def _environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED)}
    return inherited | {"OMP_NUM_THREADS": "1"}


def _await_ranks(config: PoolConfig, run_dir: Path, prefix: str, process: subprocess.Popen[bytes]) -> PoolHandle:
    deadline_s, state = time.monotonic() + config.start_timeout_s, None
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise PoolUnavailable(f"the pool did not start: mpiexec ended with {process.returncode}.\n{tail(run_dir)}")
        if state is None and (run_dir / FILE).exists():
            state = read_state(run_dir / FILE)
        if state is not None and pool_status(run_dir, budget_s=deadline_s - time.monotonic()).whole:
            pids = [rank.pid for rank in state.ranks]
            return PoolHandle(run_dir, run_dir / FILE, process.pid, pids, prefix)
        time.sleep(_POLL_S)
    raise PoolUnavailable(
        f"the pool did not start in {config.start_timeout_s:g} s; {run_dir / LOG} ends with:\n{tail(run_dir)}"
    )


def _end(processes: list[tuple[int, int]], timeout_s: float) -> None:
    """SIGTERM, and SIGKILL for those that have not ended after `timeout_s`; bounded."""
    for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, timeout_s)):
        for pid, started in processes:
            if runs(pid, started):
                _signal(pid, number)
                _signal(pid, signal.SIGCONT)  # a stopped process does not hear SIGTERM
        until_s = time.monotonic() + wait_s
        while any(runs(pid, started) for pid, started in processes):
            if time.monotonic() >= until_s:
                break
            for child in list(_children.values()):
                child.poll()
            time.sleep(_POLL_S)
        else:
            return
    log.warning("processes outlived SIGKILL pids=%s", [pid for pid, _ in processes])


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
