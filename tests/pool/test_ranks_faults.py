"""Real ranks and clients that die, hang, are late or talk nonsense: what that costs, and that nothing is left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random

import pytest
from blocks import KEYS, LAYOUT, payload, puts, room_for
from watching import SLOTS, clean, found, found_by, held, keys_of, left_in, until

from kvtool.kv.record import Grant, Want
from kvtool.pool import wire
from kvtool.pool.base import Outcome, Put
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.state import read_state, started_at
from kvtool.transfer.segment import SHM

pytestmark = pytest.mark.real

HERE = Path(__file__).parent


@pytest.fixture
def far(pool):
    """By socket: what is in mapped memory is found and read without the rank, for as long as its heartbeat is fresh."""
    with PoolClient(pool.state_file, LAYOUT, path="socket", client_name="far") as client:
        yield client


def test_a_hung_rank_costs_one_budget_and_heals_when_it_goes_on(pool, far):
    client = far
    client.write(puts(KEYS[:40]), budget_s=10)
    mine, others = keys_of(client, 0, KEYS[:40])[:1], keys_of(client, 1, KEYS[:40])[:1]
    for keys in (mine, others):
        with client.read(keys) as read:
            assert len(read.blocks) == 1
    os.kill(pool.rank_pids[0], signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        with client.read(mine, budget_s=0.3) as read:
            assert list(read.blocks) == []
        assert 0.25 < time.monotonic() - began_s < 0.6, "a hung rank costs the budget, and no more"
        began_s = time.monotonic()
        for _ in range(20):
            client.read(mine, budget_s=2).release()
            assert client.write(puts([KEYS[399], *mine]))[1].outcome is Outcome.FAILED
        assert time.monotonic() - began_s < 0.3, "a rank that hangs is skipped at once"
        with client.read(others) as read:
            assert len(read.blocks) == 1, "the other rank goes on"
        assert client.alive()
        until(lambda: pool_status(pool.run_dir, budget_s=0.2).ranks[1].answer["hung"] == [0], 6, "its peer reports it")
    finally:
        os.kill(pool.rank_pids[0], signal.SIGCONT)
    until(lambda: found(client, mine) == 1, 1, "it heals")
    until(lambda: clean(pool.run_dir), 3, "late answers are undone")


def test_a_hung_rank_costs_the_others_nothing_but_time(pool, client):
    """In the very call that finds out: what the other rank answered meanwhile counts."""
    fresh = [b"hung" + key[4:] for key in KEYS[:24]]
    theirs = [key for key in fresh if key in keys_of(client, 1, fresh)]
    assert client.write(puts([theirs[0]]))[0].outcome is Outcome.STORED
    ours = [key for key in fresh if key not in theirs]
    assert client.write(puts([ours[0]]))[0].outcome is Outcome.STORED
    os.kill(pool.rank_pids[0], signal.SIGSTOP)
    try:
        batch = [*ours[1:3], *theirs[1:5]]  # the hung rank is asked first
        outcomes = [result.outcome for result in client.write(puts(batch), budget_s=0.5)]
        assert outcomes == [Outcome.FAILED] * 2 + [Outcome.STORED] * 4
        assert found(client, theirs[1:5]) == 4, "its circuit breaker stayed closed"
    finally:
        os.kill(pool.rank_pids[0], signal.SIGCONT)
    until(lambda: found(client, ours[:1]) == 1, 1, "it heals")
    until(lambda: clean(pool.run_dir), 3, "late answers are undone")


def test_a_rank_that_hung_while_a_client_connected_by_ucx_is_reached_when_it_goes_on(pool, client, monkeypatch):
    """A rank makes progress for UCX only when somebody spoke to it lately, so whoever tries again must speak."""
    client.write(puts(KEYS[:12]), budget_s=10)
    far = PoolClient(pool.state_file, LAYOUT, path="ucx", client_name="far")
    reader = far._ranks.door.reader
    connect = reader.connect

    def hang(*arguments):
        for pid in pool.rank_pids:
            os.kill(pid, signal.SIGSTOP)
        connect(*arguments)

    monkeypatch.setattr(reader, "connect", hang)
    try:
        began_s = time.monotonic()
        assert found_by(far, KEYS[:12], 0.3) == 0
        monkeypatch.setattr(reader, "connect", connect)
        until(lambda: time.monotonic() - began_s > 2.2, 3, "nobody has spoken to the ranks for long enough")
    finally:
        for pid in pool.rank_pids:
            os.kill(pid, signal.SIGCONT)
    until(lambda: found_by(far, KEYS[:12], 0.5) == 12, 4, "it is reached")
    far.close()
    until(lambda: clean(pool.run_dir), 6, "nothing is left of the UCX client")


def test_slots_of_a_write_that_was_given_up_come_back_when_its_rank_goes_on(pool, client):
    """Over TCP, where a stopped rank takes no bytes; the writer lives on, so his connection's end is not the reason."""
    client.write(puts(KEYS[:12]), budget_s=10)
    peer = subprocess.Popen(
        [sys.executable, HERE / "peer.py", "hung_write", pool.state_file],
        stdout=subprocess.PIPE, env={**os.environ, "UCX_TLS": "tcp,self"},
    )  # fmt: skip
    try:
        said = json.loads(peer.stdout.readline())
        assert said["outcomes"] == ["failed"] and said["held"] >= 1
        kinds = lambda: {kind for _, kind in held(pool.run_dir)}  # noqa: E731
        until(lambda: not kinds() & {"reservation", "quarantine"}, 8, "the slots are given back")
        assert peer.poll() is None
    finally:
        for pid in pool.rank_pids:
            os.kill(pid, signal.SIGCONT)
        peer.kill()
        peer.communicate(timeout=5)
    until(lambda: clean(pool.run_dir), 6, "nothing is left of the writer")


