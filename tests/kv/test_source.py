"""What a rank lends to its mover, and what it takes from those of others."""

from __future__ import annotations

import pytest

from kvtool.kv.copying import Wanted
from kvtool.kv.record import Commit, Demote, Grant, Want
from kvtool.kv.retention import Pin, Retention
from kvtool.kv.store import Store

SIZE, ME, THEM = 100, 1, 9


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(store: Store, number: int, now_s: float = 0.0, **wish) -> None:
    (answer,) = store.reserve(ME, [Want(key(number), SIZE, **wish)], now_s)
    if answer.grant is Grant.WAIT:
        move(store, now_s)
        (answer,) = store.reserve(ME, [Want(key(number), SIZE, **wish)], now_s)
    assert answer.grant is Grant.GRANTED, answer
    assert store.commit(ME, answer.slot, answer.generation, number, now_s) is Commit.STORED
    move(store, now_s)


def move(store: Store, now_s: float) -> None:
    """Whatever goes to files arrives at once."""
    while actions := store.take_actions():
        for action in actions:
            if isinstance(action, Demote):
                store.demoted(action.move, True, now_s)


def offer(store: Store, number: int, evict: bool = False, now_s: float = 0.0, **wish) -> Grant:
    return store.reserve_copies(THEM, [Want(key(number), SIZE, **wish)], now_s, evict)[0].grant


def test_a_copy_that_mends_takes_free_room_only_and_one_of_a_put_makes_room():
    store = Store(3, SIZE)
    for number in range(3):
        put(store, number)
    assert offer(store, 7) is Grant.FULL and len(store.resident()) == 3
    assert offer(store, 7, evict=True) is Grant.GRANTED and len(store.resident()) == 2
    assert offer(store, 8) is Grant.FULL


def test_free_room_is_counted_over_both_tiers():
    store = Store(2, SIZE, file_slots=3)
    for number in range(4):
        put(store, number)
    assert offer(store, 7) in (Grant.GRANTED, Grant.WAIT)
    store = Store(2, SIZE, file_slots=3)
    for number in range(5):
        put(store, number)
    assert offer(store, 7) is Grant.FULL


def test_what_is_there_is_there_and_what_is_being_written_is_waited_for():
    store = Store(4, SIZE)
    put(store, 1)
    store.reserve(ME, [Want(key(2), SIZE)], 0.0)
    assert (offer(store, 1), offer(store, 2)) == (Grant.DUPLICATE, Grant.WAIT)
    assert store.counts.duplicates == 0, "an offer is nobody's put"


def test_a_near_copy_lives_on_with_every_offer_and_a_copy_makes_it_stay():
    store = Store(4, SIZE)
    put(store, 1, transient_s=10.0)
    assert offer(store, 1, now_s=8.0, transient_s=10.0) is Grant.DUPLICATE
    store.tick(12.0)
    assert key(1) in store.resident() and store.wanted([key(1)]) == []
    assert offer(store, 1, now_s=13.0) is Grant.DUPLICATE
    store.tick(100.0)
    assert store.wanted([key(1), key(2)]) == [Wanted(key(1), SIZE, 0)]


def test_what_is_lent_stays_where_it_is_until_it_is_given_back_or_its_lease_ends():
    store = Store(2, SIZE, lease_term_s=5.0)
    put(store, 1)
    put(store, 2)
    lent = store.lend((0, 1), [key(1), key(3)], 0.0)
    assert lent[0] is not None and (lent[0].checksum, lent[1]) == (1, None)
    store.reserve(ME, [Want(key(4), SIZE), Want(key(5), SIZE)], 1.0)
    assert key(1) in store.resident() and key(2) not in store.resident()
    assert store.release((0, 1), 2.0) and not store.audit(2.0)[1:], "only the reservation is left"


def test_lending_is_no_use_of_a_block():
    store = Store(2, SIZE)
    put(store, 1)
    put(store, 2)
    store.lend((0, 1), [key(1)], 0.0)
    store.release((0, 1), 0.0)
    store.reserve(ME, [Want(key(4), SIZE)], 1.0)
    assert key(1) not in store.resident() and key(2) in store.resident()


@pytest.mark.parametrize(("now_s", "left"), [(4.0, Retention(80, 6.0, Pin.SOFT, 2)), (11.0, Retention(copies=2))])
def test_a_copy_is_wanted_for_as_long_as_its_source_still_is(now_s, left):
    store = Store(2, SIZE)
    put(store, 1, retention=Retention(80, 10.0, Pin.SOFT, 2))
    (lent,) = store.lend((0, 1), [key(1)], now_s)
    assert lent is not None and lent.retention == left
