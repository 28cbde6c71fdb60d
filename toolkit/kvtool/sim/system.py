"""What stands in for the machine: a table from doors of the standard library to their simulated ones.

`installed()` puts them into the modules of `kvtool.pool` and `kvtool.transfer` under the names by which those know the
real ones, and takes them out again. Nothing else of production code is touched. A door that is not in the table raises
when it is used, as what nobody simulates would make a run depend on more than its seed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import mmap
import os
import pkgutil
import queue
import secrets
import select
import selectors
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import kvtool.clock
import kvtool.pool
import kvtool.transfer
from kvtool.errors import Refused
from kvtool.pool import access, membership, mover, outside, process, rank, state
from kvtool.sim.disk import SimDisk
from kvtool.sim.memory import Segment
from kvtool.sim.net import Socket
from kvtool.sim.onesided import PROGRESS_S, Nixl
from kvtool.sim.poll import EventFd, Poll, Selector
from kvtool.sim.sync import Executor, SimpleQueue, Threads, VirtualFuture, wait_all
from kvtool.sim.world import here
from kvtool.transfer import disk, nixl, peer, segment

EVENTFD_FIRST = 1_000_000
BOOT_S = 1.7e9
STAGING_SIZE = 2**18
LEFT_OUT = ("launch", "rundir", "nixl", "keeper", "keeping", "mpiwatch", "process")
"""Modules for those who start pools, and NIXL's door, whose stand-in is `onesided`."""


class _Door:
    """A stand-in module. What it lacks is taken from `_real` only if it is a constant."""

    _real: ModuleType

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self)._real, name)
        if isinstance(found, int | str | float | type):
            return found
        raise AttributeError(f"{type(self)._real.__name__}.{name} is not simulated")


class Time(_Door):
    _real = time

    def monotonic(self) -> float:
        return here().look_at_clock()

    perf_counter = monotonic

    def time(self) -> float:
        return BOOT_S + here().sched.now_s

    def process_time(self) -> float:
        return here().sched.now_s / 100

    def monotonic_ns(self) -> int:
        return int(self.monotonic() * 1e9)

    def sleep(self, seconds: float) -> None:
        here().sched.call()
        here().sched.sleep(seconds)


class SocketModule(_Door):
    _real = socket
    socket = Socket
    timeout = TimeoutError

    def create_server(self, address: tuple[str, int], *, family: int = 2, **_: Any) -> Socket:
        sock = Socket(family)
        sock.bind(address)
        sock.listen()
        return sock

    def gethostname(self) -> str:
        return here().process.host


class Select(_Door):
    _real = select

    def poll(self) -> Poll:
        return Poll(lambda: here().sched)


class Selectors(_Door):
    _real = selectors

    def DefaultSelector(self) -> Selector:
        return Selector(lambda: here().sched, here().counters)


class Os(_Door):
    """Files stay real, but for block files, which have a seam of their own."""

    _real = os

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def eventfd(self, *_: Any) -> int:
        world = here()
        number = EVENTFD_FIRST + len(world.counters)
        world.counters[number] = EventFd()
        return number

    def eventfd_write(self, number: int, value: int) -> None:
        here().counters[number].value += value
        here().counters[number].changed()

    def eventfd_read(self, number: int) -> int:
        value, here().counters[number].value = here().counters[number].value, 0
        if not value:
            raise BlockingIOError
        return value

    def getpid(self) -> int:
        return here().process.pid

    def urandom(self, size: int) -> bytes:
        return here().rng.randbytes(size)

    def close(self, number: int) -> None:
        if number < EVENTFD_FIRST:
            os.close(number)


class Signal(_Door):
    _real = signal

    def signal(self, number: int, handler: Any) -> None:
        here().handlers[here().process.pid, int(number)] = handler


class Secrets(_Door):
    _real = secrets

    def token_bytes(self, size: int = 32) -> bytes:
        return here().rng.randbytes(size)

    def token_hex(self, size: int = 32) -> str:
        return here().rng.randbytes(size).hex()


class Mmap(_Door):
    """Memory that a transfer may still write to stays mapped until the run is over."""

    _real = mmap

    def mmap(self, *arguments: Any, **settings: Any) -> mmap.mmap:
        memory = mmap.mmap(*arguments, **settings)
        here().kept.append(memory)
        return memory


class Uuid(_Door):
    _real = uuid

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(bytes=here().rng.randbytes(16), version=4)


class _Executor(Executor):
    def __init__(self, max_workers: int = 4, thread_name_prefix: str = "worker") -> None:
        super().__init__(lambda: here().sched, max_workers, thread_name_prefix)


def _wait(futures: Any, timeout: float | None = None, **_: Any) -> tuple[Any, Any]:
    return wait_all(lambda: here().sched, list(futures), timeout)


def _runs(pid: int, started: int) -> bool:
    return here().runs(pid)


def _only_one(path: Path, rank: int) -> int:
    holder = here().locks.get(str(path))
    if holder is not None and not holder.dead:
        raise Refused(f"rank {rank} runs already: another process holds {path}")
    here().locks[str(path)] = here().process
    return EVENTFD_FIRST


