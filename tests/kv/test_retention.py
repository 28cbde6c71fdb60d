"""How long blocks are wanted, and how firmly. Times are seconds; keys are letters."""

from __future__ import annotations

import pytest

from kvtool.kv.record import Grant, Want
from kvtool.kv.retention import DEFAULT, Pin, Retention, TokenRange, for_ranges
from kvtool.kv.store import Store

KEYS = [bytes([n]) * 32 for n in range(1, 100)]
A, B, C, D, E, F = KEYS[:6]


def put(store: Store, key: bytes, retention: Retention = DEFAULT, now_s: float = 0.0) -> Grant:
    (answer,) = store.reserve(1, [Want(key, 10, retention=retention)], now_s)
    if answer.grant is Grant.GRANTED:
        store.commit(1, answer.slot, answer.generation, 99, now_s)
    return answer.grant


def held(store: Store, now_s: float = 0.0) -> dict[str, int]:
    return {line.kind: line.count for line in store.audit(now_s)}


def gone(store: Store, keys: list[bytes], now_s: float = 0.0, retention: Retention = DEFAULT) -> list[bytes]:
    """In which order `keys` go when others come."""
    order, left = [], list(keys)
    for other in KEYS[50:]:
        if not left:
            break
        put(store, other, retention, now_s)
        order += [key for key in left if not store.match([key])]
        left = [key for key in left if store.match([key])]
    return order


@pytest.mark.parametrize("evict", ["lru", "s3-fifo", "arc", "turn"])
def test_lower_priorities_go_first_whatever_the_policy(evict: str) -> None:
    store = Store(4, 100, evict=evict)
    for key, priority in ((A, 90), (B, 10), (C, 35), (D, 60)):
        put(store, key, Retention(priority))
    assert gone(store, [A, B, C, D], retention=Retention(100)) == [B, C, D, A]


def test_a_priority_falls_back_when_its_time_is_over() -> None:
    store = Store(2, 100)
    put(store, A, Retention(90, duration_s=5.0))
    put(store, B)
    put(store, C)
    assert store.match([A]) == 1 and store.match([B]) == 0
    assert store.next_due_s() == 5.0
    store.tick(5.0)
    assert gone(store, [A, C], 20.0) == [C, A], "from then on it is as any other, and came last"


def test_a_low_priority_ends_too() -> None:
    store = Store(2, 100)
    put(store, A, Retention(1, duration_s=5.0))
    store.tick(5.0)
    put(store, B, now_s=5.0)
    assert gone(store, [A, B], 6.0) == [A, B]


def test_what_is_pinned_softly_goes_last() -> None:
    store = Store(3, 100)
    put(store, A, Retention(0, 60.0, Pin.SOFT))
    put(store, B, Retention(100))
    put(store, C)
    assert gone(store, [A, B, C], retention=Retention(100, 60.0, Pin.SOFT)) == [C, B, A]


def test_what_is_pinned_hard_stays_until_its_time_is_over() -> None:
    store = Store(4, 100)
    put(store, A, Retention(0, 5.0, Pin.HARD))
    assert gone(store, [A]) == [] and held(store) == {"hard pin": 1}
    (line,) = store.audit(1.0)
    assert line.deadline_s == 4.0 and line.owner == 1
    store.tick(5.0)
    assert held(store) == {} and gone(store, [A], 5.0, Retention(100)) == [A]


def test_a_quarter_of_the_slots_may_be_pinned_hard_and_the_rest_is_soft() -> None:
    store = Store(8, 100)
    for key in KEYS[:8]:
        put(store, key, Retention(35, 60.0, Pin.HARD))
    assert held(store) == {"hard pin": 2, "soft pin": 6}
    assert store.eviction()["pins"] == {"hard": 2, "hard_max": 2, "softened": 6}
    assert put(store, KEYS[20]) is Grant.GRANTED, "a client cannot close the pool by pinning it"
    assert store.match([A]) == store.match([B]) == 1


