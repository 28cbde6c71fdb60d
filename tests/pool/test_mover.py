"""What the mover commits elsewhere is what the block was, or nothing; and it never waits longer than it may."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from blocks import KEYS, LAYOUT, payload, room_for
from watching import CONFIG, clean, found, until

from kvtool.kv.copying import Copy, CopyOf, Outcome, Why
from kvtool.kv.retention import Retention
from kvtool.kv.source import Source
from kvtool.pool.client import PoolClient
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.memory import SlotMemory
from kvtool.pool.mover import Mover
from kvtool.pool.state import read_state
from kvtool.transfer.checksum import checksum
from kvtool.transfer.files import BlockFile

pytestmark = pytest.mark.real

SIZE = LAYOUT.block_size
SMALL = replace(CONFIG, ranks=1, dram_size=room_for(24), file_size=0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    handle = start_pool(SMALL, tmp_path_factory.mktemp("small"))
    yield handle
    stop_pool(handle.run_dir)


@pytest.fixture
def files(tmp_path):
    with BlockFile(tmp_path / "own.blocks", SIZE, 16, fresh=True) as file:
        yield file


@pytest.fixture
def memory():
    return SlotMemory(memoryview(bytearray(room_for(16))), 16, SIZE)


@pytest.fixture
def mover(memory, files):
    mover = Mover(7, LAYOUT, memory, files, budget_s=0.5)
    yield mover
    mover.close()


def sources(keys, memory, files=None) -> list[Source]:
    """Blocks in slots of `memory`, or in the file."""
    made = []
    for slot, key in enumerate(keys):
        sum_ = checksum(payload(key), key)
        if files is None:
            memory.slot(slot, SIZE)[:] = payload(key)
            made.append(Source(key, SIZE, sum_, None, Retention(), slot, -1, 0))
        else:
            files.write(slot, payload(key), key, generation=5).result(5)
            made.append(Source(key, SIZE, sum_, None, Retention(), -1, slot, 5))
    return made


def copy_of(keys, why=Why.PUT, ttl_s=None, number=1) -> Copy:
    return Copy(number, 0, why, tuple(CopyOf(key, SIZE, ttl_s) for key in keys))


def carried(mover, small, keys, where, **how) -> list[Outcome]:
    state = read_state(small.state_file)
    return mover.carry(copy_of(keys, **how), where, state, state.ranks[0])


def test_blocks_in_slots_and_in_files_arrive_whole_and_only_once(small, mover, memory, files):
    keys = KEYS[:8]
    where = sources(keys[:4], memory) + sources(keys[4:], memory, files)
    assert carried(mover, small, keys, where) == [Outcome.STORED] * 8
    assert carried(mover, small, keys, where) == [Outcome.THERE] * 8
    client = PoolClient(small.state_file, LAYOUT)
    with client.read(keys) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in keys]
    client.close()
    until(lambda: clean(small.run_dir), 1, "nothing is held")


def test_a_source_that_went_bad_is_not_committed_and_the_others_are_tried_again(small, mover, memory, files):
    keys = KEYS[20:24]
    where = sources(keys, memory)
    memory.slot(2, SIZE)[77] ^= 1
    outcomes = carried(mover, small, keys, where)
    assert outcomes[2] is Outcome.DAMAGED and set(outcomes[:2] + outcomes[3:]) == {Outcome.RETRY}
    client = PoolClient(small.state_file, LAYOUT)
    assert client.match([keys[2]]) == 0
    client.close()
    until(lambda: clean(small.run_dir), 1, "what was reserved is given back")
    assert carried(mover, small, keys[:2], where[:2]) == [Outcome.STORED] * 2


def test_a_torn_file_block_is_gone_and_its_neighbours_arrive(small, mover, memory, files):
    keys = KEYS[30:33]
    where = sources(keys, memory, files)
    files.write(1, payload(KEYS[90]), KEYS[90], generation=6).result(5)
    assert carried(mover, small, keys, where) == [Outcome.STORED, Outcome.DAMAGED, Outcome.STORED]
    assert carried(mover, small, keys[:1], [None]) == [Outcome.GONE]


def test_mending_takes_free_room_only_and_a_put_makes_room(small, mover, memory, files):
    slots = pool_status(small.run_dir).ranks[0].answer["slots"]
    client = PoolClient(small.state_file, LAYOUT)
    for at in range(0, slots, 8):
        keys = KEYS[100 + at : 108 + at]
        carried(mover, small, keys, sources(keys, memory))
    before = pool_status(small.run_dir).ranks[0].answer["counts"]["evicted"]
    key = KEYS[200:201]
    assert carried(mover, small, key, sources(key, memory), why=Why.MEND) == [Outcome.NO_ROOM]
    assert carried(mover, small, key, sources(key, memory), why=Why.NEAR, ttl_s=9.0) == [Outcome.NO_ROOM]
    assert pool_status(small.run_dir).ranks[0].answer["counts"]["evicted"] == before
    assert carried(mover, small, key, sources(key, memory), why=Why.PUT) == [Outcome.STORED]
    assert pool_status(small.run_dir).ranks[0].answer["counts"]["evicted"] > before and found(client, key) == 1
    client.close()


def test_a_near_copy_ends_by_the_clock(small, mover, memory, files):
    client = PoolClient(small.state_file, LAYOUT)
    room = KEYS[210:218]
    carried(mover, small, room, sources(room, memory), why=Why.PUT, ttl_s=0.05)
    until(lambda: client.match(room[:1]) == 0, 2, "short ones are gone")
    key = KEYS[220:221]
    assert carried(mover, small, key, sources(key, memory), why=Why.NEAR, ttl_s=0.5) == [Outcome.STORED]
    assert found(client, key) == 1
    assert carried(mover, small, key, sources(key, memory), why=Why.NEAR, ttl_s=0.5) == [Outcome.THERE]
    until(lambda: client.match(key) == 0, 3, "it went when its time was up")
    client.close()


def test_a_hung_rank_costs_one_budget_and_is_tried_again(small, mover, memory, files):
    keys = KEYS[240:242]
    where = sources(keys, memory)
    carried(mover, small, keys[:1], where[:1])
    pid = read_state(small.state_file).ranks[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert carried(mover, small, keys[1:], where[1:]) == [Outcome.RETRY]
        assert time.monotonic() - began_s < 1.5
        began_s = time.monotonic()
        assert carried(mover, small, keys[1:], where[1:]) == [Outcome.RETRY]
        assert time.monotonic() - began_s < 0.2, "known to hang: no wait"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: carried(mover, small, keys[1:], where[1:])[0] in (Outcome.STORED, Outcome.THERE), 3, "it goes on")
    until(lambda: clean(small.run_dir), 3, "nothing is left of the broken copies")
