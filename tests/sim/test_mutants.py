"""The simulation finds what it is for: each planted bug is seen by an oracle, and the same seed is clean without it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from mutants import MUTANTS, Mutant

from kvtool.sim.run import prepared, run_seed


@pytest.fixture(scope="module")
def run_dir() -> Iterator[str]:
    with prepared() as directory:
        yield directory


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_seen(mutant: Mutant, run_dir: str) -> None:
    with ExitStack() as planted:
        for holder, name, what in mutant.patches():
            planted.enter_context(patch.object(holder, name, what))
        for seed in range(mutant.seed, mutant.seed + mutant.within):
            found = run_seed(seed, run_dir)
            if re.search(mutant.says, found.broken):
                break
    assert re.search(mutant.says, found.broken), f"after {mutant.within} seeds: {found.broken!r}"
    clean = run_seed(seed, run_dir)
    assert not clean.broken, f"seed {seed} breaks without the bug"