def test_a_client_killed_with_leases_and_reservations_leaves_nothing(pool, client):
    client.write(puts(KEYS[:12]), budget_s=10)
    peer = subprocess.Popen(
        [sys.executable, HERE / "peer.py", "hold", pool.state_file], stdout=subprocess.PIPE, text=True
    )
    try:
        assert json.loads(peer.stdout.readline()) == {"read": 12, "reserved": 6}
        assert {kind for _, kind in held(pool.run_dir)} == {"lease", "reservation"}
    finally:
        peer.kill()
        peer.wait(5)
        peer.stdout.close()
    until(lambda: clean(pool.run_dir), 1, "a dead client's leases and reservations end")


def test_clients_that_are_killed_at_random_leave_only_whole_blocks_and_nothing_held(pool, client):
    """Killed while they write, read, reserve: what a slot holds half is never seen, by them or by others."""

    def begin() -> subprocess.Popen:
        peer = subprocess.Popen(
            [sys.executable, HERE / "peer.py", "churn", pool.state_file], stdout=subprocess.PIPE, text=True
        )
        assert peer.stdout.readline()
        return peer

    rng, peers = Random(3), [begin() for _ in range(2)]
    try:
        for _ in range(4):
            time.sleep(rng.uniform(0.1, 0.5))  # any moment is as good as another
            victim = peers.pop(0)
            assert victim.poll() is None, "a client read wrong bytes"
            end(victim)
            peers.append(begin())
    finally:
        for peer in peers:
            end(peer)
    until(lambda: clean(pool.run_dir), 4, "nothing is held for the dead")
    for at in range(0, len(KEYS), 16):
        with client.read(KEYS[at : at + 16], budget_s=10) as read:
            copies = [bytes(block.data) for block in read.blocks]
            assert copies[: read.whole()] == [payload(key) for key in KEYS[at : at + len(copies)]]
    assert "corrupt" not in client.counts().misses


def end(peer: subprocess.Popen) -> None:
    peer.kill()
    peer.wait(10)
    peer.stdout.close()


def test_a_writer_who_is_late_keeps_his_slot_from_others_and_is_told(pool, client):
    """He may still be writing: his slot is quarantined, not given away; what he commits is refused."""
    key = b"late" + KEYS[0][4:]
    begun, go_on = threading.Event(), threading.Event()
    results = []

    def slow(room):
        begun.set()
        assert go_on.wait(20)
        room[:] = payload(key)

    thread = threading.Thread(target=lambda: results.extend(client.write([Put(key, LAYOUT.block_size, slow)], 20)))
    thread.start()
    try:
        assert begun.wait(5)
        until(lambda: "quarantine" in {kind for _, kind in held(pool.run_dir)}, 4, "the reservation times out")
        assert client.match([key]) == 0
    finally:
        go_on.set()
        thread.join(20)
    assert [(r.outcome, r.reason) for r in results] == [
        (Outcome.FAILED, "the reservation lapsed before the block was written")
    ]
    until(lambda: clean(pool.run_dir), 1, "his word frees the slot")


