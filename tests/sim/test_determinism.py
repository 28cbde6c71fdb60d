"""A run is a function of its seed, and of nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

from kvtool.sim.run import prepared, run_seed

SEEDS = (2, 5, 11, 17)
_AGAIN = """
from kvtool.sim.run import prepared, run_seed
with prepared() as run_dir:
    for seed in {seeds}:
        print(run_seed(seed, run_dir).digest)
"""


def test_a_seed_gives_the_same_events_twice() -> None:
    with prepared() as run_dir:
        first = [run_seed(seed, run_dir) for seed in SEEDS]
        again = [run_seed(seed, run_dir) for seed in reversed(SEEDS)][::-1]
    assert [run.digest for run in first] == [run.digest for run in again]
    assert len({run.digest for run in first}) == len(SEEDS), "different seeds, the same events"
    assert all(run.lines > 5 for run in first)


def test_a_seed_gives_the_same_events_in_another_interpreter() -> None:
    with prepared() as run_dir:
        here = [run_seed(seed, run_dir).digest for seed in SEEDS]
    for hash_seed in ("1", "77"):
        there = subprocess.run(
            [sys.executable, "-c", _AGAIN.format(seeds=SEEDS)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert there.stdout.split() == here
