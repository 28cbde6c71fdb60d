"""How fast blocks move, beside a yardstick for each path: memcpy, a plain loopback socket, a raw O_DIRECT reader.

Ours and the yardstick run in turns on the same machine, on distinct blocks out of more memory than the caches hold, so
a row's ratio means something even when its rates do not (another job on the machine slows both). Checksums are on:
they are part of a get. Ratios are of rates: above 1.00x we are the faster one.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.errors import Missing, Unavailable
from kvtool.measure import by_socket
from kvtool.measure.stats import Ratio, Summary, ratio, summarise
from kvtool.transfer.checksum import copy_checksum
from kvtool.transfer.files import BlockFile
from kvtool.transfer.segment import Segment

Run = Callable[[int, int], float]
"""(first block, count) -> seconds."""
KEY = bytes(32)
SETS = 4
"""The memory that blocks are taken from, in batches: successive runs use other blocks."""


@dataclass(frozen=True)
class Row:
    """`path` moved `blocks` at a time. Rates in GB/s (10**9 bytes)."""

    path: str
    yardstick: str
    blocks: int
    rate_ratio: Ratio
    ours_gb_s: Summary
    yardstick_gb_s: Summary

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path, "yardstick": self.yardstick, "blocks": self.blocks,
            "rate_ratio": self.rate_ratio.to_json(), "ours_gb_s": self.ours_gb_s.to_json(),
            "yardstick_gb_s": self.yardstick_gb_s.to_json(),
        }  # fmt: skip


def measure(
    block_size: int, batches: Sequence[int], runs: int, directory: Path | None, say: Callable[[str], None]
) -> list[Row]:
    """Every path, in turns with its yardstick. `directory`: where the block file is made (default: the temporary one).

    A path whose component is missing is left out, and said. A few seconds and some 10 batches of memory.
    """
    rows: list[Row] = []
    blocks = max(batches)
    for path in (_shm_get, _shm_put, _tcp_get, _tcp_put, _unix_get, _unix_put, _ucx, _ucx_tcp, _file_read, _file_write):
        try:
            with path(block_size, blocks, directory) as (name, yardstick, ours, theirs):
                say(f"{name} beside {yardstick}")
                rows += [_in_turns(name, yardstick, ours, theirs, count, block_size, blocks, runs) for count in batches]
        except Missing as error:
            say(f"left out: {error}")
    return rows


def _in_turns(
    name: str, yardstick: str, ours: Run, theirs: Run, count: int, block_size: int, blocks: int, runs: int
) -> Row:
    ours(0, count), theirs(0, count)  # first contacts and faults are not what is measured
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs):
        first = turn * count % (SETS * blocks - count + 1)
        for run, into in zip((ours, theirs), rates, strict=True):
            into.append(count * block_size / run(first, count) / 1e9)
    return Row(name, yardstick, count, ratio(*rates), summarise(rates[0]), summarise(rates[1]))


Path4 = tuple[str, str, Run, Run]


def _fresh(size: int) -> memoryview:
    """Page-aligned memory with random bytes, all of it faulted in."""
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = np.random.default_rng(1).bytes(size)
    return memory


def _timed(move: Callable[[int], object], first: int, count: int) -> float:
    began_s = time.perf_counter()
    for n in range(first, first + count):
        move(n)
    return time.perf_counter() - began_s


@contextmanager
def _shm(block_size: int, blocks: int) -> Iterator[tuple[Segment, memoryview]]:
    with Segment.create(f"kvtool-bench-{os.getpid()}-{time.time_ns()}", SETS * blocks * block_size) as segment:
        segment.unlink()
        yield segment, _fresh(SETS * blocks * block_size)


@contextmanager
def _shm_get(block_size: int, blocks: int, _: Path | None) -> Iterator[Path4]:
    with _shm(block_size, blocks) as (segment, private):
        segment.view[:] = private
        out, shared = _fresh(blocks * block_size), segment.view
        out_array, private_array = np.frombuffer(out, np.uint8), np.frombuffer(private, np.uint8)

        def get(n: int) -> None:
            to, at = n % blocks * block_size, n * block_size
            copy_checksum(out[to : to + block_size], shared[at : at + block_size], KEY)

        def memcpy(n: int) -> None:
            to, at = n % blocks * block_size, n * block_size
            np.copyto(out_array[to : to + block_size], private_array[at : at + block_size])

        yield "shm get", "memcpy", *_runs(get, memcpy)


@contextmanager
def _shm_put(block_size: int, blocks: int, _: Path | None) -> Iterator[Path4]:
    with _shm(block_size, blocks) as (segment, private):
        source, shared = _fresh(blocks * block_size), segment.view
        source_array, private_array = np.frombuffer(source, np.uint8), np.frombuffer(private, np.uint8)

        def put(n: int) -> None:
            at, to = n % blocks * block_size, n * block_size
            copy_checksum(shared[to : to + block_size], source[at : at + block_size], KEY)

        def memcpy(n: int) -> None:
            at, to = n % blocks * block_size, n * block_size
            np.copyto(private_array[to : to + block_size], source_array[at : at + block_size])

        yield "shm put", "memcpy", *_runs(put, memcpy)


def _runs(ours: Callable[[int], object], theirs: Callable[[int], object]) -> tuple[Run, Run]:
    return lambda first, count: _timed(ours, first, count), lambda first, count: _timed(theirs, first, count)


class _Peer:
    """A process of `transfer_peer`; `hello` is its first line."""

    def __init__(self, *arguments: str, transports: str | None = None) -> None:
        environment = {**os.environ, **({"UCX_TLS": transports} if transports else {})}
        self._role = arguments[0]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtool.measure.transfer_peer", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment,
        )  # fmt: skip
        self.hello = self.answer()

    def answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise Unavailable(f"the benchmark's {self._role} ended early; what it said is above")
        return line

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        return self.answer()

    def close(self) -> None:
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate(timeout=10)


@contextmanager
def _ucx(block_size: int, blocks: int, _: Path | None, transports: str | None = None) -> Iterator[Path4]:
    from kvtool.transfer import nixl

    nixl.load()  # Missing is said here, with its sentence
    with ExitStack() as stack:

        def start(*arguments: str) -> _Peer:
            peer = _Peer(*arguments, transports=transports)
            stack.callback(peer.close)
            return peer

        size = SETS * blocks * block_size
        owner = start("owner", str(size))
        reader = start("reader", owner.hello, str(block_size), str(blocks))
        link = socket.create_connection(("127.0.0.1", int(start("sender", str(size)).hello)), timeout=60)
        stack.callback(link.close)
        out = _fresh(blocks * block_size)

        def by_socket(first: int, count: int) -> float:
            began_s, length, got = time.perf_counter(), count * block_size, 0
            link.sendall((first * block_size).to_bytes(8, "little") + length.to_bytes(8, "little"))
            while got < length:
                got += link.recv_into(out[got:length])
            return time.perf_counter() - began_s

        name = "UCX read" if transports is None else f"UCX read, {transports}"
        yield name, "loopback socket", lambda first, count: float(reader.ask(f"{first} {count}")), by_socket


def _ucx_tcp(block_size: int, blocks: int, directory: Path | None) -> Any:
    return _ucx(block_size, blocks, directory, "tcp,self")


@contextmanager
def _by_socket(block_size: int, blocks: int, far: bool, putting: bool) -> Iterator[Path4]:
    with ExitStack() as stack:

        def start(*arguments: str) -> _Peer:
            peer = _Peer(*arguments)
            stack.callback(peer.close)
            return peer

        source = _fresh(SETS * blocks * block_size)
        ours, theirs = stack.enter_context(by_socket.sides(start, source, block_size, blocks, SETS, far))
        name = f"{'TCP' if far else 'Unix socket'} {'put' if putting else 'get'}"
        if putting:
            yield name, "loopback socket", ours.put, theirs.put
        else:
            yield name, "loopback socket", ours.get, theirs.get


def _tcp_get(block_size: int, blocks: int, _: Path | None) -> Any:
    return _by_socket(block_size, blocks, far=True, putting=False)


def _tcp_put(block_size: int, blocks: int, _: Path | None) -> Any:
    return _by_socket(block_size, blocks, far=True, putting=True)


def _unix_get(block_size: int, blocks: int, _: Path | None) -> Any:
    return _by_socket(block_size, blocks, far=False, putting=False)


def _unix_put(block_size: int, blocks: int, _: Path | None) -> Any:
    return _by_socket(block_size, blocks, far=False, putting=True)


@contextmanager
def _file(block_size: int, blocks: int, directory: Path | None) -> Iterator[tuple[BlockFile, int, int]]:
    """A block file that is full, and a raw one: (ours, descriptor of the raw one, distance of its blocks)."""
    step = -(-block_size // 4096) * 4096
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtool-bench-", dir=directory))
        file = stack.enter_context(BlockFile(Path(folder) / "blocks", block_size, SETS * blocks))
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if file.how == "direct" else 0)
        raw = os.open(Path(folder) / "raw", flags, 0o600)
        stack.callback(os.close, raw)
        os.posix_fallocate(raw, 0, SETS * blocks * step)
        data = _fresh(step)
        for n in range(SETS * blocks):
            file.write(n, data[:block_size], KEY).result(60)
            os.pwritev(raw, [data], n * step)
        yield file, raw, step


@contextmanager
def _file_read(block_size: int, blocks: int, directory: Path | None) -> Iterator[Path4]:
    with _file(block_size, blocks, directory) as (file, raw, step), ThreadPoolExecutor(4) as threads:
        out = _fresh(blocks * step)

        def ours(first: int, count: int) -> float:
            return _all(file.read(first + n, out[n * step :][:block_size], KEY) for n in range(count))

        def theirs(first: int, count: int) -> float:
            pieces = [(out[n * step : (n + 1) * step], (first + n) * step) for n in range(count)]
            return _all(threads.submit(os.preadv, raw, [piece], at) for piece, at in pieces)

        yield f"file read, {file.how}", "preadv, 4 threads", ours, theirs


@contextmanager
def _file_write(block_size: int, blocks: int, directory: Path | None) -> Iterator[Path4]:
    with _file(block_size, blocks, directory) as (file, raw, step), ThreadPoolExecutor(4) as threads:
        source = _fresh(blocks * step)

        def ours(first: int, count: int) -> float:
            return _all(file.write(first + n, source[n * step :][:block_size], KEY) for n in range(count))

        def theirs(first: int, count: int) -> float:
            pieces = [(source[n * step : (n + 1) * step], (first + n) * step) for n in range(count)]
            return _all(threads.submit(os.pwritev, raw, [piece], at) for piece, at in pieces)

        yield f"file write, {file.how}", "pwritev, 4 threads", ours, theirs


def _all(futures: Iterator[Any]) -> float:
    """Start all, wait for all; seconds."""
    began_s = time.perf_counter()
    for future in list(futures):
        future.result(60)
    return time.perf_counter() - began_s
