"""Clients of ranks that die, hang or are slow: what they lose, what they find elsewhere, what they leave behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
from blocks import KEYS, LAYOUT, payload, puts, room_for
from watching import clean, keys_of, slot_of, stopped, until

from kvtool.pool import Cancel, PoolClient, connect
from kvtool.pool.base import Outcome, Tier
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import start_pool, stop_pool
from kvtool.pool.link import Link
from kvtool.pool.pace import Pace
from kvtool.pool.state import read_state

pytestmark = pytest.mark.real

SIZE = LAYOUT.block_size
COUNT = 24


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Three ranks that keep every block twice."""
    config = PoolConfig(
        LAYOUT, ranks=3, dram_size=room_for(96), file_size=0, ucx=False, copies=2, lease_term_s=1, reserve_term_s=1
    )
    handle = start_pool(config, tmp_path_factory.mktemp("copied"))
    yield handle
    stop_pool(handle.run_dir)


@pytest.fixture
def reader(copied):
    """By socket: what is found in mapped memory needs nobody's answer for a while."""
    with connect(copied.run_dir, path="socket", client_name="reader") as client:
        yield client


def room(count):
    return [bytearray(SIZE) for _ in range(count)]


def twice(client: PoolClient, tag: bytes, count: int = COUNT) -> list[bytes]:
    """Blocks that two ranks hold each."""
    keys = [tag + key[len(tag) :] for key in KEYS[:count]]
    results = client.write(puts(keys), 10)
    assert {(r.outcome, r.reason) for r in results} <= {(Outcome.STORED, ""), (Outcome.DUPLICATE, "")}
    until(lambda: sum(sum(client.exists(keys, at=rank)) for rank in range(3)) == 2 * count, 5, "every block has a copy")
    return keys


def got_all(client, keys, budget_s=5.0) -> float:
    began_s, buffers = time.monotonic(), room(len(keys))
    result = client.get_into(keys, buffers, budget_s)
    assert result.count == len(keys), [got.reason for got in result.blocks]
    assert [bytes(buffer) for buffer in buffers] == [payload(key) for key in keys]
    return time.monotonic() - began_s


def test_blocks_are_found_at_any_owner_and_put_at_the_first_that_is_there(reader, copied):
    keys = twice(reader, b"any")
    for rank in range(3):
        theirs = [key for key, there in zip(keys, reader.exists(keys, at=rank), strict=True) if there]
        assert theirs and reader.get_into(theirs, room(len(theirs)), at=rank).count == len(theirs)
        assert reader.match(theirs, at=f"{reader._ranks.named(rank).state.identity}") == len(theirs)
    assert reader.match(keys, at=17) == 0


def test_a_hung_rank_costs_a_hedge_and_not_the_budget(reader, copied):
    keys = twice(reader, b"hung")
    got_all(reader, keys)
    with stopped(copied.rank_pids[1:2]):
        assert got_all(reader, keys, 10.0) < 2.0
        assert reader.match(keys, 10.0) == COUNT
        with reader.read(keys, 10.0) as read:
            assert len(read.blocks) == COUNT
        hedges = reader.counts().hedges
        assert 0 < hedges["won"] <= hedges["asked"]
    until(lambda: reader.alive() and clean(copied.run_dir), 3, "late answers are undone")
    got_all(reader, keys)


def test_a_put_goes_to_the_next_owner_when_the_first_hangs(reader, copied):
    twice(reader, b"warm")
    keys = [b"next" + key[4:] for key in KEYS[:12]]
    with stopped(copied.rank_pids[2:3]):
        first = reader.write(puts(keys), 0.5)
        assert {r.outcome for r in first} <= {Outcome.STORED, Outcome.FAILED}
        again = reader.write(puts(keys), 2.0)
        assert {r.outcome for r in again} <= {Outcome.STORED, Outcome.DUPLICATE}
        assert got_all(reader, keys) < 2.0
    until(lambda: reader.alive() and clean(copied.run_dir), 3, "late reservations are aborted")


def test_a_stalled_pool_costs_one_budget_once_and_then_nothing(reader, copied):
    keys = twice(reader, b"stall")
    with stopped(copied.rank_pids):
        began_s = time.monotonic()
        result = reader.get_into(keys, room(COUNT), 0.4)
        assert result.count == 0 and {got.reason for got in result.blocks} <= {"timeout", "rank_down"}
        assert time.monotonic() - began_s < 0.8
        began_s = time.monotonic()
        for _ in range(50):
            assert reader.get_into(keys, room(COUNT), 0.4).count == 0
            assert reader.match(keys, 0.4) == 0
            assert {r.outcome for r in reader.write(puts(keys), 0.4)} == {Outcome.FAILED}
        assert time.monotonic() - began_s < 1.0, "150 calls within what is less than three budgets"
        counts = reader.counts()
        assert list(counts.breakers.values()) == ["open"] * 3 and sum(counts.breaks.values()) >= 3
        assert counts.blocks_asked == sum(counts.hits.values()) + sum(counts.misses.values())
    until(lambda: reader.match(keys) == COUNT, 3, "it is found again by its late answers")
    until(lambda: reader.alive() and not reader.counts().breakers, 3, "and so is every rank")
    until(lambda: reader.alive() and clean(copied.run_dir), 3, "nothing is left of the calls that timed out")


