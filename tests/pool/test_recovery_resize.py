"""Ranks that drain, leave and come while clients read and write."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from blocks import KEYS, LAYOUT, puts, room_for
from loaded import loaded
from watching import clean, found, keys_of, until

from kvtool.errors import Refused
from kvtool.kv.view import Status
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.keeping import wanted
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.resize import drain, resize
from kvtool.pool.roster import entry_of, identity_of, rank_of
from kvtool.pool.state import read_state, runs

pytestmark = pytest.mark.real

MINE = [b"size" + key[4:] for key in KEYS[:160]]
SETTINGS = PoolConfig(LAYOUT, ranks=2, dram_size=room_for(260), file_size=0, ucx=False, lease_term_s=2)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    handle = start_pool(SETTINGS, tmp_path_factory.mktemp("sized"))
    yield handle
    stop_pool(handle.run_dir, purge=True)


def test_a_pool_grows_and_shrinks_under_load_and_loses_no_block(pool):
    """Keys move to the newcomer and back; whoever holds a block hands it on before he leaves."""
    client = PoolClient(pool.state_file, LAYOUT, client_name="reader")
    client.write(puts(MINE), budget_s=10)
    with loaded(pool.state_file, MINE[:60], seed=2) as load:
        began_s = time.monotonic()
        assert resize(pool.run_dir, 3, budget_s=30) == ([2], [])
        print(f"a third rank serves after {time.monotonic() - began_s:.2f} s")
        until(lambda: client.match(MINE[:40]) and keys_of(client, 2, MINE), 5, "it is given keys")
        said = []
        began_s = time.monotonic()
        assert resize(pool.run_dir, 2, budget_s=30, progress=said.append) == ([], [2])
        print(f"drained and left after {time.monotonic() - began_s:.2f} s, blocks moved: {max(d.left for d in said)}")
    assert set(load.seen) <= {"hit", "miss", "stored", "duplicate"}, load.seen
    assert load.slowest_s < 1.5
    until(lambda: [client.match([key]) for key in MINE] == [1] * len(MINE), 5, "every block is still there")
    state = read_state(pool.state_file)
    assert [rank.status for rank in state.ranks] == ["live", "live", "left"] and not state.ranks[2].alive
    assert wanted(pool.run_dir) == [0, 1] and pool_status(pool.run_dir).whole
    until(lambda: clean(pool.run_dir), 5, "nothing is held")
    client.close()


def test_the_last_rank_that_takes_blocks_cannot_be_drained(pool):
    with pytest.raises(Refused, match="all that take blocks"):
        drain(pool.run_dir, [0, 1], leave=False, budget_s=5)
    with pytest.raises(Refused, match=r"rank 7: wanted one of \[0, 1\]"):
        drain(pool.run_dir, [7], leave=False, budget_s=5)


def test_a_dead_rank_can_be_let_go_for_good(pool):
    assert resize(pool.run_dir, 3, budget_s=30) == ([2], [])
    state = read_state(pool.state_file).ranks[2]
    assert state.incarnation == 2, "the identity that left has come back as its next incarnation"
    os.kill(pool_status(pool.run_dir).keeper.pid, signal.SIGKILL)
    os.kill(state.pid, signal.SIGKILL)
    until(lambda: not read_state(pool.state_file).ranks[2].alive, 3, "it is dead")
    drain(pool.run_dir, [2], leave=True, budget_s=10)
    until(lambda: read_state(pool.state_file).ranks[2].status == "left", 3, "and nobody waits for it")
    assert pool_status(pool.run_dir).whole and wanted(pool.run_dir) == [0, 1]


def test_a_rank_that_was_taken_for_dead_goes_on_as_its_next_incarnation_under_load(pool):
    """Somebody's early verdict: told to all, as a rank that believes it would."""
    client = PoolClient(pool.state_file, LAYOUT, client_name="reader")
    client.write(puts(MINE[:40]), budget_s=10)
    mine = keys_of(client, 1, MINE[:40])
    state = read_state(pool.state_file)
    entry = entry_of(state.ranks[1])
    wrong = rank_of(replace(entry, standing=entry.standing._replace(status=Status.DEAD)))
    assert wrong.identity == identity_of("pool", 1) and not wrong.alive
    with loaded(pool.state_file, MINE[:60], seed=3) as load:
        state.ranks[1] = wrong
        from kvtool.pool.state import write_state

        write_state(pool.state_file, state)
        again = lambda: read_state(pool.state_file).ranks[1]  # noqa: E731
        until(lambda: again().alive and again().incarnation == state.ranks[1].incarnation + 1, 6, "it says so")
    assert load.slowest_s < 1.5
    assert again().pid == wrong.pid and runs(wrong.pid, wrong.started), "the same process"
    until(lambda: all(found(client, [key]) for key in mine), 3, "with all its blocks")
    until(lambda: pool_status(pool.run_dir).whole, 3, "every rank answers under its new name")
    client.close()
