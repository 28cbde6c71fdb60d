"""How fast a pool puts more than its memory holds, and reads it back from its file, beside raw O_DIRECT.

A pool of one rank, with memory for little more than a turn, and a file of its own. Each turn puts blocks that are new,
or, after a restart of the pool, reads some that it has not read before; and then a plain program writes or reads as
many on the same disk: four threads, `pwritev` and `preadv`, no checksums, no copies. Both run in turns, so a ratio
means something on a busy machine too. What was put and is not there any more is counted.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.measure.stats import Ratio, Summary, ratio, summarise
from kvtool.pool.base import Outcome, Put
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import start_pool, stop_pool
from kvtool.pool.state import FILE
from kvtool.transfer.filehead import PAGE, page_up

BUDGET_S = 60.0
RAW_THREADS = 4
STOP_S = 60.0
MEMORY_TURNS = 1.25
"""Memory of the pool, in turns: most of what is put in a turn has to leave in the same turn."""
FIRST_TURNS = 2
"""Turns that fill memory first, and are not counted."""


@dataclass(frozen=True)
class Row:
    """`what` of `blocks` blocks of `size` bytes in each turn. `lost`: accepted, and not there when they were read."""

    what: str
    size: int
    blocks: int
    rate_ratio: Ratio
    gb_s: Summary
    raw_gb_s: Summary
    lost: int

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what, "size": self.size, "blocks": self.blocks, "rate_ratio": self.rate_ratio.to_json(),
            "gb_s": self.gb_s.to_json(), "raw_gb_s": self.raw_gb_s.to_json(), "lost": self.lost,
        }  # fmt: skip


def measure(sizes: list[int], blocks: int, runs: int, directory: Path | None, say: Callable[[str], None]) -> list[Row]:
    """Rows for each size, written back and through."""
    rows: list[Row] = []
    for size in sizes:
        for write in ("back", "through"):
            say(f"blocks of {size} bytes, written {write}")
            with _Tier.made(size, blocks, runs + FIRST_TURNS, write, directory) as tier:
                rows += _rows(tier, size, blocks, write)
    return rows


def _rows(tier: _Tier, size: int, blocks: int, write: str) -> Iterator[Row]:
    for turn in range(FIRST_TURNS):
        tier.put(turn)
        tier.raw(os.pwritev, turn)
    counted = range(FIRST_TURNS, tier.turns)
    puts = [(tier.put(turn), tier.raw(os.pwritev, turn)) for turn in counted]
    yield _row(f"put, {write}", size, blocks, puts, 0)
    if write == "back":
        tier.restart()
        gets = [(tier.get(turn), tier.raw(os.preadv, turn)) for turn in range(tier.turns)][FIRST_TURNS:]
        yield _row("cold get", size, blocks, gets, tier.lost)


def _row(what: str, size: int, blocks: int, turns: list[tuple[float, float]], lost: int) -> Row:
    ours, raw = [one for one, _ in turns], [other for _, other in turns]
    gb = size * blocks / 1e9
    return Row(
        what,
        size,
        blocks,
        ratio(raw, ours),
        summarise([gb / seconds for seconds in ours]),
        summarise([gb / seconds for seconds in raw]),
        lost,
    )


class _Tier:
    """A pool with a file, a raw file beside it, and the bytes that go into both."""

    def __init__(self, config: PoolConfig, folder: Path, raw: int, blocks: int, turns: int) -> None:
        self._config, self._folder = config, folder
        self._raw, self._size, self._blocks, self.turns = raw, config.layout.block_size, blocks, turns
        self._client = PoolClient(folder / FILE, config.layout, client_name="bench")
        self._step = page_up(self._size)
        self._data = memoryview(mmap(-1, blocks * self._step))
        np.frombuffer(self._data, np.uint8)[:] = np.random.default_rng(1).integers(
            0, 256, blocks * self._step, np.uint8
        )
        self._into = memoryview(mmap(-1, blocks * self._step))
        self._threads = ThreadPoolExecutor(RAW_THREADS)
        self._keys = [[secrets.token_bytes(32) for _ in range(blocks)] for _ in range(turns)]
        self._put: set[BlockKey] = set()
        self.lost = 0

    @staticmethod
    @contextmanager
    def made(size: int, blocks: int, turns: int, write: str, directory: Path | None) -> Iterator[_Tier]:
        layout = KVLayout(layers=1, kv_heads=1, head_dim=size // 2, block_tokens=1, dtype="int8")
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtool-bench-", dir=directory)))
            memory, file = int(MEMORY_TURNS * blocks), (turns + 1) * blocks + 2
            config = PoolConfig(
                layout,
                ranks=1,
                dram_size=memory * (page_up(size) + 512) + 2**20,
                file_size=file * (PAGE + page_up(size)),
                write=write,
                flush_s=STOP_S / 2,
                ucx=False,
                scrub_rate=0,
                heal=False,
            )
            start_pool(config, folder)
            stack.callback(stop_pool, folder, purge=True)
            raw = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            stack.callback(os.close, raw)
            os.posix_fallocate(raw, 0, turns * blocks * page_up(size))
            tier = _Tier(config, folder, raw, blocks, turns)
            stack.callback(tier.close)
            yield tier

    def restart(self) -> None:
        """What memory held is in the file now, and only there."""
        self._client.close()
        stop_pool(self._folder, STOP_S)
        start_pool(self._config, self._folder)
        self._client = PoolClient(self._folder / FILE, self._config.layout, client_name="bench")

    def close(self) -> None:
        self._client.close()
        self._threads.shutdown()

    def put(self, turn: int) -> float:
        keys, size = self._keys[turn], self._size
        puts = [Put(key, size, self._filling(at)) for at, key in enumerate(keys)]
        began_s = time.perf_counter()
        results = self._client.write(puts, BUDGET_S)
        took_s = time.perf_counter() - began_s
        self._put.update(key for key, result in zip(keys, results, strict=True) if result.outcome is Outcome.STORED)
        return took_s

    def _filling(self, at: int) -> Callable[[memoryview], None]:
        source = np.frombuffer(self._data, np.uint8)[at * self._step :][: self._size]

        def fill(room: memoryview) -> None:
            np.copyto(np.frombuffer(room, np.uint8), source)

        return fill

    def get(self, turn: int) -> float:
        keys = self._keys[turn]
        began_s = time.perf_counter()
        with self._client.read(keys, BUDGET_S) as read:
            found = len(read.blocks)
        took_s = time.perf_counter() - began_s
        self.lost += sum(key in self._put for key in keys[found:])
        return took_s

    def raw(self, call: Callable[[int, list[memoryview], int], int], turn: int) -> float:
        first, step = turn * self._blocks, self._step
        views = self._data if call is os.pwritev else self._into
        began_s = time.perf_counter()
        running = [
            self._threads.submit(call, self._raw, [views[at * step :][:step]], (first + at) * step)
            for at in range(self._blocks)
        ]
        for future in running:
            future.result(BUDGET_S)
        return time.perf_counter() - began_s
