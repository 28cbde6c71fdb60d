"""The pool in one process: what is put comes back, whole or not at all."""

from __future__ import annotations

import threading
from random import Random

import pytest
from blocks import KEYS, LAYOUT, payload, puts, room_for

from kvtool.clock import WoundClock
from kvtool.pool.base import Outcome, Path, Put, Tier
from kvtool.pool.embedded import EmbeddedPool


@pytest.fixture
def clock():
    return WoundClock(100.0)


@pytest.fixture
def pool(clock):
    pool = EmbeddedPool(LAYOUT, room_for(8), clock=clock)
    yield pool
    pool.close()


def test_blocks_come_back_byte_for_byte_in_place(pool):
    assert [r.outcome for r in pool.write(puts(KEYS[:5]))] == [Outcome.STORED] * 5
    assert pool.match(KEYS) == 5
    with pool.read(KEYS[:7]) as read:
        assert [bytes(b.data) for b in read.blocks] == [payload(key) for key in KEYS[:5]]
        assert {(b.tier, b.path) for b in read.blocks} == {(Tier.DRAM, Path.EMBEDDED)}
        assert all(block.data.readonly for block in read.blocks)
        assert read.whole() == 5
    counts = pool.counts()
    assert counts.blocks_read == {"dram/embedded": 5} and counts.misses == {"absent": 2}
    assert counts.bytes_put == {"stored/embedded": 5 * LAYOUT.block_size}
    assert pool.audit() == []


def test_a_second_put_is_a_duplicate_and_copies_nothing(pool):
    pool.write(puts(KEYS[:3]))

    def never(room):
        raise AssertionError("a duplicate was filled")

    again = pool.write([Put(key, LAYOUT.block_size, never) for key in KEYS[:3]])
    assert [r.outcome for r in again] == [Outcome.DUPLICATE] * 3


def test_a_full_pool_evicts_the_oldest_leaf_first(pool):
    pool.write(puts(KEYS[:8]))
    pool.write(puts(KEYS[40:41]))
    assert pool.match(KEYS[:8]) == 7, "a block with a child went before its child"
    assert pool.match(KEYS[40:41]) == 1


def test_leased_blocks_are_not_evicted_and_the_refusal_says_why(pool):
    pool.write(puts(KEYS[:8]))
    with pool.read(KEYS[:8]) as read:
        (result,) = pool.write(puts(KEYS[40:41]))
        assert result.outcome is Outcome.REFUSED and "8 under leases" in result.reason
        assert read.whole() == 8
    assert pool.write(puts(KEYS[40:41]))[0].outcome is Outcome.STORED


def test_a_read_that_outlived_its_lease_is_not_whole(pool, clock):
    pool.write(puts(KEYS[:8]))
    read = pool.read(KEYS[:8])
    clock.wind(9.9)
    assert read.whole() == 8
    clock.wind(0.1)
    assert read.whole() == 0
    pool.write(puts(KEYS[40:48]))
    read.release()
    assert pool.audit() == []


def test_a_view_in_place_is_whole_no_more_once_its_slot_has_another_generation(pool):
    pool.write(puts(KEYS[:4]))
    with pool.read(KEYS[:4]) as read:
        pool._memory.generations[pool._store._index[KEYS[2]].slot] += 1
        assert read.whole() == 2


def test_too_large_a_block_is_refused_with_both_sizes(pool):
    (result,) = pool.write([Put(KEYS[0], LAYOUT.block_size + 1, lambda room: None)])
    assert result.outcome is Outcome.REFUSED
    assert f"{LAYOUT.block_size + 1} bytes, a slot holds 1 to {LAYOUT.block_size}" in result.reason


def test_transient_blocks_go_by_the_clock_or_when_their_last_holder_drops_them(pool, clock):
    pool.write(puts(KEYS[:1], transient_s=5.0))
    pool.write(puts(KEYS[:1], transient_s=5.0))
    assert pool.drop(KEYS[:1]) == 0 and pool.match(KEYS[:1]) == 1
    assert pool.drop(KEYS[:1]) == 1 and pool.match(KEYS[:1]) == 0
    pool.write(puts(KEYS[:1], transient_s=5.0))
    clock.wind(5.0)
    assert pool.match(KEYS[:1]) == 0 and pool.audit() == []


def test_a_fill_that_raises_gives_its_slots_back(pool):
    def broken(room):
        raise RuntimeError("no data")

    blocks = [*puts(KEYS[:2]), Put(KEYS[2], LAYOUT.block_size, broken, KEYS[1]), *puts(KEYS[3:4], KEYS[2])]
    with pytest.raises(RuntimeError, match="no data"):
        pool.write(blocks)
    assert pool.match(KEYS) == 2 and pool.audit() == []
    assert [r.outcome for r in pool.write(puts(KEYS[:4]))] == [Outcome.DUPLICATE] * 2 + [Outcome.STORED] * 2


