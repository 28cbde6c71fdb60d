"""Leases end by the clock, are not renewed by anybody, and hold a slot for as long as they live."""

from __future__ import annotations

from random import Random

import pytest

from kvtool.errors import LeaseLapsed
from kvtool.kv.lease import LeaseTable


def test_slots_of_a_dead_reader_are_free_after_one_term():
    table = LeaseTable(term_s=10.0)
    lease = table.grant((1, 1), 100.0)
    table.cover(lease, 5)
    table.cover(lease, 6)
    assert table.expire(109.9) == [] and table.held(5)
    assert table.next_due_s() == 110.0
    assert sorted(table.expire(110.0)) == [5, 6] and not table.held(5)
    assert len(table) == 0 and table.next_due_s() is None


def test_a_release_that_comes_too_late_says_so():
    table = LeaseTable(term_s=1.0)
    table.cover(table.grant((1, 7), 0.0), 3)
    with pytest.raises(LeaseLapsed, match=r"read 7 of client 1 outlived its 1.0 s lease; .*lease_term"):
        table.release((1, 7), 1.0)
    assert table.held(3), "it counts until expire has run"
    assert table.expire(1.0) == [3]
    with pytest.raises(LeaseLapsed):
        table.release((1, 7), 1.0)


def test_another_read_of_the_same_slot_renews_nothing():
    table = LeaseTable(term_s=1.0)
    table.cover(table.grant((1, 1), 0.0), 3)
    table.cover(table.grant((2, 1), 0.5), 3)
    assert table.expire(1.0) == [], "the second reader still reads"
    with pytest.raises(LeaseLapsed):
        table.release((1, 1), 1.0)
    assert table.release((2, 1), 1.4) == [3]


def test_a_lease_ends_one_term_after_its_answer_though_it_could_have_waited_longer():
    table = LeaseTable(term_s=1.0)
    lease = table.grant((1, 1), 0.0, wait_s=30.0)
    table.cover(lease, 3)
    table.answered(lease, 2.0)
    assert table.expire(2.9) == [] and table.expire(3.0) == [3]


def test_leases_of_a_client_that_left_end_at_once():
    table = LeaseTable(term_s=1.0)
    for read in ((1, 1), (1, 2), (2, 1)):
        table.cover(table.grant(read, 0.0), read[1])
    assert sorted(table.end_owner(1)) == [2] and table.held(1), "client 2 reads slot 1 too"


def test_a_read_id_is_used_once():
    table = LeaseTable(term_s=1.0)
    table.grant((1, 1), 0.0)
    with pytest.raises(AssertionError, match="holds a lease already"):
        table.grant((1, 1), 0.0)


def test_a_term_must_be_positive():
    with pytest.raises(ValueError, match="must be positive, got 0 s"):
        LeaseTable(0)


@pytest.mark.parametrize("seed", range(40))
def test_a_slot_is_held_exactly_while_some_lease_on_it_lives(seed):
    rng, now_s, table = Random(seed), 0.0, LeaseTable(term_s=1.0)
    live: dict[tuple[int, int], tuple[float, list[int]]] = {}
    for step in range(300):
        now_s += rng.choice([0.0, 0.1, 0.4])
        match rng.choice(["grant", "release", "expire", "leave"]):
            case "grant":
                read, slots = (rng.randrange(3), step), rng.choices(range(6), k=2)
                lease = table.grant(read, now_s)
                for slot in slots:
                    table.cover(lease, slot)
                live[read] = now_s + 1.0, slots
            case "release" if live:
                read = rng.choice(list(live))
                lapses_at_s, _ = live[read]
                try:
                    table.release(read, now_s)
                    assert now_s < lapses_at_s
                    del live[read]
                except LeaseLapsed:
                    assert now_s >= lapses_at_s
            case "expire":
                table.expire(now_s)
                live = {read: held for read, held in live.items() if now_s < held[0]}
            case "leave":
                owner = rng.randrange(3)
                table.end_owner(owner)
                live = {read: held for read, held in live.items() if read[0] != owner}
        held = {slot for _, slots in live.values() for slot in slots}
        assert {slot for slot in range(6) if table.held(slot)} == held
        assert table.held_slots == len(held)