def test_with_everything_pinned_hard_or_read_a_put_is_refused_at_once() -> None:
    store = Store(4, 100)
    put(store, A, Retention(35, 60.0, Pin.HARD))
    for key in (B, C, D):
        put(store, key)
    store.begin_read((1, 1), [B], 0.0), store.begin_read((1, 2), [C], 0.0), store.begin_read((1, 3), [D], 0.0)
    assert put(store, E) is Grant.FULL and "1 pinned" in store.why_full()


def test_a_put_of_what_is_there_raises_and_never_lowers() -> None:
    store = Store(4, 100)
    put(store, A, Retention(50, 10.0))
    put(store, A, Retention(20))
    assert store._index[A].level == 50
    put(store, A, Retention(80, 3.0), 1.0)
    assert store._index[A].level == 80
    put(store, A, Retention(80, 30.0), 2.0)
    store.tick(4.0)
    assert store._index[A].level == 80, "the longer time counts"
    put(store, A, Retention(0, 60.0, Pin.HARD), 5.0)
    assert held(store, 5.0) == {"hard pin": 1} and store._index[A].retention.pin is Pin.HARD
    store.tick(100.0)
    assert store._index[A].level == 35 and held(store) == {} and store._index[A].retention == DEFAULT


def test_a_put_that_finds_its_block_being_written_raises_it_too() -> None:
    store = Store(4, 100)
    (first,) = store.reserve(1, [Want(A, 10)], 0.0)
    assert put(store, A, Retention(70, 10.0)) is Grant.DUPLICATE
    store.commit(1, first.slot, first.generation, 99, 0.0)
    assert store._index[A].level == 70


def test_pins_can_be_set_and_taken_off_later() -> None:
    store = Store(4, 100)
    put(store, A)
    put(store, B)
    assert store.retain([A, B, C], Retention(35, 10.0, Pin.HARD), 0.0) == 2
    assert held(store) == {"hard pin": 1, "soft pin": 1}
    assert store.unretain([A, B, C]) == 2 and held(store) == {}
    assert sorted(gone(store, [A, B])) == [A, B]


def test_pins_again_and_again_do_not_make_the_rank_grow() -> None:
    store = Store(8, 100)
    for now_s in range(5000):
        put(store, A, Retention(40, 100.0, Pin.SOFT), float(now_s))
        store.tick(float(now_s))
    assert len(store._keeping._due) < 300


def test_a_block_that_is_forgotten_is_not_kept_any_more() -> None:
    store = Store(4, 100)
    for _ in range(100):
        store.reserve(1, [Want(A, 10, transient_s=60.0, retention=Retention(35, 60.0, Pin.HARD))], 0.0)
        entry = store._index[A]
        store.commit(1, entry.slot, entry.generation, 1, 0.0)
        store.drop([A], 0.0)
    assert held(store) == {} and store.eviction()["pins"]["hard"] == 0


def test_a_block_takes_the_range_of_its_first_token() -> None:
    ranges = [TokenRange(64, 80, 20, 5.0), TokenRange(0, 33, 90)]
    wanted = for_ranges(ranges, 130, 32, after=Retention(50))
    assert [block.priority for block in wanted] == [90, 90, 20, 50, 50]
    assert [block.duration_s for block in wanted] == [None, None, 5.0, None, None]
    assert for_ranges([TokenRange(32, None, 7)], 100, 32)[1:] == [Retention(7)] * 3
    assert for_ranges([], 64, 32) == [DEFAULT, DEFAULT]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: for_ranges([TokenRange(0, 10, 1), TokenRange(9, None, 1)], 5, 5), "overlap: 0 to 10, and from 9"),
        (lambda: for_ranges([TokenRange(0, None, 1), TokenRange(9, 12, 1)], 5, 5), "overlap: 0 to None"),
        (lambda: TokenRange(5, 5, 1), "wanted 0 <= start < end, found 5 to 5"),
        (lambda: TokenRange(0, 5, 101), "priority: wanted 0 to 100, found 101"),
        (lambda: TokenRange(0, 5, 1, 0.0), "duration_s: wanted more than 0 s"),
    ],
)
def test_ranges_that_mean_nothing_are_refused(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
