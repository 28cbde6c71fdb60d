"""How fast a running pool puts, gets and matches, beside memcpy of the same blocks.

Both run in turns on distinct blocks, so a ratio means something on a busy machine too. A put copies a block in and
hashes it, a get copies it out and hashes it, a view hashes it in place; memcpy does half of that at best. Every block
that was put is deleted again, whatever happens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtool.errors import PoolUnavailable
from kvtool.kv.block import BlockKey
from kvtool.measure.stats import Ratio, Summary, ratio, summarise
from kvtool.pool.base import Outcome, Put
from kvtool.pool.client import PoolClient

MATCH_KEYS, MATCH_BLOCKS = 256, 64
"""So many keys are asked for, of so many blocks, each several times."""
BUDGET_S = 30.0


@dataclass(frozen=True)
class Row:
    """`what` of `blocks` blocks of `size` bytes at once. Rates in GB/s (10**9 bytes); `rate_ratio` above 1: faster than
    memcpy."""

    what: str
    size: int
    blocks: int
    rate_ratio: Ratio
    gb_s: Summary
    memcpy_gb_s: Summary

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what, "size": self.size, "blocks": self.blocks, "rate_ratio": self.rate_ratio.to_json(),
            "gb_s": self.gb_s.to_json(), "memcpy_gb_s": self.memcpy_gb_s.to_json(),
        }  # fmt: skip


@dataclass(frozen=True)
class Measured:
    rows: list[Row]
    match_us: Summary
    """Microseconds to ask how many of `MATCH_KEYS` keys are there; all of them are."""
    by: dict[str, int]
    """Blocks that were read, by tier and path."""


class _Blocks:
    """Blocks of one size: their bytes, room for copies, and keys that are new for every turn."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        rng = np.random.default_rng(1)
        self.sources = [rng.integers(0, 256, size, np.uint8) for _ in range(count)]
        self.rooms = [np.zeros(size, np.uint8) for _ in range(count)]

    def memcpy(self, count: int) -> None:
        for room, source in zip(self.rooms[:count], self.sources, strict=False):
            np.copyto(room, source)

    def puts(self, keys: Sequence[BlockKey]) -> list[Put]:
        return [Put(key, self.size, None, data=source.data) for key, source in zip(keys, self.sources, strict=False)]


def measure(
    pool: PoolClient, sizes: Sequence[int], batches: Sequence[int], runs: int, say: Callable[[str], None]
) -> Measured:
    """
    Raises:
        PoolUnavailable: a block was not taken, or not found again; the sentence has the reason.
    """
    rows: list[Row] = []
    for size in sizes:
        blocks = _Blocks(size, max(batches))
        for count in batches:
            say(f"{count} blocks of {size} bytes")
            rows += _turns(pool, blocks, count, runs)
    return Measured(rows, _match(pool, min(sizes), runs), pool.counts().blocks_read)


def _turns(pool: PoolClient, blocks: _Blocks, count: int, runs: int) -> list[Row]:
    rates: dict[str, list[float]] = {"put": [], "get": [], "view": []}
    beside: dict[str, list[float]] = {what: [] for what in rates}
    for turn in range(runs + 1):
        keys = [secrets.token_bytes(32) for _ in range(count)]
        puts = blocks.puts(keys)
        jobs: dict[str, Callable[[], None]] = {
            "put": lambda puts=puts: _put(pool, puts),  # type: ignore[misc]
            "get": lambda keys=keys: _get(pool, keys, blocks),  # type: ignore[misc]
            "view": lambda keys=keys: _view(pool, keys),  # type: ignore[misc]
        }
        try:
            for what, job in jobs.items():
                memcpy_s, ours_s = _timed(lambda: blocks.memcpy(count)), _timed(job)
                if turn:  # the first one meets connections and pages that nobody had touched
                    rates[what].append(count * blocks.size / ours_s / 1e9)
                    beside[what].append(count * blocks.size / memcpy_s / 1e9)
        finally:
            pool.delete(keys)
    return [
        Row(what, blocks.size, count, ratio(ours, beside[what]), summarise(ours), summarise(beside[what]))
        for what, ours in rates.items()
    ]


def _match(pool: PoolClient, size: int, runs: int) -> Summary:
    blocks = [secrets.token_bytes(32) for _ in range(MATCH_BLOCKS)]
    keys = (blocks * (MATCH_KEYS // MATCH_BLOCKS))[:MATCH_KEYS]
    data = memoryview(bytearray(min(size, 4096)))
    try:
        _put(pool, [Put(key, len(data), None, data=data) for key in blocks])
        seconds = []
        for _ in range(20 * runs):
            began_s = time.perf_counter()
            found = pool.match(keys, BUDGET_S)
            seconds.append(time.perf_counter() - began_s)
            if found != len(keys):
                raise PoolUnavailable(f"matched {found} of {len(keys)} keys that had just been put; is the pool full?")
        return summarise([1e6 * each for each in seconds])
    finally:
        pool.delete(blocks)


def _put(pool: PoolClient, puts: Sequence[Put]) -> None:
    for result in pool.write(puts, BUDGET_S):
        if result.outcome is not Outcome.STORED:
            raise PoolUnavailable(f"a block was {result.outcome.value}: {result.reason or 'no reason given'}")


def _get(pool: PoolClient, keys: Sequence[BlockKey], blocks: _Blocks) -> None:
    got = pool.get_into(keys, blocks.rooms[: len(keys)], BUDGET_S)
    if got.count != len(keys):
        reason = got.blocks[got.count].reason
        raise PoolUnavailable(f"found {got.count} of {len(keys)} blocks that had just been put: {reason}")


def _view(pool: PoolClient, keys: Sequence[BlockKey]) -> None:
    with pool.read(keys, BUDGET_S) as read:
        if len(read.blocks) != len(keys):
            raise PoolUnavailable(f"read {len(read.blocks)} of {len(keys)} blocks that had just been put")


def _timed(job: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    job()
    return time.perf_counter() - began_s