def test_who_does_not_introduce_himself_or_talks_nonsense_is_hung_up_on(pool, client):
    path = read_state(pool.state_file).ranks[0].unix
    for said in (b"", b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n" * 4):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            sock.connect(path)
            sock.sendall(said)
            while sock.recv(4096):
                pass  # the greeting, perhaps a refusal, then the end
    assert client.alive() and clean(pool.run_dir)


def test_a_slot_is_not_freed_by_a_lost_connection_while_its_client_still_writes(pool, client):
    """Whoever breaks the connection: the rank may not give the slot away before the writer has let go of it."""
    client.write(puts(KEYS[:12]))
    link = client._ranks.all()[0].link
    assert link.begin_writing()
    wants = wire.pack_wants(0, [Want(b"held" + KEYS[0][4:], 100)])
    answers, _ = wire.unpack_grants(link.call(wire.Op.RESERVE, wants, time.monotonic() + 5))
    assert [answer.grant for answer in answers] == [Grant.GRANTED]
    link._sock.sendall(b"nonsense" * 8)
    until(lambda: link.look() or not link.connected, 3, "the rank hangs up")
    assert {kind for _, kind in held(pool.run_dir)} <= {"reservation", "quarantine"} and not clean(pool.run_dir)
    link.end_writing()
    until(lambda: clean(pool.run_dir), 3, "the slot is free when the writer is done")
    until(lambda: client.match(KEYS[:12]) == 12, 3, "and the client connects again")


def test_ranks_whose_run_directory_is_gone_end_by_themselves(tmp_path):
    handle = start_pool(PoolConfig(LAYOUT, ranks=1, dram_size=room_for(4), file_size=0, ucx=False), tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    until(lambda: all(started_at(pid) is None for pid in handle.rank_pids), 5, "the ranks end")
    assert list(SHM.glob(f"{handle.prefix}*")) == []
    until(lambda: os.waitpid(handle.pid, os.WNOHANG)[0], 5, "so does mpiexec")


def test_a_killed_rank_is_a_miss_within_a_second_and_a_restarted_pool_is_found(tmp_path):
    config = PoolConfig(LAYOUT, ranks=3, dram_size=room_for(SLOTS), file_size=0, ucx=False)
    handle = start_pool(config, tmp_path)
    client = PoolClient(handle.state_file, LAYOUT, path="socket")
    try:
        client.write(puts(KEYS[:60]))
        assert client.match(KEYS[:60]) == 60
        lost, kept = keys_of(client, 1, KEYS[:60]), keys_of(client, 2, KEYS[:60])
        os.kill(handle.rank_pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        assert [found(client, [key]) for key in lost] == [0] * len(lost)
        assert time.monotonic() - killed_s < 1.0, "reads of a dead rank's blocks must become misses within a second"
        assert [found(client, [key]) for key in kept] == [1] * len(kept), "the others go on"
        until(lambda: not read_state(handle.state_file).ranks[1].alive, 1.5, "the survivors say so")
        epoch = read_state(handle.state_file).epoch
        until(lambda: client.write(puts(lost[:1]))[0].outcome is Outcome.STORED, 1, "its keys go to survivors")
        os.kill(handle.pid, signal.SIGKILL)  # and mpiexec
        assert found(client, lost[:1]) == 1
        assert stop_pool(tmp_path)
        assert [pid for pid in handle.rank_pids if started_at(pid) is not None] == []
        assert list(SHM.glob(f"{handle.prefix}*")) == [] and left_in(tmp_path) == ["pool.log"]
        until(lambda: client.match(KEYS[:60]) == 0, 3, "its directories are not believed any more")
        assert not client.alive()
        again = start_pool(config, tmp_path)
        assert read_state(again.state_file).epoch > epoch
        until(lambda: client.alive(), 2, "the same client finds the new pool")
        until(lambda: client.write(puts(KEYS[:6]))[0].outcome is Outcome.STORED, 2, "and writes to it")
    finally:
        client.close()
        stop_pool(tmp_path)


def test_a_pool_whose_launcher_left_no_note_is_stopped_and_cleaned_up_all_the_same(tmp_path):
    handle = start_pool(PoolConfig(LAYOUT, ranks=1, dram_size=room_for(4), file_size=2**20, ucx=False), tmp_path)
    (tmp_path / "launch.json").unlink()
    (tmp_path / "pool.json").unlink()
    os.kill(handle.rank_pids[0], signal.SIGSTOP)
    assert stop_pool(tmp_path, timeout_s=3)
    assert started_at(handle.rank_pids[0]) is None and list(SHM.glob(f"{handle.prefix}*")) == []
    assert left_in(tmp_path) == ["files.json", "pool-0.blocks", "pool.log"]
    assert stop_pool(tmp_path, purge=True) and not stop_pool(tmp_path, purge=True)
    assert left_in(tmp_path) == ["pool.log"]
    until(lambda: os.waitpid(handle.pid, os.WNOHANG)[0], 5, "mpiexec ends with its last rank")


def test_a_pool_that_cannot_start_says_why_and_leaves_nothing(tmp_path):
    config = PoolConfig(LAYOUT, ranks=2, dram_size=2**23, file_dir=tmp_path / "nowhere", start_timeout_s=20)
    with pytest.raises(Exception, match=r"(?s)did not start.*nowhere"):
        start_pool(config, tmp_path / "run")
    assert left_in(tmp_path / "run") == ["pool.log"]
