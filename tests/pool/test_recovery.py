"""Ranks, the launcher and the keeper that die or hang: how soon that is over, seen by those who read and write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from blocks import KEYS, LAYOUT, puts, room_for
from loaded import loaded
from lone import KEY, lone_rank
from watching import clean, found, keys_of, left_in, until

from kvtool.errors import KvtoolError, ProtocolError
from kvtool.pool.base import Outcome
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.keeper import BACKOFF_S, FAILURES_MAX, HEALTHY_S, Backoff
from kvtool.pool.keeping import attach_keeper, keeper_status
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.link import Link
from kvtool.pool.rundir import keeper_processes, rank_processes
from kvtool.pool.state import read_state, runs
from kvtool.pool.wire import Op
from kvtool.transfer.segment import SHM

real = pytest.mark.real
MINE = [b"back" + key[4:] for key in KEYS]
SETTINGS = PoolConfig(LAYOUT, ranks=3, dram_size=room_for(150), file_size=2**22, ucx=False, lease_term_s=2)


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """Three ranks that the tests here kill; each leaves three that serve."""
    handle = start_pool(SETTINGS, tmp_path_factory.mktemp("trio"))
    yield handle
    stop_pool(handle.run_dir, purge=True)
    assert not rank_processes(handle.run_dir) and not keeper_processes(handle.run_dir)
    assert not list(SHM.glob(f"{handle.prefix}*"))


@pytest.fixture
def reader(trio):
    client = PoolClient(trio.state_file, LAYOUT, client_name="reader")
    yield client
    client.close()


def pid_of(pool, rank: int) -> int:
    return next(one.pid for one in read_state(pool.state_file).ranks if one.rank == rank)


def state_of(pool, rank: int):
    return next(one for one in read_state(pool.state_file).ranks if one.rank == rank)


def replaced(pool, rank: int, incarnation: int) -> bool:
    state = state_of(pool, rank)
    return state.alive and state.incarnation > incarnation and runs(state.pid, state.started)


def kill(pool, rank: int) -> int:
    """Its incarnation."""
    state = state_of(pool, rank)
    os.kill(state.pid, signal.SIGKILL)
    return state.incarnation


@real
def test_keys_of_a_killed_rank_are_misses_at_once_and_hits_again_within_five_seconds(trio, reader):
    """No call fails or is late, whatever the pool does meanwhile, and other ranks' blocks stay hits."""
    reader.write(puts(MINE[:90]), budget_s=10)
    lost, kept = keys_of(reader, 1, MINE[:90]), keys_of(reader, 2, MINE[:90])
    assert found(reader, lost[:1]) == 1
    incarnation, began_s = kill(trio, 1), time.monotonic()
    slowest_s, misses_s, hits_s = 0.0, None, None
    while hits_s is None:
        call_s = time.monotonic()
        hit = found(reader, lost[:1])
        slowest_s = max(slowest_s, time.monotonic() - call_s)
        if not hit and misses_s is None:
            misses_s = time.monotonic() - began_s
        if replaced(trio, 1, incarnation):
            outcomes = {result.outcome for result in reader.write(puts(lost))}
            if outcomes <= {Outcome.STORED, Outcome.DUPLICATE} and all(found(reader, [key]) for key in lost):
                hits_s = time.monotonic() - began_s
        assert time.monotonic() - began_s < 20
    assert all(found(reader, [key]) for key in kept)
    print(f"killed: misses after {misses_s:.3f} s, slowest read {slowest_s:.3f} s, hits again after {hits_s:.2f} s")
    assert slowest_s < 1.0 and (misses_s is None or misses_s < 1.0)
    assert hits_s < 5.0
    until(lambda: pool_status(trio.run_dir).whole, 5, "all ranks answer")
    assert keeper_status(trio.run_dir).starts[1] >= 1


