"""What kept caches in the field from evicting, or made them evict for nothing; each on the whole store."""

from __future__ import annotations

import pytest

from kvtool.kv.policy import CHOICES
from kvtool.kv.record import Demote, Grant, State, Want
from kvtool.kv.store import Store


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 8


def put(store: Store, number: int, parent: int | None = None, now_s: float = 0.0) -> Grant:
    want = Want(key(number), 100, None if parent is None else key(parent))
    (answer,) = store.reserve(1, [want], now_s)
    if answer.grant is Grant.GRANTED:
        store.commit(1, answer.slot, answer.generation, 0, now_s)
    store.take_actions()
    return answer.grant


def prompt(store: Store, numbers: range, now_s: float) -> int:
    """Read what is there of a prompt and put the rest, as an engine does; how many blocks were hits."""
    keys = [key(number) for number in numbers]
    reading = store.begin_read((1, int(now_s * 1000) + 1), keys, now_s)
    hits = len(store.finish_read(reading, now_s))
    store.release((1, int(now_s * 1000) + 1), now_s)
    for at in range(hits, len(keys)):
        if put(store, numbers[at], numbers[at - 1] if at else None, now_s) not in (Grant.GRANTED, Grant.DUPLICATE):
            break
    return hits


@pytest.mark.parametrize("evict", CHOICES)
def test_probes_for_existence_keep_nothing(evict: str) -> None:
    """Mooncake #2187: existence checks renewed leases, 649 evictions found nothing to evict."""
    store = Store(16, 100, evict=evict)
    for number in range(16):
        put(store, number)
    for step in range(1400):
        store.match([key(step % 16)])
    for number in range(100, 116):
        assert put(store, number) is Grant.GRANTED
    assert store.match([key(0)]) == 0


@pytest.mark.parametrize("evict", CHOICES)
def test_lookups_that_nobody_finishes_do_not_stop_eviction(evict: str) -> None:
    """LMCache #987, #1034: objects pinned at lookup and never retrieved; the hit rate went to 0."""
    store = Store(8, 100, lease_term_s=10.0, evict=evict)
    for number in range(8):
        put(store, number)
    for step in range(20_000):
        now_s = step / 100
        store.begin_read((1, step), [key(step % 8)], now_s)
        if step % 100 == 0:
            store.tick(now_s)
    store.tick(300.0)
    assert len(store.leases) == 0 and store.audit(300.0) == []
    for number in range(100, 108):
        assert put(store, number, now_s=300.0) is Grant.GRANTED


def test_what_cannot_be_made_room_for_is_refused_at_once() -> None:
    """LMCache #2942: a busy loop in the allocator when nothing could be evicted."""
    store = Store(64, 100)
    for number in range(64):
        put(store, number)
    for number in range(64):
        store.begin_read((1, number), [key(number)], 0.0)
    asked = 0
    may_go = store._dram_order._may_go

    def counted(key: bytes) -> bool:
        nonlocal asked
        asked += 1
        return may_go(key)

    store._dram_order._may_go = counted
    for number in range(100, 200):
        assert put(store, number) is Grant.FULL
    assert asked <= 64, "a block that may not go was looked at again before anything had changed"


@pytest.mark.parametrize("evict", CHOICES)
def test_three_prompts_in_a_pool_of_one_and_a_fifth_keep_a_prefix(evict: str) -> None:
    """Mooncake #3331: reuse of 49,984, 16,384 and 0 tokens of three equal prompts, as refused puts were lost."""
    store = Store(120, 100, evict=evict)
    for turn in range(6):
        for which in range(3):
            numbers = range(which * 1000, which * 1000 + 100)
            now_s = 60.0 * (3 * turn + which)
            prompt(store, numbers, now_s)
            assert store.match([key(number) for number in numbers]) == 100, "the last prompt is whole"
            assert prompt(store, numbers, now_s + 20.0) == 100
    assert store.counts.refused == 0


def test_no_block_in_a_file_is_cut_off_from_its_prefix() -> None:
    """sglang #26886: after write-back a prefix had lost its head, and its tail could never be a hit."""
    store = Store(8, 100, file_slots=40)
    for chain in range(8):
        for at in range(5):
            while put(store, chain * 100 + at, chain * 100 + at - 1 if at else None) is Grant.WAIT:
                end_moves(store)
    resident = store.resident()
    assert len(resident) >= 40 and State.FILED in resident.values()
    for chain in range(8):
        here = [key(chain * 100 + at) in resident for at in range(5)]
        assert here == sorted(here, reverse=True), f"chain {chain} has a hole: {here}"


def end_moves(store: Store) -> None:
    for move, entry in list(store._moves.items()):
        assert entry.state is State.DEMOTING
        store.demoted(move, True, 0.0)
    assert all(isinstance(action, Demote) or action.slot >= 0 for action in store.take_actions())
