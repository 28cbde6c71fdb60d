"""What is read often from elsewhere gets a copy there, and loses it when nobody asks any more."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from kvtool.kv.block import block_keys
from kvtool.kv.hot import HotBlocks, HotLimits
from kvtool.kv.placement import Member

KEYS = block_keys(b"h" * 32, np.arange(32 * 300), 32)
MEMBERS = [Member(rank, f"p/{rank}") for rank in range(4)]
HOSTS = {0: "here", 1: "there", 2: "there", 3: "far"}


def hot(**limits) -> HotBlocks:
    blocks = HotBlocks(HotLimits(**limits))
    blocks.view(1, MEMBERS, HOSTS)
    return blocks


def test_the_eighth_read_from_one_host_asks_for_a_copy_there_and_the_next_ones_do_not():
    blocks = hot()
    asked = [blocks.read("there", KEYS[:1], 0.1 * at) for at in range(20)]
    assert [bool(wanted) for wanted in asked] == [False] * 7 + [True] + [False] * 12
    ((key, rank),) = asked[7]
    assert key == KEYS[0] and HOSTS[rank] == "there"


def test_reads_from_several_hosts_do_not_add_up():
    blocks = hot()
    assert not any(blocks.read(host, KEYS[:1], 0.0) for host in ("there", "far") for _ in range(7))


def test_a_host_without_a_rank_gets_no_copy_and_costs_no_memory():
    blocks = hot()
    assert not any(blocks.read("elsewhere", KEYS[:1], 0.0) for _ in range(50)) and len(blocks) == 0


def test_what_is_read_slowly_is_never_hot_and_what_grew_cold_is_forgotten():
    blocks = hot(half_life_s=10.0)
    assert not any(blocks.read("there", KEYS[:1], 10.0 * at) for at in range(100))
    for _ in range(6):
        blocks.read("there", KEYS[1:2], 1000.0)
    assert not blocks.read("there", KEYS[2:3], 1050.0) and len(blocks) == 1


def test_a_copy_is_hinted_at_while_it_lives_and_asked_for_again_in_time():
    blocks = hot(ttl_s=60.0)
    for at in range(8):
        wanted = blocks.read("there", KEYS[:1], 0.1 * at)
    rank = wanted[0][1]
    assert blocks.hints("there", KEYS[:3], 1.0) == []
    blocks.copied(KEYS[0], rank, True, 1.0)
    (near,) = blocks.hints("there", [KEYS[5], KEYS[0]], 2.0)
    assert (near.position, near.rank, near.left_s) == (1, rank, 59.0)
    assert blocks.hints("far", KEYS[:1], 2.0) == []
    again = [at for at in range(2, 60) if blocks.read("there", KEYS[:1] * 4, float(at))]
    assert len(again) == 1 and 30 <= again[0] < 60
    assert blocks.hints("there", KEYS[:1], 62.0) == []
    blocks.copied(KEYS[0], rank, True, 70.0)
    blocks.copied(KEYS[0], rank, False, 71.0)
    assert blocks.hints("there", KEYS[:1], 72.0) == []


def test_a_rank_that_left_is_hinted_at_no_more():
    blocks = hot()
    blocks.copied(KEYS[0], 3, True, 0.0)
    assert blocks.hints("far", KEYS[:1], 1.0)
    blocks.view(2, MEMBERS[:3], HOSTS)
    assert blocks.hints("far", KEYS[:1], 1.0) == [] and blocks.near == 0


@pytest.mark.parametrize("seed", range(10))
def test_the_table_is_bounded_and_never_misses_what_is_read_often(seed):
    """Zipf reads over far more keys than it holds, at once: whoever has more than 1 in `keys_max` reads is counted."""
    rng, blocks = Random(seed), hot(keys_max=32, reads_min=1e9)
    reads = Counter()
    for _ in range(3000):
        key = KEYS[min(int(rng.paretovariate(0.8)) - 1, len(KEYS) - 1)]
        reads[key] += 1
        blocks.read("there", [key], 0.0)
        assert len(blocks) <= 32
    for key, count in reads.items():
        if count > 3000 / 32:
            assert ("there", key) in blocks._counts