def test_a_flipped_byte_is_a_miss_and_never_served(pool):
    pool.write(puts(KEYS[:4]))
    slot = pool._store._index[KEYS[2]].slot
    pool._memory.slot(slot, LAYOUT.block_size)[77] ^= 1
    with pool.read(KEYS[:4]) as read:
        assert len(read.blocks) == 2
    assert pool.counts().misses == {"corrupt": 1, "absent": 1}
    assert pool.match(KEYS) == 2 and pool.audit() == []


def test_a_full_pool_moves_blocks_to_files_and_serves_them_from_there(tmp_path):
    pool = EmbeddedPool(LAYOUT, room_for(8), file_size=64 * LAYOUT.block_size, file_dir=tmp_path)
    try:
        results = pool.write(puts(KEYS[:40]), budget_s=20)
        assert [r.outcome for r in results] == [Outcome.STORED] * 40
        assert pool.match(KEYS) == 40, "a block was lost on its way to the file tier"
        tiers = set()
        for at in range(0, 40, 4):
            with pool.read(KEYS[at : at + 4], budget_s=20) as read:
                assert [bytes(b.data) for b in read.blocks] == [payload(key) for key in KEYS[at : at + 4]]
                tiers |= {block.tier for block in read.blocks}
        assert Tier.FILE in tiers
        assert pool.match(KEYS) == 40
    finally:
        pool.close()
    assert list(tmp_path.iterdir()) == []


def test_many_threads_read_only_what_was_put_under_a_key():
    pool = EmbeddedPool(LAYOUT, room_for(12))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = Random(seed)
        try:
            for _ in range(60):
                start = rng.randrange(40)
                keys = KEYS[start : start + rng.randrange(1, 6)]
                if rng.random() < 0.5:
                    pool.write(puts(keys, KEYS[start - 1] if start else None))
                else:
                    with pool.read(keys) as read:
                        copies = [bytes(block.data) for block in read.blocks]
                        whole = read.whole()
                    assert copies[:whole] == [payload(key) for key in keys[:whole]]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert pool.audit() == []
    pool.close()


def test_a_closed_pool_misses_and_refuses_and_what_was_read_stays_readable(tmp_path):
    pool = EmbeddedPool(LAYOUT, room_for(8), file_size=64 * LAYOUT.block_size, file_dir=tmp_path)
    pool.write(puts(KEYS[:12]), budget_s=20)
    with pool.read(KEYS[8:12], budget_s=20) as read:
        pool.close()
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[8:12]]
        assert read.whole() == 4
    assert pool.match(KEYS) == 0 and pool.drop(KEYS) == 0 and not pool.alive()
    with pool.read(KEYS[:12], budget_s=20) as nothing:
        assert list(nothing.blocks) == []
    assert pool.counts().misses == {"rank_down": 12}
    late = pool.write(puts(KEYS[40:60]), budget_s=20)
    assert {(r.outcome, r.reason) for r in late} == {(Outcome.REFUSED, "the pool is closed")}
    pool.audit()


class AtOnce:
    """A file tier whose moves are over before they were handed out; says in which order things were begun and ended."""

    def __init__(self, files, log):
        self._files, self._log = files, log

    def __getattr__(self, name):
        return getattr(self._files, name)

    def write(self, slot, data, key, **about):
        future = self._files.write(slot, data, key, **about)
        future.exception(20)
        self._log.append("begun")
        return future

    def read(self, slot, out, key, **about):
        future = self._files.read(slot, out, key, **about)
        future.exception(20)
        return future


def test_a_move_that_is_over_at_once_is_told_to_the_rules_after_everything_else_was_begun(tmp_path):
    """Told in the midst of it, the rules would free and stamp slots that later actions of the batch speak of."""
    pool, log = EmbeddedPool(LAYOUT, room_for(32), file_size=99 * LAYOUT.block_size, file_dir=tmp_path), []
    pool._tiers.files = AtOnce(pool._tiers.files, log)
    demoted = pool._store.demoted
    pool._store.demoted = lambda *what: (log.append("told"), demoted(*what))
    try:
        pool.write(puts(KEYS[:32]), budget_s=20)
        log.clear()
        results = pool.write(puts(KEYS[100:110]), budget_s=20)
        assert {result.outcome for result in results} == {Outcome.STORED}
        first = log[: log.index("told")]
        assert len(first) > 1 and log[len(first) : 2 * len(first)] == ["told"] * len(first), log
        assert pool.match(KEYS[:32]) == 32
        with pool.read(KEYS[:32], budget_s=20) as read:
            assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:32]]
    finally:
        pool.close()
