"""The directory: true to a plain model under random changes, for one key and for many; sure only when it may be."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvtool.errors import ProtocolError
from kvtool.kv.record import IN_FILE, NOWHERE, Stamp, Whereabouts
from kvtool.pool.directory import (
    TRUST_S,
    Directory,
    DirectoryReader,
    directory_size,
    segment_size,
    slots_under,
)
from kvtool.pool.memory import SlotMemory

SLOTS, FILED, SIZE = 40, 60, 512


class Bench:
    """A rank's memory with its directory, and a client's look at it. Keys are in `at`, as the directory should say."""

    def __init__(self, entries: int = SLOTS + FILED) -> None:
        data = SlotMemory.size(SLOTS, SIZE)
        self.view = memoryview(bytearray(data + directory_size(entries)))
        self.memory = SlotMemory(self.view, SLOTS, SIZE)
        self.directory = Directory(self.view[data:], entries, incarnation=3)
        self.reader = DirectoryReader(self.view[data:].toreadonly(), self.memory, incarnation=3)
        self.at: dict[bytes, int] = {}
        self.generation = 0

    def put(self, key: bytes, slot: int, transient: bool = False) -> None:
        if slot >= 0:
            self.generation += 1
            self.memory.stamp(Stamp(slot, self.generation))
            self.memory.stamp(Stamp(slot, self.generation, key, SIZE, self.generation * 7))
        was = self.at.pop(key, NOWHERE)
        if slot != NOWHERE:
            self.at[key] = slot
        self.directory.place(Whereabouts(key, was, slot, transient))

    def free_slot(self) -> int:
        return next(iter(set(range(SLOTS)) - set(self.at.values())), IN_FILE)


def key_of(n: int) -> bytes:
    return np.random.default_rng(n).bytes(32)


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_is_what_was_placed(seed):
    rng, bench = Random(seed), Bench()
    keys = [key_of(n) for n in range(120)]
    for _ in range(300):
        key = rng.choice(keys)
        slot = rng.choice([bench.free_slot(), bench.free_slot(), IN_FILE, NOWHERE])
        if slot == NOWHERE and key not in bench.at:
            continue
        bench.put(key, slot)
        asked = [*rng.sample(keys, rng.randrange(1, 20)), key]
        for one in asked:
            spot = bench.reader.find(one)
            assert (spot.slot if spot else None) == (bench.at[one] if bench.at.get(one, NOWHERE) >= 0 else None)
        held = [k for k in keys if k in bench.at][: rng.randrange(30)] + asked
        spots = bench.reader.look(held)
        count = next((n for n, k in enumerate(held) if k not in bench.at), len(held))
        assert (spots.count, spots.sure) == (count, True)
        assert spots.in_dram.tolist() == [bench.at.get(k, NOWHERE) >= 0 for k in held]
        assert all(slot == bench.at[k] for k, slot, here in zip(held, spots.slots, spots.in_dram, strict=True) if here)
    assert bench.directory.unlisted == 0


def test_slot_that_is_given_away_is_seen_in_the_second_look():
    bench = Bench()
    keys = [key_of(n) for n in range(10)]
    for slot, key in enumerate(keys):
        bench.put(key, slot, transient=slot == 0)
    spot, spots = bench.reader.find(keys[4]), bench.reader.look(keys)
    assert spot.facts == (5, SIZE, 35) and not spot.transient and bench.reader.find(keys[0]).transient
    assert spots.in_dram.all() and spots.transient.tolist() == [True] + [False] * 9
    assert bench.reader.still(spot) and all(bench.reader.same(slot, spots.rows[slot]) for slot in range(10))
    bench.memory.stamp(Stamp(4, 99))
    assert not bench.reader.still(spot)
    assert [bench.reader.same(slot, spots.rows[slot]) for slot in range(10)].index(False) == 4
    assert bench.reader.find(keys[4]) is None, "its header names nobody"
    again = bench.reader.look(keys)
    assert (again.count, again.sure) == (4, False), "listed, and not there: the rank must be asked"


def test_keys_that_collide_are_counted_and_absence_is_not_sure_any_more():
    bench = Bench(entries=20)
    keys = [key_of(n) for n in range(600)]
    for n, key in enumerate(keys):
        bench.put(key, IN_FILE if n >= SLOTS else n)
    missing = [key for key in keys if not bench.reader.look([key]).count]
    assert len(missing) == bench.directory.unlisted > 0
    assert not bench.reader.look([missing[0]]).sure and not bench.reader.look([key_of(-1 % 2**31)]).sure
    for key in keys:
        bench.put(key, NOWHERE)
    assert bench.directory.unlisted == 0 and bench.reader.look([missing[0]]).sure
    assert not bench.reader._table.any(), "words are left behind"


def test_plain_keys_spread_over_the_buckets():
    bench = Bench()
    for n in range(100):
        bench.put(n.to_bytes(32, "little" if n % 2 else "big"), IN_FILE if n >= SLOTS else n)
    assert bench.directory.unlisted == 0


def test_rank_is_believed_only_while_its_heart_beats():
    bench = Bench()
    assert not bench.reader.trusted(1000.0)
    bench.directory.beat(1000.0)
    assert bench.reader.trusted(1000.0 + TRUST_S * 0.9) and not bench.reader.trusted(1000.0 + TRUST_S * 1.1)


def test_directory_of_another_incarnation_is_refused():
    bench = Bench()
    view = bench.view[SlotMemory.size(SLOTS, SIZE) :]
    with pytest.raises(ProtocolError, match="incarnation 3 of the rank, wanted 4"):
        DirectoryReader(view, bench.memory, incarnation=4)
    with pytest.raises(ProtocolError, match="no directory in the rank's memory"):
        DirectoryReader(memoryview(bytearray(8192)), bench.memory)


@pytest.mark.parametrize("cap, file_slots", [(2**20, 0), (2**20, 5000), (2**28, 2**20), (2**16, 10**6)])
def test_slots_headers_and_directory_stay_under_the_cap(cap, file_slots):
    slots = slots_under(cap, 4096, file_slots)
    assert slots == 0 or segment_size(slots, 4096, file_slots) <= cap
    assert segment_size(slots + 4, 4096, file_slots) > cap
