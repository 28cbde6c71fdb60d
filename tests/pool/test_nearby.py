"""Blocks found and copied without a message: right bytes or none, whatever the rank does meanwhile."""

from __future__ import annotations

import threading
from random import Random

import pytest
from blocks import LAYOUT, payload

from kvtool.kv.record import IN_FILE, NOWHERE, Stamp, Whereabouts
from kvtool.pool.base import Path, Tier
from kvtool.pool.buffers import rooms_of
from kvtool.pool.directory import TRUST_S, Directory, segment_size
from kvtool.pool.memory import SlotMemory
from kvtool.pool.nearby import USES_MAX, USES_S, nearby
from kvtool.transfer.checksum import checksum

SIZE = LAYOUT.block_size
KEYS = [Random(n).randbytes(32) for n in range(600)]


class RankMemory:
    """What a rank does to its memory, without the rank. `told`: the uses that it heard of."""

    def __init__(self, slots: int = 24, files: int = 600) -> None:
        self.view = memoryview(bytearray(segment_size(slots, SIZE, files)))
        self.memory = SlotMemory(self.view, slots, SIZE)
        region = self.view[SlotMemory.size(slots, SIZE) :]
        self.directory = Directory(region, slots + files)
        self.now_s = 100.0
        self.directory.beat(self.now_s)
        self.told: list[tuple[int, int]] = []
        self.near = nearby(self.memory, region, 0, lambda: self.now_s, self.told.extend)
        self.at: dict[bytes, int] = {}
        self.generation = 0

    def put(self, key: bytes, slot: int, data: bytes = b"", transient: bool = False) -> None:
        for other, there in list(self.at.items()):
            if slot >= 0 and there == slot:
                self.move(other, NOWHERE)
        if slot >= 0:
            data = data or payload(key)
            self.generation += 1
            self.memory.stamp(Stamp(slot, self.generation))
            self.memory.slot(slot, SIZE)[:] = data
            self.memory.stamp(Stamp(slot, self.generation, key, SIZE, checksum(payload(key), key)))
        self.move(key, slot, transient)

    def move(self, key: bytes, slot: int, transient: bool = False) -> None:
        self.directory.place(Whereabouts(key, self.at.pop(key, NOWHERE), slot, transient))
        if slot != NOWHERE:
            self.at[key] = slot


@pytest.fixture
def rank():
    return RankMemory()


def buffers(count: int) -> list[bytearray]:
    return [bytearray(SIZE) for _ in range(count)]


@pytest.mark.parametrize("count", [3, 20])
def test_blocks_in_memory_are_copied_and_their_uses_told_the_last_first(rank, count):
    for slot, key in enumerate(KEYS[:count]):
        rank.put(key, slot)
    into = buffers(count)
    got = rank.near.get(KEYS[:count], rooms_of(into), leading=True)
    assert [bytes(data) for data in into] == [payload(key) for key in KEYS[:count]]
    assert {(one.size, one.tier, one.path) for one in got} == {(SIZE, Tier.DRAM, Path.SHM)}
    rank.near.flush()
    assert rank.told == [(slot, slot + 1) for slot in reversed(range(count))]


@pytest.mark.parametrize("count", [4, 20])
@pytest.mark.parametrize("why", ["in its file", "gone", "torn", "small room"])
def test_what_cannot_be_vouched_for_is_left_to_the_rank(rank, count, why):
    for slot, key in enumerate(KEYS[:count]):
        rank.put(key, slot)
    into, bad = buffers(count), KEYS[2]
    if why == "in its file":
        rank.move(bad, IN_FILE)
    elif why == "gone":
        rank.move(bad, NOWHERE)
    elif why == "torn":
        rank.memory.slot(2, SIZE)[5] ^= 1
    else:
        into[2] = bytearray(SIZE - 1)
    got = rank.near.get(KEYS[:count], rooms_of(into), leading=True)
    assert [one is not None for one in got[:3]] == [True, True, False][: len(got)] and len(got) >= 2
    got = rank.near.get(KEYS[:count], rooms_of(into), leading=False)
    assert [one is not None for one in got] == [at != 2 for at in range(count)]


def test_match_counts_what_is_in_files_too_and_asks_when_it_is_not_sure(rank):
    for slot, key in enumerate(KEYS[:10]):
        rank.put(key, slot if slot % 3 else IN_FILE)
    assert rank.near.match(KEYS[:12]) == 10 and rank.near.has(KEYS[8:12]) == [True, True, False, False]
    assert rank.near.match(KEYS[:1]) == 1 and rank.near.match(KEYS[11:12]) == 0 and rank.near.match([]) is None
    rank.memory.stamp(Stamp(4, 99))  # given away, and not listed anew yet
    assert rank.near.match(KEYS[:12]) is None and rank.near.has(KEYS[:12]) is None