def test_a_rank_that_lost_a_request_is_asked_again(reader, copied):
    """The unanswered request is the probe; should it be lost, a ping is."""
    link = reader._ranks.named(0).link
    reader.match(KEYS[:4], at=0)
    until(lambda: link.connected, 2, "connected")
    link._given_up[10**9] = (None, 0)  # never asked, so never answered
    link._open()
    assert not link.usable
    until(lambda: link.usable, 3, "a ping closed the breaker")


def test_a_killed_ranks_blocks_are_read_from_their_copies_at_once(tmp_path):
    config = PoolConfig(LAYOUT, ranks=3, dram_size=room_for(64), file_size=0, ucx=False, copies=2, lease_term_s=1)
    handle = start_pool(config, tmp_path)
    try:
        with connect(handle.run_dir) as client:
            keys = twice(client, b"kill")
            assert keys_of(client, 1, keys)
            os.kill(handle.rank_pids[1], signal.SIGKILL)
            assert got_all(client, keys) < 1.0
            assert client.match(keys) == COUNT
    finally:
        stop_pool(handle.run_dir)


class Crash(BaseException):
    """The client's process ends here, and says nothing to anybody."""


def test_a_transfer_with_insert_is_atomic_wherever_it_breaks_off(reader, copied, monkeypatch):
    """The client dies before its first message, before its second, and so on, until it gets through."""
    send, died = Link._send, True
    step = 0
    while died:
        step += 1
        keys = [b"move%02d" % step + key[6:] for key in KEYS[:6]]
        reader.write(puts(keys))
        mover, left, died = connect(copied.run_dir, client_name="mover"), [step], False

        def counted(link, *arguments, mover=mover, left=left):
            if link in [access.link for access in mover._ranks.all()]:
                left[0] -= 1
                if left[0] <= 0:
                    raise Crash
            send(link, *arguments)

        monkeypatch.setattr(Link, "_send", counted)
        before = reader.exists(keys, at=2)
        try:
            results = mover.transfer_with_insert(keys, 2)
            assert {r.outcome for r in results} <= {Outcome.STORED, Outcome.DUPLICATE}
        except Crash:
            died = True
        monkeypatch.setattr(Link, "_send", send)
        mover._ranks.abandon()  # as the kernel does it
        until(lambda: clean(copied.run_dir), 4, f"died at step {step}: nothing is held")
        there = [key for key, is_there in zip(keys, reader.exists(keys, at=2), strict=True) if is_there]
        assert len(there) >= sum(before)
        buffers = room(len(there))
        assert reader.get_into(there, buffers, at=2).hits == len(there)
        assert [bytes(buffer) for buffer in buffers] == [payload(key) for key in there]
        if not died:
            assert there == keys
    assert step > 4, "no crash point was tried"


def test_a_transfer_is_for_a_while_and_ends_with_what_is_missing(reader, copied):
    keys = [b"pass" + key[4:] for key in KEYS[:8]]
    reader.write(puts(keys[:5]))
    outside = [key for key, there in zip(keys[:5], reader.exists(keys[:5], at=0), strict=True) if not there]
    results = reader.transfer(outside, 0, keep_s=0.3)
    assert {r.outcome for r in results} <= {Outcome.STORED, Outcome.DUPLICATE}
    results = reader.transfer_with_insert(keys, 1)
    assert [r.outcome for r in results[5:]] == [Outcome.FAILED] * 3 and {r.reason for r in results[5:]} == {"absent"}
    assert reader.exists(keys, at=1) == [True] * 5 + [False] * 3


