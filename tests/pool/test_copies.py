"""Real ranks with two copies of each block: one is killed, and nobody misses anything."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from blocks import KEYS, LAYOUT, payload, puts, room_for
from watching import CONFIG, clean, keys_of, until

from kvtool.pool.base import Outcome
from kvtool.pool.client import PoolClient
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.state import read_state

pytestmark = pytest.mark.real

TWICE = replace(CONFIG, ranks=3, copies=2, dram_size=room_for(160))


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    handle = start_pool(TWICE, tmp_path_factory.mktemp("twice"))
    yield handle
    stop_pool(handle.run_dir)


def copying(run_dir) -> dict[int, dict]:
    return {rank.rank: rank.answer["copying"] for rank in pool_status(run_dir).ranks if rank.answer is not None}


def quiet(run_dir) -> bool:
    return all(not (c["owed"] or c["flying"] or c["left"]) for c in copying(run_dir).values())


def test_a_killed_rank_is_not_missed_and_its_blocks_have_two_holders_again(twice):
    keys = KEYS[:120]
    client = PoolClient(twice.state_file, LAYOUT, client_name="test")
    try:
        assert {r.outcome for r in client.write(puts(keys), budget_s=10)} == {Outcome.STORED}
        until(lambda: quiet(twice.run_dir), 5, "every block has its second copy")
        stored = sum(c["counts"]["stored"] for c in copying(twice.run_dir).values())
        assert stored == len(keys)
        until(lambda: clean(twice.run_dir), 2, "nothing is held")
        theirs = keys_of(client, 1, keys)
        assert theirs
        os.kill(read_state(twice.state_file).ranks[1].pid, signal.SIGKILL)
        until(lambda: 1 not in {a.state.rank for a in client._ranks.all()} or client.match(keys) < 0, 5, "death known")
        with client.read(keys, budget_s=5) as read:
            assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in keys]
        began_s = time.monotonic()
        until(lambda: quiet(twice.run_dir), 5, "every block has two holders again")
        print("re-replicated in", time.monotonic() - began_s, copying(twice.run_dir))
        slots = [rank.answer["slots_used"] for rank in pool_status(twice.run_dir).ranks if rank.answer]
        assert sum(slots) == 2 * len(keys)
    finally:
        client.close()
