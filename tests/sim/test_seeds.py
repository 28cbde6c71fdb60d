"""The whole pool over many seeds: no oracle speaks, and every kind of trouble was in fact had."""

from __future__ import annotations

import pytest

from kvtool.sim.seeds import run_seeds
from kvtool.sim.shape import FAULTS

SEEDS = 200
HAD = (
    *(f"fault: {kind}" for kind in FAULTS if kind != "slow network"),
    "net: slow message", "net: keepalive gave up", "one-sided: read", "one-sided: write",
    "one-sided: write of a dead client arrived", "disk: torn page", "disk: unsynced page lost", "disk: short write",
    "disk: rotten page", "disk: full", "disk: failed read", "disk: failed write", "disk: failed sync",
    "disk: slow operation", "disk: lying sync", "rank started again", "rank recovered blocks", "put durable",
    "put stored", "put duplicate", "put refused", "put failed", "served dram/shm", "served dram/ucx", "served file/shm",
    "served file/ucx", "client: slow writer", "client: read outlived its lease", "rule: timed_out", "rule: evicted",
    "rule: demoted", "rule: promoted", "rule: demote_failed", "rule: promote_failed", "rule: corrupt", "rule: expired",
    "rule: dropped", "rule: leases_lapsed", "rule: aborted",
)  # fmt: skip


def test_no_oracle_speaks_over_many_seeds() -> None:
    found = run_seeds(range(SEEDS))
    assert not found.broken, "\n".join(
        f"seed {result.seed}: {result.broken} (kvtool sim pool --seed {result.seed} --replay)"
        for result in found.broken
    )
    assert found.seeds == SEEDS
    never = [what for what in HAD if not found.counts[what]]
    assert not never, f"in {SEEDS} seeds there never was: {never}"


@pytest.mark.slow
def test_no_oracle_speaks_over_two_thousand_seeds_more() -> None:
    found = run_seeds(range(SEEDS, SEEDS + 2000))
    assert not found.broken, [(result.seed, result.broken) for result in found.broken]