@pytest.mark.parametrize("count", [5, 12])
def test_only_blocks_that_are_there_to_stay_make_a_put_needless(rank, count):
    for slot, key in enumerate(KEYS[:count]):
        rank.put(key, slot, transient=slot == 1)
    rank.move(KEYS[2], IN_FILE)
    assert rank.near.holds(KEYS[: count + 1]) == [at not in (1, 2, count) for at in range(count + 1)]
    rank.near.flush()
    assert {slot for slot, _ in rank.told} == set(range(count)) - {1, 2}


def test_rank_that_fell_silent_is_not_believed(rank):
    rank.put(KEYS[0], 0)
    rank.now_s += TRUST_S * 1.01
    assert rank.near.match(KEYS[:1]) is None and rank.near.has(KEYS[:1]) is None
    assert rank.near.holds(KEYS[:1]) == [False] and rank.near.get(KEYS[:1], rooms_of(buffers(1)), True) == ()
    rank.directory.beat(rank.now_s)
    assert rank.near.match(KEYS[:1]) == 1


def test_uses_are_told_in_batches(rank):
    rank.put(KEYS[0], 0)
    for _ in range(USES_MAX - 1):
        rank.near.holds(KEYS[:1])
    assert rank.told == []
    rank.near.holds(KEYS[:1])
    assert len(rank.told) == USES_MAX
    rank.near.holds(KEYS[:1])
    rank.now_s += USES_S * 1.01
    rank.near.holds(KEYS[:1])
    assert len(rank.told) == USES_MAX + 2


def test_memory_without_a_directory_is_used_by_messages():
    view = memoryview(bytearray(SlotMemory.size(4, SIZE)))
    memory = SlotMemory(view, 4, SIZE)
    assert nearby(memory, view[len(view) :], 0, lambda: 0.0, lambda uses: None) is None


def test_copies_made_while_the_rank_rewrites_its_slots_are_right_or_refused(rank):
    """One thread puts, moves and rewrites; two read: every block that they get has the bytes of its key."""
    stop, wrong, hits = threading.Event(), [], [0, 0]
    data = {key: payload(key) for key in KEYS[:60]}

    def read(reader: int) -> None:
        rng, into = Random(reader), buffers(8)
        while not stop.is_set():
            keys = rng.sample(KEYS[:60], 8 if rng.random() < 0.5 else 3)
            for key, one, room in zip(
                keys, rank.near.get(keys, rooms_of(into[: len(keys)]), False), into, strict=False
            ):
                if one is not None:
                    hits[reader] += 1
                    if bytes(room) != data[key]:
                        wrong.append(key)

    readers = [threading.Thread(target=read, args=(n,)) for n in range(2)]
    for reader in readers:
        reader.start()
    rng = Random(9)
    for _ in range(3000):
        key = rng.choice(KEYS[:60])
        if key in rank.at:
            rank.move(key, rng.choice([IN_FILE, NOWHERE]))
        else:
            rank.put(key, rng.randrange(24), data[key])
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == [] and min(hits) > 0


@pytest.mark.parametrize("whole", [True, False])
def test_views_in_place_are_leased_before_they_are_looked_at(rank, whole):
    for slot, key in enumerate(KEYS[:5]):
        rank.put(key, slot)
    leased: list[tuple[int, int]] = []
    views = rank.near.views(KEYS[:5], whole, leased.extend)
    assert leased == [(slot, generation) for slot, generation, _ in views] == [(n, n + 1) for n in range(5)]
    assert [bytes(data) for _, _, data in views] == [payload(key) for key in KEYS[:5]] and views[0][2].readonly
    assert int(rank.near.generations[3]) == 4
    more = rank.near.views(KEYS[:7], whole, leased.extend)
    assert more is None if whole else len(more) == 5
    rank.memory.slot(2, SIZE)[9] ^= 1
    assert rank.near.views(KEYS[:5], whole, leased.extend) is None, "the rank shall judge"
    rank.move(KEYS[2], IN_FILE)
    assert rank.near.views(KEYS[:5], whole, leased.extend) is None


def test_views_of_nothing_lease_nothing(rank):
    leased: list[tuple[int, int]] = []
    assert rank.near.views(KEYS[:3], False, leased.extend) == [] and leased == []
