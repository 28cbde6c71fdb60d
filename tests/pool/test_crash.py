"""A crash at every point of a run, with every outcome that a disk may choose for what it had not synced.

The very code of a rank (`Store`, `Tiers`, `BlockFile`) runs on a disk that remembers every write and sync. Then, for
every prefix of what it did, and for subsets of the pages that were written since the last sync, some of them torn in
the middle, a new rank starts from what would be on the platter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import pytest
from diskrank import KEYS, SIZE, Rank, Remembering, payload

from kvtool.errors import BlockCorrupt
from kvtool.kv.record import Commit, State
from kvtool.transfer.checksum import checksum
from kvtool.transfer.filehead import PAGE

SUBSETS_MAX = 24


def run(rng: Random, through: bool, steps: int) -> tuple[Remembering, list[tuple[int, set[bytes]]]]:
    """A random run; what was durable after each step, with how long the log was then."""
    disk = Remembering()
    rank = Rank(disk, through)
    history = [(len(disk.log), rank.durable())]
    for number in range(steps):
        rank.now_s += 0.1
        at = rng.randrange(len(KEYS))
        if rng.random() < 0.7:
            result = rank.put(KEYS[at], KEYS[at - 1] if at % 4 else None)
            assert result in ((None, Commit.DURABLE) if through else (None, Commit.STORED))
        else:
            found = rank.get(number, KEYS[at])
            assert found in (None, payload(KEYS[at]))
        history.append((len(disk.log), rank.durable()))
    return disk, history


def crashes(disk: Remembering, rng: Random, honest: bool) -> Iterator[tuple[int, bytes]]:
    """(length of the log, what is on the platter) for every prefix, and many fates of its pages without a sync."""
    synced, platter, size = 0, bytearray(len(disk.image)), len(disk.image)
    for end in range(len(disk.log) + 1):
        if end and disk.log[end - 1] is None and honest:
            for write in disk.log[synced:end]:
                if write is not None:
                    platter[write[0] : write[0] + len(write[1])] = write[1]
            synced = end
        loose = [write for write in disk.log[synced:end] if write is not None]
        pages = [(at + step, raw[step : step + PAGE]) for at, raw in loose for step in range(0, len(raw), PAGE)]
        for fate in fates(len(pages), rng):
            image = bytearray(platter)
            for (at, raw), kept in zip(pages, fate, strict=True):
                image[at : at + kept] = raw[:kept]
            assert len(image) == size
            yield end, bytes(image)


def fates(pages: int, rng: Random) -> Iterator[tuple[int, ...]]:
    """How many bytes of each page were written: all subsets of few pages, a sample of many; torn pages among them."""
    if 2**pages <= SUBSETS_MAX:
        yield from itertools.product((0, PAGE), repeat=pages)
    else:
        yield (PAGE,) * pages
        yield (0,) * pages
        for _ in range(SUBSETS_MAX - 2):
            yield tuple(rng.choice((0, PAGE)) for _ in range(pages))
    for _ in range(min(pages, 6)):
        yield tuple(rng.choice((0, PAGE, PAGE, 512 * rng.randrange(8))) for _ in range(pages))


def must_be_there(history: list[tuple[int, set[bytes]]], end: int) -> set[bytes]:
    """What was durable before the step that the crash cut short, and still is after it."""
    before = [durable for length, durable in history if length <= end]
    after = next((durable for length, durable in history if length >= end), history[-1][1])
    return before[-1] & after if before else set()


@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("honest", [True, False])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_after_a_crash_at_any_point_durable_blocks_are_served_and_never_a_torn_one(seed, through, honest):
    rng = Random(seed)
    disk, history = run(rng, through, steps=40)
    checked = served = corrupt = 0
    for end, image in crashes(disk, rng, honest):
        rank = Rank(Remembering(bytearray(image)), through)
        wanted = must_be_there(history, end) if honest else set()
        assert rank.store.lost_slots() == 0 and wanted <= set(rank.store.resident())
        for key, entry in list(rank.store._index.items()):
            out = bytearray(SIZE)
            try:
                rank.file.read(entry.file_slot, out, key, generation=entry.record).result(0)
            except BlockCorrupt:
                corrupt += 1
                assert key not in wanted, "a durable block is torn"
            else:
                served += 1
                assert out == payload(key) and entry.checksum == checksum(out, key), "a torn block is served"
        checked += 1
    assert checked > 100 and served > 100 and corrupt > 0


@pytest.mark.parametrize("through", [True, False])
def test_a_rank_that_starts_after_a_crash_goes_on(through):
    """Reads, puts and a second crash on top of what the first one left."""
    rng = Random(7)
    disk, _ = run(rng, through, steps=30)
    images = [image for _, image in crashes(disk, rng, honest=True)]
    for image in rng.sample(images, 40):
        rank = Rank(Remembering(bytearray(image)), through)
        highest = max((entry.record for entry in rank.store._index.values()), default=0)
        for number, key in enumerate(KEYS):
            assert rank.get(number, key) in (None, payload(key))
            rank.put(key, None)
        assert rank.store.lost_slots() == 0
        records = [entry.record for entry in rank.store._index.values() if entry.file_slot >= 0]
        assert len(set(records)) == len(records) and max(records) > highest
        again = Rank(Remembering(bytearray(rank.disk.image)), through)
        for key, state in rank.store.resident().items():
            if state is State.FILED:
                assert again.get(0, key) == payload(key)
