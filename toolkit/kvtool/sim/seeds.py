"""Many runs, on as many processes as one likes, and what they add up to."""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from kvtool.sim.run import Result, prepared, run_seed

CHUNK = 20
STUCK_S = 120
"""Real seconds for one seed; then its process dies with a traceback, as the loop that hangs has no call that counts."""


@dataclass
class Sum:
    """Over all seeds: how many, what happened how often, and which ones broke."""

    seeds: int = 0
    calls: int = 0
    virtual_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    broken: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.calls += result.calls
        self.virtual_s += result.virtual_s
        self.counts.update(result.counts)
        if result.broken:
            self.broken.append(result)


def run_seeds(
    seeds: Sequence[int], processes: int = 2, steps: int | None = None, heard: Callable[[Result], None] | None = None
) -> Sum:
    """Every seed once. `heard` is told of each result, in no order."""
    found = Sum()
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for chunk in as_completed([pool.submit(_run_chunk, list(chunk), steps) for chunk in chunks]):
            for result in chunk.result():
                found.add(result)
                if heard is not None:
                    heard(result)
    found.broken.sort(key=lambda result: result.seed)
    return found


def _run_chunk(seeds: list[int], steps: int | None) -> list[Result]:
    results = []
    with prepared() as run_dir:
        for seed in seeds:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            try:
                results.append(run_seed(seed, run_dir, steps))
            finally:
                faulthandler.cancel_dump_traceback_later()
    return results
