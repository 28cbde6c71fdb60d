"""Real ranks with two copies of each block: one is killed, and nobody misses anything."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from blocks import KEYS, LAYOUT, payload, puts, room_for
from watching import CONFIG, clean, keys_of, until

from kvtool.kv.retention import Retention
from kvtool.pool.base import Outcome
from kvtool.pool.client import PoolClient
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.link import Link
from kvtool.pool.state import read_state
from kvtool.pool.wire import Op, pack_map

pytestmark = pytest.mark.real

TWICE = replace(CONFIG, ranks=3, copies=2, namespaces={"once": 1}, dram_size=room_for(48))


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    handle = start_pool(TWICE, tmp_path_factory.mktemp("twice"))
    yield handle
    stop_pool(handle.run_dir)


def copying(run_dir) -> dict[int, dict]:
    return {rank.rank: rank.answer["copying"] for rank in pool_status(run_dir).ranks if rank.answer is not None}


def holders(client, keys) -> list[int]:
    return [sum(there) for there in zip(*(client.exists(keys, at=rank) for rank in range(3)), strict=True)]


def quiet(run_dir) -> bool:
    return all(not (c["owed"] or c["flying"] or c["left"]) for c in copying(run_dir).values())


def test_a_namespace_and_a_put_may_say_how_often_they_are_wanted(twice):
    client = PoolClient(twice.state_file, LAYOUT, client_name="test", namespace="once")
    try:
        client.write(puts(KEYS[300:310]))
        thrice = [replace(put, retention=Retention(copies=3)) for put in puts(KEYS[310:312])]
        client.write(thrice)
        until(lambda: quiet(twice.run_dir), 5, "what is wanted more than once has its copies")
        assert sum(c["counts"]["stored"] for c in copying(twice.run_dir).values()) == 2 * len(thrice)
        assert client.delete(KEYS[300:312]) == 12
    finally:
        client.close()


def test_a_killed_rank_is_not_missed_and_its_blocks_have_two_holders_again(twice):
    keys = KEYS[:120]
    client = PoolClient(twice.state_file, LAYOUT, client_name="test")
    try:
        assert {r.outcome for r in client.write(puts(keys), budget_s=10)} == {Outcome.STORED}
        until(lambda: quiet(twice.run_dir), 5, "every block has its second copy")
        assert set(holders(client, keys)) == {2}
        until(lambda: clean(twice.run_dir), 2, "nothing is held")
        theirs = keys_of(client, 1, keys)
        assert theirs
        os.kill(read_state(twice.state_file).ranks[1].pid, signal.SIGKILL)
        deadline_s, reads = time.monotonic() + 1.0, 0
        while time.monotonic() < deadline_s:  # at once, while it is found out, and after
            for at in range(0, len(keys), 40):
                some = keys[at : at + 40]
                with client.read(some, budget_s=5) as read:
                    assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in some]
            reads += 1
        assert client.counts().misses == {}
        until(lambda: quiet(twice.run_dir), 5, "every block has two holders again")
        until(lambda: min(holders(client, keys)) >= 2, 5, "and they do")
    finally:
        client.close()


def drain(handle, rank: int) -> None:
    state = read_state(handle.state_file)
    link = Link(state.ranks[rank], bytes.fromhex(state.key), LAYOUT, "test", False, lambda epoch: None)
    link.call(Op.DRAIN, pack_map({}), time.monotonic() + 5)
    link.close()


def test_a_drained_rank_loses_nothing_under_load_and_readers_miss_nothing_meanwhile(tmp_path):
    handle = start_pool(replace(TWICE, copies=1, copy_rate=2.0**20, dram_size=room_for(90)), tmp_path / "pool")
    client = PoolClient(handle.state_file, LAYOUT, client_name="test")
    try:
        keys, fresh = KEYS[:100], iter(range(100, 400))
        assert {r.outcome for r in client.write(puts(keys), budget_s=10)} == {Outcome.STORED}
        theirs = [len(keys_of(client, rank, keys)) for rank in range(3)]
        drain(handle, 0)
        put, left = list(keys), [theirs[0]]
        deadline_s = time.monotonic() + 20
        while not (status := copying(handle.run_dir)[0])["empty"]:
            assert time.monotonic() < deadline_s, status
            left.append(status["left"])
            key = KEYS[next(fresh)]
            assert client.write(puts([key]))[0].outcome is Outcome.STORED
            put.append(key)
            for at in range(0, len(put), 50):
                assert len(read_all(client, put[at : at + 50])) == len(put[at : at + 50])
        assert any(0 < count < theirs[0] for count in left), "it should have taken a while, and said so"
        os.kill(read_state(handle.state_file).ranks[0].pid, signal.SIGKILL)
        until(lambda: not read_state(handle.state_file).ranks[0].alive, 5, "its death is known")
        assert all(read_all(client, [key]) == [payload(key)] for key in put)
    finally:
        client.close()
        stop_pool(handle.run_dir)


def read_all(client, keys) -> list[bytes]:
    with client.read(keys, budget_s=5) as read:
        return [bytes(block.data) for block in read.blocks]