def test_ten_thousand_blocks_are_read_in_parts_under_a_lease_of_one_second(tmp_path):
    from kvtool.kv.block import KeySeed, block_keys
    from kvtool.kv.layout import KVLayout
    from kvtool.pool.memory import SlotMemory

    small = KVLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=4)
    count = 10_000
    keys = block_keys(KeySeed("long", "model", small.fingerprint).digest(), range(count * 4), 4)
    size = SlotMemory.size(count + 500, small.block_size)
    handle = start_pool(PoolConfig(small, ranks=1, dram_size=size, file_size=0, ucx=False, lease_term_s=1), tmp_path)
    try:
        with connect(handle.run_dir) as client:
            stored = bytearray(os.urandom(count * small.block_size))
            blocks = [memoryview(stored)[at : at + small.block_size] for at in range(0, len(stored), small.block_size)]
            assert {r.outcome for r in client.put_from(keys, blocks, 30)} == {Outcome.STORED}
            out = bytearray(len(stored))
            rooms = [memoryview(out)[at : at + small.block_size] for at in range(0, len(out), small.block_size)]
            assert client.match(keys) == count
            assert client.get_into(keys, rooms, 30).count == count and out == stored
            cancel = Cancel()
            asked, take = [], client._calls._lookup

            def counted(*arguments):
                asked.append(len(arguments[0]))
                if len(asked) == 3:
                    cancel.set()
                return take(*arguments)

            client._calls._lookup = counted
            result = client.get_into(keys, rooms, 30, cancel=cancel)
            assert result.count == sum(asked[:2]) and result.blocks[-1].reason == "cancelled"
            client._calls.pace = Pace(4000 * small.block_size)
            with client.read(keys, 10) as read:
                assert len(read.blocks) == 2000, "what can be verified in half of the second"
            assert client.counts().misses["too_long"] == count - 2000
    finally:
        stop_pool(handle.run_dir)


@pytest.mark.parametrize("path", ["shm", "socket"])
def test_a_flipped_bit_is_a_miss_of_that_block_and_told_to_its_rank(pool, path):
    keys = [b"flip" + path[:3].encode() + key[7:] for key in KEYS[:8]]
    with connect(pool.run_dir, path=path) as client:
        client.write(puts(keys))
        for key in keys[3:5]:
            found = [slot_of(read_state(pool.state_file), rank, key) for rank in range(2)]
            ((memory, slot),) = [(memory, slot) for memory, slot in found if slot is not None]
            memory.slot(slot, SIZE)[77] ^= 0x04
        buffers = room(8)
        result = client.get_into(keys, buffers)
        assert result.count == 3 and result.blocks[3].reason == "corrupt"
        result = client.get_into(keys, buffers, leading=False)
        assert [got.hit for got in result.blocks] == [True] * 3 + [False] * 2 + [True] * 3
        until(lambda: client.exists(keys) == [True] * 3 + [False] * 2 + [True] * 3, 1, "both are forgotten")
        assert client.counts().misses["corrupt"] >= 1
    until(lambda: clean(pool.run_dir), 3, "nothing is held")


def test_a_get_of_more_than_memory_holds_goes_on_through_the_files(pool, client):
    assert {r.outcome for r in client.write(puts(KEYS[:300]), 20)} <= {Outcome.STORED, Outcome.DUPLICATE}
    buffers = room(300)
    result = client.get_into(KEYS[:300], buffers, 20)
    assert result.count == 300, (result.count, result.blocks[result.count])
    assert [bytes(buffer) for buffer in buffers] == [payload(key) for key in KEYS[:300]]
    assert {got.tier for got in result.blocks} >= {Tier.FILE}
    assert client.get_into(KEYS[:300], buffers, 20, leading=False).hits == 300


def test_a_slow_file_tier_is_not_waited_for_again_and_again(client, pool):
    """Three reads in a row that files did not answer in time; then memory alone is asked, until a probe."""
    breaker = client._ranks.named(0).files
    for _ in range(3):
        breaker.bad(client._outside.now_s())
    assert client.counts().breakers == {f"{client._ranks.named(0).state.identity} file": "open"}
    keys = [b"tier" + key[4:] for key in KEYS[:6]]
    client.write(puts(keys))
    result = client.get_into(keys, room(6))
    assert result.count == 6 and {got.tier for got in result.blocks} == {Tier.DRAM}
    until(lambda: client.counts().breakers != {}, 1, "still open")
    until(lambda: breaker.state(client._outside.now_s()) == "half-open", 2, "then one may try")
    breaker.good()
    assert client.counts().breakers == {}


def test_what_was_deleted_does_not_come_back_with_a_restart(tmp_path):
    config = PoolConfig(LAYOUT, ranks=2, dram_size=room_for(12), file_size=4 * 2**20, ucx=False, write="through")
    handle = start_pool(config, tmp_path)
    keys = [b"gone" + key[4:] for key in KEYS[:24]]
    try:
        with connect(handle.run_dir) as client:
            assert {r.outcome for r in client.write(puts(keys), 10)} == {Outcome.STORED}
            with client.read(keys[:1]) as read:
                assert client.delete(keys[::3], 5) == 8
                assert read.whole() == 1 and bytes(read.blocks[0].data) == payload(keys[0]), "a lease is a lease"
            assert client.exists(keys) == [at % 3 != 0 for at in range(24)]
        for pid in handle.rank_pids:
            os.kill(pid, signal.SIGKILL)
        stop_pool(handle.run_dir)
        again = start_pool(config, tmp_path)
        with connect(again.run_dir) as client:
            assert client.exists(keys, 2) == [at % 3 != 0 for at in range(24)]
    finally:
        stop_pool(tmp_path)
