"""The whole pool over many seeds: no oracle speaks."""

from __future__ import annotations

from kvtool.sim.seeds import run_seeds


def test_no_oracle_speaks_over_many_seeds() -> None:
    found = run_seeds(range(20))
    assert not found.broken, "\n".join(
        f"seed {result.seed}: {result.broken} (kvtool sim pool --seed {result.seed} --replay)"
        for result in found.broken
    )
    assert found.seeds == 20