def _unlink_prefix(prefix: str) -> list[str]:
    names = Segment.names()
    found = sorted(name for name in names if name.startswith(prefix))
    for name in found:
        del names[name]
    return found


def _wants_ucx(rank: state.RankState, path: str) -> bool:
    if path == "auto":
        return not (rank.host == here().process.host and rank.segment in Segment.names())
    return path == "ucx"


class _Queue(_Door):
    _real = queue
    LifoQueue = queue.LifoQueue  # asked without waiting only

    def SimpleQueue(self) -> SimpleQueue:
        return SimpleQueue(lambda: here().sched)


def _threads() -> Threads:
    return Threads(lambda: here().sched)


_SLOWER: tuple[tuple[Any, str, Any], ...] = (
    (outside.Outside, "staging_size", STAGING_SIZE),
    (mover.Toward, "staging_size", STAGING_SIZE),
    (peer, "_WAIT_S", (20e-6, 2e-3)),
    (rank, "UCX_PROGRESS_S", PROGRESS_S / 2),
    (rank, "TICK_S", 1.0),
    (membership, "MPI_POLL_S", 1.0),
)
"""What is smaller, or looked at less often than in production: that costs virtual time, and the other real time."""


def _table() -> dict[int, Any]:
    threads = _threads()
    real_write = state.write_state
    pairs: list[tuple[Any, Any]] = [
        (time, Time()),
        (time.monotonic, Time().monotonic),
        (time.sleep, Time().sleep),
        (time.time, Time().time),
        (socket, SocketModule()),
        (select, Select()),
        (selectors, Selectors()),
        (threading, threads),
        (threading.Lock, threads.Lock),
        (threading.RLock, threads.RLock),
        (threading.Condition, threads.Condition),
        (threading.Event, threads.Event),
        (threading.Thread, threads.Thread),
        (os, Os()),
        (signal, Signal()),
        (secrets, Secrets()),
        (uuid, Uuid()),
        (mmap, Mmap()),
        (nixl, Nixl(here)),
        (concurrent.futures.ThreadPoolExecutor, _Executor),
        (concurrent.futures.wait, _wait),
        (segment.Segment, Segment),
        (segment.unlink_prefix, _unlink_prefix),
        (process.runs, _runs),
        (process.started_at, lambda pid: pid),
        (state.write_state, lambda path, found: here().publish(path, found, real_write)),
        (rank._only_one, _only_one),
        (disk.FileDisk, SimDisk),
        (concurrent.futures.Future, VirtualFuture),
        (queue.SimpleQueue, lambda: SimpleQueue(lambda: here().sched)),
        (queue, _Queue()),
    ]
    return {id(real): stand_in for real, stand_in in pairs}


def modules() -> list[ModuleType]:
    """The production modules that run in a simulation."""
    found: list[ModuleType] = [kvtool.clock]
    for package in (kvtool.pool, kvtool.transfer):
        for info in pkgutil.iter_modules(package.__path__):
            if info.name not in LEFT_OUT:
                found.append(importlib.import_module(f"{package.__name__}.{info.name}"))
    return found


def _functions(module: ModuleType, value: Any) -> Iterator[FunctionType]:
    """`value`, or what it is made of, if it is `module`'s own."""
    if isinstance(value, FunctionType) and value.__module__ == module.__name__:
        yield value
    elif isinstance(value, type) and value.__module__ == module.__name__:
        for member in vars(value).values():
            found = getattr(member, "__func__", member)
            if isinstance(found, FunctionType):
                yield found


def _put_defaults(function: FunctionType, table: dict[int, Any], undo: list[tuple[Any, str, Any]]) -> None:
    """Stand-ins where the real door is an argument's default."""
    defaults, named = function.__defaults__, function.__kwdefaults__
    if defaults and any(id(default) in table for default in defaults):
        undo.append((function, "__defaults__", defaults))
        function.__defaults__ = tuple(table.get(id(default), default) for default in defaults)
    if named and any(id(default) in table for default in named.values()):
        undo.append((function, "__kwdefaults__", named))
        function.__kwdefaults__ = {name: table.get(id(default), default) for name, default in named.items()}


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Stand-ins everywhere, for as many runs as one likes. Not for a process that does anything else meanwhile."""
    table = _table()
    Socket.here = staticmethod(lambda: (here().net, here().process))
    Segment.names = staticmethod(lambda: here().segments.setdefault(here().process.host, {}))
    Segment.keep = staticmethod(lambda memory: here().kept.append(memory))
    undo: list[tuple[Any, str, Any]] = []
    for module in modules():
        for name, value in list(vars(module).items()):
            if id(value) in table and not name.startswith("__"):
                undo.append((module, name, value))
                setattr(module, name, table[id(value)])
            for function in _functions(module, value):
                _put_defaults(function, table, undo)
    SimDisk.here, VirtualFuture.here = staticmethod(here), staticmethod(lambda: here().sched)
    undo.append((access.Access, "wants_ucx", vars(access.Access)["wants_ucx"]))
    setattr(access.Access, "wants_ucx", staticmethod(_wants_ucx))  # noqa: B010
    for holder, name, value in _SLOWER:
        undo.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)
    try:
        yield
    finally:
        for holder, name, value in reversed(undo):
            setattr(holder, name, value)
