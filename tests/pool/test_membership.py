"""Who counts as dead: a process that has ended, and nobody else, whatever became of its link."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from blocks import KEYS, LAYOUT, puts
from watching import found, until

from kvtool.errors import ProtocolError
from kvtool.pool import wire
from kvtool.pool.handshake import Door, Knock, shake
from kvtool.pool.launch import pool_status
from kvtool.pool.loop import Loop
from kvtool.pool.membership import Membership
from kvtool.pool.roster import entry_of, pack_view, unpack_view
from kvtool.pool.state import PoolState, RankState, read_state, started_at
from kvtool.pool.wire import Op

MINE = [b"memb" + key[4:] for key in KEYS]


def a_rank(rank: int, directory, pid: int, tcp_port: int = 0, host: str = "here") -> RankState:
    unix = str(directory / f"{rank}.sock")
    return RankState(rank, f"p/{rank}", host, unix, ("127.0.0.1", tcp_port), "", 0, 1, 0, pid, started_at(pid) or 0)


@contextlib.contextmanager
def running(rank: int, ranks: list[RankState], directory):
    """The membership of `rank` on a real loop in a thread; others see the rank as it would be elsewhere."""
    state = PoolState(7, "00", "p", {}, 1, 1.0, ranks)
    members = Membership(rank, state, directory / "pool.json", None)

    def on_pass(now_s: float) -> float:
        passes.append(now_s)
        return min(0.05, members.tick(now_s) - now_s)

    passes: list[float] = []
    loop = Loop(lambda: members.epoch, lambda link: None, members.answered, members.closed, on_pass)
    members.connect(loop, bytes(32), "f")
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield members, loop, passes
    finally:
        loop.running = False
        loop.post(lambda: None)
        thread.join(10)
        for link in list(loop.connections.values()):
            link.sock.close()


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def test_a_peer_that_accepts_and_says_nothing_holds_nobody_up_and_dies_with_its_process(tmp_path, process):
    ranks = [a_rank(0, tmp_path, os.getpid()), a_rank(1, tmp_path, process.pid)]
    with socket.socket(socket.AF_UNIX) as mute, running(0, ranks, tmp_path) as (members, loop, passes):
        mute.bind(ranks[1].unix)
        mute.listen()
        mute.settimeout(5)
        dialled, _ = mute.accept()
        with dialled:
            before = members.epoch
            began_s, seen = time.monotonic(), len(passes)
            until(lambda: len(passes) > seen + 10, 5, "the loop goes on while the peer is waited for")
            assert loop.slowest_pass_s < 1.0 and time.monotonic() - began_s < 3.0
            assert members.state.ranks[1].alive and members.epoch == before and members.linked == []
            until(lambda: members.hung(time.monotonic()) == [1], 5, "it is reported as hung")
            assert members.state.ranks[1].alive, "a hung rank is no dead one"
            process.kill()
            until(lambda: not members.state.ranks[1].alive and members.epoch > before, 3, "its process is gone")
    until(lambda: read_state_epoch(tmp_path) == members.epoch, 1, "it is written down")


def read_state_epoch(directory) -> int | None:
    return read_state(directory / "pool.json").epoch if (directory / "pool.json").exists() else None


def test_a_link_that_broke_is_dialled_again_and_its_rank_stays_alive(tmp_path, process):
    ranks = [a_rank(0, tmp_path, os.getpid()), a_rank(1, tmp_path, process.pid)]
    with socket.socket(socket.AF_UNIX) as peer:
        peer.bind(ranks[1].unix)
        peer.listen()
        peer.settimeout(5)
        with running(0, ranks, tmp_path) as (members, _, _):
            for _ in range(3):
                link, _ = peer.accept()
                with link:
                    door = Door(ranks[1].identity)
                    link.sendall(wire.frame(Op.HELLO, 0, 7, door.greeting))
                    (hello,) = wire.Splitter().feed(link.recv(4096))
                    (introduced,), _ = unpack_view(door.read(hello.body)["peer"], "p")
                    assert introduced.identity == "p/0"
                    link.sendall(wire.frame(Op.HELLO, 1, 7, door.answer(bytes(32), {})[0]))
                    until(lambda: members.linked == [1], 3, "linked")
                until(lambda: members.linked == [], 3, "the link is lost")
            assert members.state.ranks[1].alive


def test_a_rank_on_another_host_is_dead_when_nobody_listens_there_any_more(tmp_path):
    """Its pid says nothing here. A lower rank is only looked for: linking is its part."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        port = elsewhere.getsockname()[1]
        ranks = [a_rank(0, tmp_path, 1, port, host="there"), a_rank(1, tmp_path, os.getpid())]
        elsewhere.settimeout(5)
        with running(1, ranks, tmp_path) as (members, _, _):
            for _ in range(2):
                link, _ = elsewhere.accept()
                with link:
                    assert link.recv(100) == b"", "nothing is said"
            assert members.state.ranks[0].alive and members.linked == []
            elsewhere.close()
            until(lambda: not members.state.ranks[0].alive, 5, "its host refuses")


def test_only_other_ranks_of_this_pool_may_introduce_themselves(tmp_path):
    ranks = [a_rank(rank, tmp_path, os.getpid()) for rank in range(3)]
    members = Membership(1, PoolState(7, "00", "p", {}, 1, 1.0, ranks), tmp_path / "pool.json", None)
    stranger = replace(ranks[0], identity="q/0")
    for who, words in (
        ([ranks[1]], "from other ranks"),
        (ranks[:1] * 2, "that say who"),
        ([stranger], "of the pool p"),
    ):
        with pytest.raises(ProtocolError, match=words):
            members.admit(None, pack_view([entry_of(rank) for rank in who]))


@pytest.mark.real
def test_ranks_that_refuse_each_others_words_stay_alive_and_link_again(pool, client):
    """One that takes a live rank for dead writes a state file without it, and so does the other."""
    client.write(puts(MINE[:40]), budget_s=10)
    before = read_state(pool.state_file)
    until(lambda: linked(pool) == [[1], [0]], 5, "the ranks are linked")
    for nonsense in (b"nonsense" * 8, b""):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(before.ranks[1].unix)
            introduction = pack_view([entry_of(before.ranks[0])])
            hello = {"fingerprint": LAYOUT.fingerprint, "name": "rank 0", "peer": introduction}
            shake(sock, Knock(bytes.fromhex(before.key), hello), time.monotonic() + 5)
            with contextlib.suppress(BrokenPipeError):  # the true rank 0 may have taken its place back by now
                sock.sendall(nonsense)
    answers = until(lambda: linked(pool) == [[1], [0]] and pool_status(pool.run_dir).ranks, 5, "they link again")
    assert [rank.answer["dead"] for rank in answers] == [[], []]
    assert {rank.answer["epoch"] for rank in answers} == {before.epoch}
    assert read_state(pool.state_file) == before, "nobody wrote another state"
    assert found(client, MINE[:40]) == 40
    until(lambda: [r.answer["hung"] for r in pool_status(pool.run_dir).ranks] == [[], []], 3, "both hear of each other")


def linked(pool) -> list[list[int]]:
    return [rank.answer["linked"] for rank in pool_status(pool.run_dir).ranks]
