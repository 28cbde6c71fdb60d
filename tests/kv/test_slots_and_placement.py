"""Slots are a hard cap with owners; keys are placed evenly and stay where they are when others leave."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from kvtool.kv.block import block_keys
from kvtool.kv.evict import LeafLRU
from kvtool.kv.placement import Member, Placement
from kvtool.kv.slots import SlotAllocator

KEYS = block_keys(b"s" * 32, np.arange(32 * 4000), 32)
FOUR = [Member(rank, f"pool/{rank}") for rank in range(4)]


def test_a_full_tier_gives_out_nothing_more():
    slots = SlotAllocator(2)
    assert {slots.take("a"), slots.take("b")} == {0, 1}
    assert slots.take("c") is None and slots.free == 0 and slots.used == 2


def test_giving_back_twice_is_our_own_bug():
    slots = SlotAllocator(2)
    slot = slots.take("a")
    slots.give(slot)
    with pytest.raises(AssertionError, match="is free already"):
        slots.give(slot)


def test_a_generation_is_never_seen_twice_in_a_slot():
    rng, slots, seen, mine = Random(1), SlotAllocator(3), set(), []
    for _ in range(200):
        if mine and rng.random() < 0.5:
            slots.give(mine.pop())
        elif (slot := slots.take("x")) is not None:
            assert (slot, slots.generation(slot)) not in seen
            seen.add((slot, slots.generation(slot)))
            mine.append(slot)
        assert slots.used == len(mine)


def test_placement_is_the_golden_one():
    owners = Placement(1, FOUR).owners(block_keys(b"s" * 32, np.arange(32 * 24), 32))
    assert owners == GOLDEN_OWNERS


def test_batches_and_single_keys_agree_in_any_order_of_members():
    placement, shuffled = Placement(1, FOUR), Placement(1, FOUR[::-1])
    owners = placement.owners(KEYS[:500])
    assert owners == [placement.owner(key) for key in KEYS[:500]] == shuffled.owners(KEYS[:500])


def test_keys_spread_evenly_and_only_those_of_a_lost_rank_move():
    before = Placement(1, FOUR).owners(KEYS)
    assert all(900 < count < 1100 for count in Counter(before).values())
    after = Placement(2, [member for member in FOUR if member.rank != 2]).owners(KEYS)
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {2} and len(moved) == before.count(2)


def test_weights_are_shares_and_a_newcomer_without_weight_gets_nothing():
    members = [Member(0, "a", 3.0), Member(1, "b", 1.0), Member(2, "c", 0.0)]
    counts = Counter(Placement(1, members).owners(KEYS))
    assert 2 not in counts and 0.72 < counts[0] / len(KEYS) < 0.78


def test_without_a_live_rank_nobody_owns_anything():
    assert Placement(1, []).owners(KEYS[:20]) == [None] * 20 and Placement(1, []).owner(KEYS[0]) is None


def test_the_least_recently_used_goes_first_and_stale_offers_are_skipped():
    touched = {b"a": 1, b"b": 2, b"c": 3}
    order = LeafLRU(touched.get)
    for key in touched:
        order.offer(key)
    touched[b"a"] = 4
    order.offer(b"a")
    del touched[b"b"]
    assert [order.next(), order.next(), order.next()] == [b"c", b"a", None]


def test_the_order_forgets_stale_offers_in_time():
    touched = {b"a": 0}
    order = LeafLRU(touched.get)
    for use in range(10_000):
        touched[b"a"] = use
        order.offer(b"a")
        order.rebuild(touched, 1)
    assert len(order._heap) <= 261 and order.next() == b"a"


GOLDEN_OWNERS = [2, 2, 0, 1, 3, 3, 3, 1, 1, 0, 1, 3, 2, 3, 0, 2, 0, 3, 1, 3, 1, 0, 0, 3]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300])
@pytest.mark.parametrize("weights", [(), (1,), (1, 1, 1), (1, 2, 3), (0, 1, 1)])
def test_a_batch_is_split_by_owner_with_every_position_once_and_in_order(count, weights):
    placement = Placement(1, [Member(rank, f"p/{rank}", weight) for rank, weight in enumerate(weights)])
    keys = KEYS[:count]
    parts = placement.split(keys)
    assert [placement.owner(keys[positions[0]]) for _, positions in parts] == [rank for rank, _ in parts]
    for rank, positions in parts:
        assert positions == [at for at, key in enumerate(keys) if placement.owner(key) == rank]
    assert sum(len(positions) for _, positions in parts) == (count if any(weights) else 0)
    firsts = [positions[0] for _, positions in parts]
    assert firsts == sorted(firsts) and len({rank for rank, _ in parts}) == len(parts)


@pytest.mark.parametrize("weights", [(1,) * 5, (1, 2, 3, 0.5, 0.01), (0, 1, 1, 0, 2), (2,)])
@pytest.mark.parametrize("copies", [0, 1, 2, 3, 9])
def test_owners_of_a_batch_are_those_of_each_key_and_begin_with_its_owner(weights, copies):
    placement = Placement(1, [Member(rank, f"p/{rank}", weight) for rank, weight in enumerate(weights)])
    owners = placement.owners_of_all(KEYS[:600], copies)
    assert owners == [placement.owners_of(key, copies) for key in KEYS[:600]]
    live = sum(weight > 0 for weight in weights)
    assert all(len(set(them)) == len(them) == min(copies, live) for them in owners)
    assert all(weights[rank] > 0 for them in owners for rank in them)
    assert placement.owners(KEYS[:600]) == [placement.owner(key) for key in KEYS[:600]]
    if copies:
        assert [them[0] for them in owners] == placement.owners(KEYS[:600])


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_the_others_stays_when_a_rank_leaves_joins_or_ramps_up(seed):
    rng = Random(seed)
    members = [Member(rank, f"p/{rank}", rng.choice([0.5, 1.0, 2.0])) for rank in range(rng.randint(3, 8))]
    other = rng.choice(members)
    before = Placement(1, members).owners_of_all(KEYS[:300], len(members))
    without = Placement(2, [m for m in members if m is not other]).owners_of_all(KEYS[:300], len(members))
    assert without == [tuple(rank for rank in them if rank != other.rank) for them in before]
    for share in (0.1, 0.5, 0.9):  # whoever it now stands before, it stood before at less weight or not at all
        ramped = Member(other.rank, other.identity, other.weight * share)
        partly = Placement(3, [ramped if m is other else m for m in members]).owners_of_all(KEYS[:300], 2)
        for some, all_, none in zip(partly, before, without, strict=True):
            rest = [rank for rank in some if rank != other.rank]
            assert rest == list(none[: len(rest)])
            assert other.rank not in some or other.rank in all_[:2]


def test_second_owners_spread_over_all_others():
    owners = Placement(1, FOUR).owners_of_all(KEYS, 2)
    counts = Counter(owners)
    assert len(counts) == 12 and all(260 < count < 410 for count in counts.values())


def test_readers_ask_the_owner_and_then_whoever_owned_it_before_somebody_came_or_began_to_leave():
    settled = Placement(1, FOUR)
    assert settled.elders is None and settled.readers_of_all(KEYS[:50], 2) == settled.owners_of_all(KEYS[:50], 2)
    leaving = Member(0, "pool/0", 0.0, elder=1.0)
    newcomer = Member(4, "pool/4", 0.5, elder=0.0)
    moving = Placement(2, [leaving, *FOUR[1:], newcomer])
    for key, readers in zip(KEYS[:500], moving.readers_of_all(KEYS[:500], 1), strict=True):
        assert readers[0] == moving.owner(key) and readers[0] != 0
        assert readers[-1] == settled.owner(key) and len(set(readers)) == len(readers)
    asked_twice = sum(len(readers) > 1 for readers in moving.readers_of_all(KEYS, 1))
    assert 0.25 < asked_twice / len(KEYS) < 0.45, "only keys that move have a second reader"