@real
def test_a_rank_that_found_its_blocks_again_has_its_whole_share_at_once(trio, reader, tmp_path):
    """Its file outlived it. Nobody puts anything again."""
    reader.write(puts(MINE[100:160]), budget_s=10)
    mine = keys_of(reader, 2, MINE[100:160])
    before = state_of(trio, 2)
    os.kill(before.pid, signal.SIGTERM)  # memory goes to the file; kill -9 keeps what was written through
    began_s = time.monotonic()
    until(lambda: replaced(trio, 2, before.incarnation), 10, "it is replaced")
    assert state_of(trio, 2).status == "live" and state_of(trio, 2).weight == 1.0
    until(lambda: all(found(reader, [key]) for key in mine), 5, "and its blocks are there")
    print(f"recovered: {len(mine)} blocks hit again after {time.monotonic() - began_s:.2f} s")


@real
def test_a_pool_whose_ranks_all_died_comes_back_by_itself_and_clients_go_on(trio, reader):
    reader.write(puts(MINE[:30]), budget_s=10)
    before = read_state(trio.state_file)
    began_s = time.monotonic()
    for rank in range(3):
        kill(trio, rank)
    until(lambda: all(replaced(trio, r.rank, r.incarnation) for r in before.ranks), 15, "all are replaced")
    until(lambda: pool_status(trio.run_dir).whole, 5, "and answer")
    stored = lambda: reader.write(puts(MINE[:30]))[0].outcome in (Outcome.STORED, Outcome.DUPLICATE)  # noqa: E731
    until(stored, 3, "the client goes on")
    print(f"all killed: serve again after {time.monotonic() - began_s:.2f} s")
    until(lambda: len({rank.answer["epoch"] for rank in pool_status(trio.run_dir).ranks}) == 1, 5, "they agree")
    assert read_state(trio.state_file).epoch > before.epoch


