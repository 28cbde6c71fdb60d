"""Fetch or recompute, whose turn it is, and the share of time for recomputing."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.serve.gate import FetchGate
from kvtool.serve.options import PoolOptions
from kvtool.serve.turns import Share, admission_order, next_chunk

fixed = settings(derandomize=True, deadline=None, database=None)


def gate(**options):
    return FetchGate(PoolOptions(**options), block_tokens=32, block_size=1 << 20)


def test_blocks_are_fetched_until_both_speeds_are_known_then_by_comparison():
    fast, slow = gate(), gate()
    assert fast.worth_fetching(4) and not fast.worth_fetching(0)
    for one, bytes_s in ((fast, 1 << 30), (slow, 1 << 20)):
        one.fetch_bytes_s.add(bytes_s, 1.0)
        one.compute_tokens_s.add(640, 1.0)  # 20 blocks a second
    assert fast.worth_fetching(4)
    assert [slow.worth_fetching(4) for _ in range(16)].count(True) == 1, "one probe in sixteen"
    assert all(gate(recompute_if_faster=False).worth_fetching(n) for n in (1, 9))


def test_a_fetch_may_take_a_fifth_of_recomputing_or_twice_what_it_needs():
    one = gate()
    assert one.fetch_budget_s(10) == 2.0 and one.match_budget_s(10) == 0.5
    one.compute_tokens_s.add(640, 1.0)
    assert one.fetch_budget_s(10) == one.match_budget_s(10) == 0.15, "never less than the floor"
    assert one.fetch_budget_s(40) == one.match_budget_s(40) == pytest.approx(0.4)
    one.fetch_bytes_s.add(40 << 20, 1.0)
    assert one.fetch_budget_s(10) == pytest.approx(0.5)
    assert one.fetch_budget_s(10_000) == 2.0


def test_three_waits_in_vain_close_the_way_and_one_probe_a_rest_may_try():
    one = gate(breaker_failures=3, breaker_rest_s=5.0)
    for _ in range(2):
        one.failed(0.0)
    one.answered()
    for now_s in (1.0, 2.0, 3.0):
        assert one.passes(now_s)
        one.failed(now_s)
    assert one.opened == 1
    assert not one.passes(7.9)
    assert one.passes(8.0) and not one.passes(8.1), "one probe"
    one.failed(8.2)
    assert not one.passes(12.9) and one.passes(13.0)
    one.answered()
    assert one.passes(13.0) and one.passes(13.0)


@dataclass
class Job:
    priority: int
    arrived_at_s: float
    served_at_s: float
    left: int
    name: int = 0


JOBS = st.lists(
    st.builds(Job, st.integers(0, 100), st.floats(0, 100), st.floats(0, 100), st.integers(1, 9999)),
    min_size=1,
    max_size=8,
)


@fixed
@given(JOBS)
def test_the_starved_go_first_then_priority_then_who_has_least_left(jobs):
    now_s = 100.0
    chosen = next_chunk(jobs, now_s, patience_s=1.0)
    starved = [job for job in jobs if now_s - job.served_at_s > 1.0]
    if starved:
        assert chosen.served_at_s == min(job.served_at_s for job in starved)
    else:
        best = max(job.priority for job in jobs)
        assert chosen.priority == best
        assert chosen.left == min(job.left for job in jobs if job.priority == best)


@fixed
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), min_size=1, max_size=6), st.floats(0.01, 0.5))
def test_nobody_waits_longer_for_a_chunk_than_patience_and_one_round(work, chunk_s):
    """Chunks of `chunk_s`: a turn comes at the latest `patience_s` and one chunk of everybody else later."""
    jobs, now_s = [Job(priority, 0.0, 0.0, left) for priority, left in work], 0.0
    while jobs:
        job = next_chunk(jobs, now_s)
        assert now_s - job.served_at_s <= 1.0 + chunk_s * (len(work) + 1)
        now_s += chunk_s
        job.left, job.served_at_s = job.left - 1, now_s
        jobs = [job for job in jobs if job.left]


def test_a_second_of_waiting_counts_as_a_step_of_priority():
    old, new = Job(10, 0.0, 0.0, 1), Job(50, 30.0, 0.0, 1)
    assert admission_order([old, new], 31.0) == [new, old]
    old.arrived_at_s = -20.0
    assert admission_order([old, new], 31.0) == [old, new]


@pytest.mark.parametrize("seed", range(20))
def test_recomputing_stays_within_its_share_of_a_busy_engine(seed):
    random = Random(seed)
    limit = random.uniform(0.05, 0.9)
    costs = [(random.uniform(0.001, 0.2), random.uniform(0.001, 0.2)) for _ in range(300)]
    share, steps_s, chunks_s, longest_s = Share(limit), 0.0, 0.0, 0.0
    for step_s, chunk_s in costs:
        share.earned(step_s)
        steps_s += step_s
        if share.may_run():
            share.spent(chunk_s)
            chunks_s += chunk_s
            longest_s = max(longest_s, chunk_s)
    assert chunks_s - longest_s <= limit * (steps_s + chunks_s) + 1e-9


def test_an_idle_engine_owes_nobody():
    share = Share(0.1)
    share.spent(100.0)
    assert not share.may_run()
    share.forgive()
    assert share.may_run()
    with pytest.raises(ValueError, match="between 0 and 1"):
        Share(1.0)
