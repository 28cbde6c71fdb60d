"""Rates are of what happened between two looks of the same process; what is not known is not 0."""

from __future__ import annotations

import pytest

from kvtool.pool.rates import alarms, hit_ratio, rates

BEFORE = {
    "rank": 1, "pid": 7, "status": "live", "clients": 2, "slots": 100, "slots_used": 50, "file_slots": 0, "leases": 3,
    "held_share": 0.1, "bytes_in": 1000, "bytes_out": 500, "counts": {"evicted": 4}, "cpu_s": 1.0,
    "eviction": {"dram": {"policy": "s3fifo"}},
    "reads": {"asked": 10, "hits": {"dram/shm": 4, "file/shm": 1}}, "copying": {"owed": 6},
}  # fmt: skip
NOW = {
    **BEFORE, "slots_used": 80, "bytes_in": 3000, "counts": {"evicted": 10}, "cpu_s": 1.5,
    "reads": {"asked": 30, "hits": {"dram/shm": 14, "file/shm": 6}},
}  # fmt: skip


def test_rates_are_between_the_looks():
    line = rates(BEFORE, NOW, 2.0)
    assert (line.dram_share, line.in_bytes_s, line.out_bytes_s, line.evictions_s) == (0.8, 1000.0, 0.0, 3.0)
    assert (line.cpu_share, line.owed, line.file_share) == (0.25, 6, None) and line.policy == "s3fifo"


@pytest.mark.parametrize("before", [None, {**BEFORE, "pid": 6, "bytes_in": 10**9}])
def test_a_rank_that_is_new_has_no_rates_yet(before):
    line = rates(before, NOW, 2.0)
    assert (line.in_bytes_s, line.evictions_s) == (None, None) and line.dram_share == 0.8


def test_an_older_rank_says_less_and_nothing_fails():
    line = rates(None, {"rank": 0, "slots": 4, "slots_used": 1, "leases": 0}, 1.0)
    assert (line.dram_share, line.held_share, line.owed, line.policy) == (0.25, None, None, "")


def test_a_pools_hit_ratio_weighs_ranks_by_what_they_were_asked():
    other = {"pid": 8, "reads": {"asked": 80, "hits": {}}}
    assert hit_ratio([], [BEFORE, other]) == 5 / 90
    assert hit_ratio([BEFORE, other], [NOW, other]) == 15 / 20
    assert hit_ratio([NOW], [NOW]) is None and hit_ratio([], []) is None


def test_alarms_say_what_should_not_go_on():
    assert alarms([BEFORE, {"rank": 0}]) == []
    bad = {
        **BEFORE, "held_share": 0.81, "files": {"failures": 3, "why": "no space left"}, "copying": {"homeless": 5},
        "hung": [2],
    }  # fmt: skip
    said = alarms([bad])
    assert len(said) == 4 and all(sentence.startswith("rank 1: ") for sentence in said)
    assert "81% of its memory cannot be evicted" in said[0] and "no space left" in said[1]
    assert "5 blocks" in said[2] and "rank 2" in said[3]