@real
def test_a_hung_rank_is_reported_within_five_seconds_and_keeps_its_place(trio, reader):
    before = state_of(trio, 0)
    os.kill(before.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    try:
        reports = lambda: [r.answer["hung"] for r in pool_status(trio.run_dir, budget_s=0.2).ranks if r.answer]  # noqa: E731
        until(lambda: reports() == [[0], [0]], 6, "both others report it")
        took_s = time.monotonic() - began_s
        print(f"stopped: reported by all after {took_s:.2f} s")
        assert took_s < 5.0
        incarnation = kill(trio, 1)  # the lowest rank, whose part the state file is, hangs
        until(lambda: replaced(trio, 1, incarnation), 10, "another one writes that rank 1 was replaced")
    finally:
        os.kill(before.pid, signal.SIGCONT)
    until(lambda: pool_status(trio.run_dir).whole, 5, "it goes on")
    until(lambda: all(r.answer["hung"] == [] for r in pool_status(trio.run_dir).ranks), 5, "and is heard")
    now = state_of(trio, 0)
    assert (now.pid, now.incarnation) == (before.pid, before.incarnation), "a hung rank is no dead one"


@real
def test_ranks_need_neither_mpiexec_nor_a_keeper_to_go_on(trio, reader):
    """Without mpiexec MPI tells nothing, and costs nothing. A keeper can be left behind again."""
    os.kill(trio.pid, signal.SIGKILL)
    until(lambda: not pool_status(trio.run_dir).launcher_runs, 3, "mpiexec is gone")
    keeper = keeper_status(trio.run_dir)
    os.kill(keeper.pid, signal.SIGKILL)
    until(lambda: not keeper_status(trio.run_dir).runs, 3, "the keeper is gone")
    before = [rank.answer["cpu_s"] for rank in pool_status(trio.run_dir).ranks]
    began_s = time.monotonic()
    with loaded(trio.state_file, MINE[:40], seed=1, threads=1) as load:
        until(lambda: load.seen["hit"] > 50, 10, "reads hit")
        incarnation = kill(trio, 2)
        until(lambda: not state_of(trio, 2).alive, 2, "a death is noticed")
        assert not replaced(trio, 2, incarnation)
        assert attach_keeper(trio.run_dir) and not attach_keeper(trio.run_dir)
        until(lambda: replaced(trio, 2, incarnation), 10, "the new keeper starts it again")
    assert load.slowest_s < 1.5
    until(lambda: pool_status(trio.run_dir).whole, 5, "all answer")
    time_s = time.monotonic() - began_s
    idle = [rank.answer["cpu_s"] for rank in pool_status(trio.run_dir).ranks[:2]]
    assert all(now - was < 0.7 * time_s for now, was in zip(idle, before[:2], strict=True)), "nobody spins"
    until(lambda: clean(trio.run_dir), 5, "nothing is held")


@real
def test_whatever_was_killed_down_leaves_nothing(tmp_path):
    handle = start_pool(replace(SETTINGS, ranks=2, file_size=0), tmp_path)
    keeper = keeper_status(tmp_path).pid
    os.kill(handle.rank_pids[0], signal.SIGKILL)
    os.kill(keeper, signal.SIGKILL)  # while it starts another
    assert stop_pool(tmp_path)
    assert rank_processes(tmp_path) == [] and keeper_processes(tmp_path) == []
    assert list(SHM.glob(f"{handle.prefix}*")) == []
    assert left_in(tmp_path) == ["pool.log"]


@real
@pytest.mark.parametrize("seen", ["launch.json", "pool.json"])
def test_a_start_that_is_interrupted_leaves_nothing(tmp_path, seen):
    """While the ranks start, and while the keeper does."""
    up = "import sys; from kvtool.cli.main import main; sys.exit(main(sys.argv[1:]))"
    layout = f"layers={LAYOUT.layers},kv_heads={LAYOUT.kv_heads},head_dim={LAYOUT.head_dim},block_tokens=32"
    sizes = ["--dram-size", "1MiB", "--file-size", "0"]
    command = [sys.executable, "-c", up, "pool", "up", "--layout", layout, *sizes, "--run-dir", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        until(lambda: (tmp_path / seen).exists() or process.poll() is not None, 60, f"{seen} is there")
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
    assert code == 130
    assert rank_processes(tmp_path) == [] and keeper_processes(tmp_path) == []
    assert left_in(tmp_path) == ["pool.log"]


def test_a_reused_address_harms_nobody(tmp_path):
    """Another rank, or another incarnation, listens where the one that is meant did."""
    with lone_rank(tmp_path) as lone:
        for meant in (replace(lone.state, identity="lone/1"), replace(lone.state, incarnation=2)):
            link = Link(meant, KEY, LAYOUT, "late", False, lambda epoch: None)
            with pytest.raises((KvtoolError, ProtocolError), match="wanted to reach"):
                link.call(Op.PING, b"", time.monotonic() + 5)
            link.close()
        link = Link(lone.state, KEY, LAYOUT, "right", False, lambda epoch: None)
        link.call(Op.PING, b"", time.monotonic() + 5)
        link.close()


def test_a_rank_that_ends_again_and_again_is_started_ever_more_slowly_and_given_up():
    backoff, now_s, waits = Backoff(), 100.0, []
    while not backoff.given_up:
        assert now_s >= backoff.due_s
        backoff.started(now_s)
        now_s += 0.3
        backoff.ended(now_s)
        waits.append(round(backoff.due_s - now_s, 3))
        now_s = max(now_s, backoff.due_s)
    assert waits == [*BACKOFF_S[1:], BACKOFF_S[-1], BACKOFF_S[-1]] and backoff.starts == FAILURES_MAX
    lived = Backoff()
    for _ in range(20):
        lived.started(now_s)
        now_s += HEALTHY_S + 1
        lived.ended(now_s)
        assert lived.due_s == now_s and not lived.given_up, "once an hour is no loop"
