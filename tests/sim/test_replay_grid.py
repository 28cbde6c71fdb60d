"""Hit ratios, exactly: against the published grid of the released traces, and against brute force on our own sample.

The released traces are not part of the repository; KVTOOL_TRACES names the folder that holds them and the grid.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtool.kv.policy import make
from kvtool.kv.policy.mini import MiniCache
from kvtool.sim.replay import replay
from kvtool.sim.trace import read_trace

SAMPLE = Path(__file__).with_name("sample_trace.jsonl")
TRACES = Path(os.environ.get("KVTOOL_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
GRID = TRACES / "hit_ratio_grid.tsv"
EXACT = ("FIFO", "LRU", "S3-FIFO")


class ListFifo:
    """A list, oldest first; the twin in the most obvious form."""

    def __init__(self, size: int) -> None:
        self.size, self.line = size, []

    def __contains__(self, key: int) -> bool:
        return key in self.line

    def access(self, key: int) -> None:
        if key in self.line:
            self.again(key)
            return
        if len(self.line) >= self.size:
            self.line.pop(0)
        self.line.append(key)

    def again(self, key: int) -> None:
        pass


class ListLru(ListFifo):
    def again(self, key: int) -> None:
        self.line.remove(key)
        self.line.append(key)


class ListS3Fifo:
    """S3-FIFO by lists of [key, uses], with its sizes as the paper states them."""

    def __init__(self, size: int) -> None:
        self.size, self.small_max = size, max(1, size // 10)
        self.small, self.main, self.ghosts = [], [], []

    def __contains__(self, key: int) -> bool:
        return any(known == key for known, _ in self.small + self.main)

    def access(self, key: int) -> None:
        for block in self.small + self.main:
            if block[0] == key:
                block[1] = min(block[1] + 1, 3)
                return
        while len(self.small) + len(self.main) >= self.size:
            self.make_room()
        if key in self.ghosts:
            self.ghosts.remove(key)
            self.main.append([key, 0])
        else:
            self.small.append([key, 0])

    def make_room(self) -> None:
        if len(self.small) < self.small_max:
            self.from_main()
            return
        key, uses = self.small.pop(0)
        if uses > 1:
            self.main.append([key, uses])
            return
        self.ghosts = [*self.ghosts, key][-(self.size - self.small_max) or len(self.ghosts) + 1 :]

    def from_main(self) -> None:
        while self.main[0][1]:
            key, uses = self.main.pop(0)
            self.main.append([key, uses - 1])
        self.main.pop(0)


TWINS: dict[str, Callable[[int], ListFifo | ListS3Fifo]] = {"fifo": ListFifo, "lru": ListLru, "s3-fifo": ListS3Fifo}


def brute_force(prompts: list[tuple[int, ...]], twin: ListFifo | ListS3Fifo, order: str) -> tuple[int, int]:
    prefix_hits = block_hits = 0
    for blocks in prompts:
        found = [block in twin for block in blocks]
        prefix_hits += [*found, False].index(False)
        block_hits += sum(found)
        for block in blocks if order == "fwd" else blocks[::-1]:
            twin.access(block)
    return prefix_hits, block_hits


@pytest.mark.parametrize("order", ["fwd", "rev"])
@pytest.mark.parametrize("policy", TWINS)
@pytest.mark.parametrize("size", [1, 2, 7, 50, 200, 600])
def test_replay_of_the_sample_equals_brute_force(policy: str, size: int, order: str) -> None:
    prompts = [request.blocks for request in read_trace(SAMPLE)]
    hits = replay(prompts, sum(map(len, prompts)), MiniCache(make(policy), size), order)
    assert (hits.prefix_hits, hits.block_hits) == brute_force(prompts, TWINS[policy](size), order)


def published() -> list[tuple[str, str, str, int, int, int, int]]:
    if not GRID.is_file():
        return []
    rows = csv.reader(GRID.read_text().splitlines(), delimiter="\t")
    return [(row[0], row[1], row[2], *map(int, row[3:7])) for row in rows if row[1] in EXACT]


@pytest.mark.skipif(not GRID.is_file(), reason=f"the released traces are not in {TRACES}; KVTOOL_TRACES says where")
@pytest.mark.parametrize("policy", EXACT)
@pytest.mark.parametrize("trace", ["conversation_trace.jsonl", "synthetic_trace.jsonl"])
def test_replay_of_a_released_trace_equals_the_published_grid(trace: str, policy: str) -> None:
    rows = [row for row in published() if row[:2] == (trace, policy)]
    assert len(rows) == 18, "nine sizes, both orders"
    prompts = [request.blocks for request in read_trace(TRACES / trace)]
    for _, _, order, size, asked, prefix_hits, block_hits in rows:
        hits = replay(prompts, sum(map(len, prompts)), MiniCache(make(policy.lower()), size), order)
        found = (hits.asked, hits.prefix_hits, hits.block_hits)
        assert found == (asked, prefix_hits, block_hits), f"{policy} {order} at {size} blocks"
