"""Blocks by socket beside a plain loopback socket: the whole way, through a client, and a rank in another process.

The plain socket's peer does what a rank must at least do: answer a request with bytes, or take bytes and say so. Ours
looks up, leases, checks and releases, or reserves, checks and commits, besides.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import numpy as np

from kvtool.errors import Unavailable
from kvtool.kv.layout import KVLayout
from kvtool.kv.store import Store
from kvtool.pool.base import Put
from kvtool.pool.client import PoolClient
from kvtool.pool.loop import Loop
from kvtool.pool.memory import SlotMemory
from kvtool.pool.service import Service
from kvtool.pool.state import PoolState, RankState, read_state, write_state
from kvtool.pool.tiers import Tiers
from kvtool.transfer.segment import Segment

KEY = bytes(32)
BUDGET_S = 60.0
_PAGE = 4096


def layout_of(block_size: int) -> KVLayout:
    """One whose blocks have `block_size` bytes, rounded up to a page."""
    return KVLayout(layers=-(-block_size // _PAGE), kv_heads=1, head_dim=32, block_tokens=32)


def rank(directory: Path, block_size: int, slots: int) -> None:
    """A rank without MPI and files, until stdin closes: production's loop, service, rules and memory."""
    layout = layout_of(block_size)
    size = SlotMemory.size(slots, layout.block_size)
    with Segment.create(f"kvtool-bench-{os.getpid()}-{time.time_ns()}", size) as segment:
        segment.unlink()
        memory = SlotMemory(segment.view, slots, layout.block_size)
        tiers = Tiers(Store(slots, layout.block_size, 0, BUDGET_S, BUDGET_S), memory, None, lambda event: None)
        loop = Loop(
            lambda: 1,
            lambda connection: service.opened(connection),
            lambda connection, message: service.message(connection, message),
            lambda connection: service.closed(connection),
            lambda now_s: (service.tick(now_s) or now_s + 1) - now_s,
        )
        me = {"rank": 0, "identity": "bench/0"}
        service = Service(tiers, KEY, layout.fingerprint, str(layout), lambda: me, dict, loop.post)
        loop.listen_unix(directory / "rank.sock")
        tcp = loop.listen_tcp("127.0.0.1")
        unix = str(directory / "rank.sock")
        mine = RankState(0, "bench/0", socket.gethostname(), unix, tcp, "none", 0, slots, 0, os.getpid(), 0)
        state = PoolState(1, KEY.hex(), "bench", asdict(layout), layout.block_size, BUDGET_S, [mine])
        write_state(directory / "near.json", state)
        write_state(directory / "far.json", replace(state, ranks=[replace(mine, host="elsewhere")]))
        print("up", flush=True)
        _until_stdin_closes(loop)
        loop.run()


def _until_stdin_closes(loop: Loop) -> None:
    def watch() -> None:
        sys.stdin.read()
        loop.running = False
        loop.post(lambda: None)

    threading.Thread(target=watch, daemon=True).start()


def plain(block_size: int, blocks: int) -> None:
    """The yardstick's peer: to 17 bytes (b"g" or b"p", offset, length) it sends those bytes of its memory, or takes
    as many and answers with one byte."""
    memory = memoryview(bytearray(np.random.default_rng(0).bytes(block_size * blocks)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        link, _ = server.accept()
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(wanted := link.recv(17, socket.MSG_WAITALL)) == 17:
            at, length = int.from_bytes(wanted[1:9], "little"), int.from_bytes(wanted[9:], "little")
            if wanted[:1] == b"g":
                link.sendall(memory[at : at + length])
            else:
                _take(link, memory[at : at + length])
                link.sendall(b".")


def _take(link: socket.socket, room: memoryview) -> None:
    got = 0
    while got < len(room):
        count = link.recv_into(room[got:])
        if not count:
            raise Unavailable("the benchmark's peer ended early")
        got += count


class Peer(Protocol):
    """A process of `transfer_peer`; `hello` is its first line."""

    hello: str


class Ours:
    """A client of a rank in another process. Blocks that are read have the keys of the first `blocks` puts."""

    def __init__(self, state_file: Path, source: memoryview, block_size: int, blocks: int) -> None:
        state = read_state(state_file)
        self._client = PoolClient(state_file, state.kv_layout, path="socket", client_name="bench")
        self._source, self._size, self._blocks = source, block_size, blocks
        self._out = [bytearray(block_size) for _ in range(blocks)]
        self._puts = 0

    def _key(self, n: int) -> bytes:
        return n.to_bytes(8, "little") * 4

    def put(self, first: int, count: int) -> float:
        """New keys every time."""
        self._puts += count
        keys = [self._key(10**6 + self._puts + n) for n in range(count)]
        return self._put(keys, first)

    def _put(self, keys: Sequence[bytes], first: int) -> float:
        puts = []
        for n, key in enumerate(keys, first):
            at = n * self._size
            puts.append(Put(key, self._size, None, data=self._source[at : at + self._size]))
        began_s = time.perf_counter()
        results = self._client.write(puts, budget_s=BUDGET_S)
        took_s = time.perf_counter() - began_s
        if any(result.reason for result in results):
            raise Unavailable(f"the benchmark's puts failed: {results[0].reason}")
        return took_s

    def load(self, blocks: int) -> None:
        self._put([self._key(n) for n in range(blocks)], 0)

    def get(self, first: int, count: int) -> float:
        keys, out = [self._key(first + n) for n in range(count)], self._out[:count]
        began_s = time.perf_counter()
        result = self._client.get_into(keys, out, budget_s=BUDGET_S)
        took_s = time.perf_counter() - began_s
        if result.count < count:
            raise Unavailable(f"the benchmark's rank gave {result.count} of {count} blocks")
        return took_s

    def close(self) -> None:
        self._client.close()


class Theirs:
    """The plain socket."""

    def __init__(self, port: int, source: memoryview, block_size: int, blocks: int) -> None:
        self._link = socket.create_connection(("127.0.0.1", port), timeout=BUDGET_S)
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._source, self._size = source, block_size
        self._out = memoryview(bytearray(blocks * block_size))

    def _ask(self, what: bytes, first: int, count: int) -> None:
        at, length = first * self._size, count * self._size
        self._link.sendall(what + at.to_bytes(8, "little") + length.to_bytes(8, "little"))

    def get(self, first: int, count: int) -> float:
        began_s = time.perf_counter()
        self._ask(b"g", first, count)
        _take(self._link, self._out[: count * self._size])
        return time.perf_counter() - began_s

    def put(self, first: int, count: int) -> float:
        began_s, at = time.perf_counter(), first * self._size
        self._ask(b"p", first, count)
        self._link.sendall(self._source[at : at + count * self._size])
        _take(self._link, memoryview(bytearray(1)))
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._link.close()


@contextmanager
def sides(
    start: Callable[..., Peer], source: memoryview, block_size: int, blocks: int, sets: int, far: bool
) -> Iterator[tuple[Ours, Theirs]]:
    """Both, ready: ours with `sets * blocks` blocks in its rank. `start` makes a peer process, which ends later."""
    with TemporaryDirectory(prefix="kvtool-bench-") as folder:
        start("rank", folder, str(block_size), str((sets + 2) * blocks))
        port = int(start("plain", str(block_size), str(sets * blocks)).hello)
        ours = Ours(Path(folder) / ("far.json" if far else "near.json"), source, block_size, blocks)
        theirs = Theirs(port, source, block_size, blocks)
        try:
            ours.load(sets * blocks)
            yield ours, theirs
        finally:
            ours.close()
            theirs.close()
