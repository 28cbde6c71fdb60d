"""A rank that comes alone: whom it believes, and when it begins a pool of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from blocks import LAYOUT, room_for
from lone import KEY, lone_rank

from kvtool.errors import Refused
from kvtool.pool import launch, meeting, wire
from kvtool.pool.config import PoolConfig, RankConfig
from kvtool.pool.meeting import Joining
from kvtool.pool.roster import entry_of, pack_view, unpack_view
from kvtool.pool.state import PoolState, RankState, started_at, write_state
from kvtool.pool.wire import Op

SETTINGS = PoolConfig(LAYOUT, 1, dram_size=room_for(40), file_size=0, ucx=False, name="lone")


@pytest.fixture
def config(tmp_path) -> RankConfig:
    launch._write_rank_config(SETTINGS, tmp_path, "kvtool-meeting")
    given = json.loads((tmp_path / "rank.json").read_text())
    return RankConfig(**{**given, "key": KEY.hex()})


def publish(config: RankConfig, *ranks: RankState) -> None:
    state = PoolState(1, config.key, config.prefix, config.layout, LAYOUT.block_size, 1.0, list(ranks))
    write_state(meeting.Path(config.state_file), state)


def comer(config: RankConfig, joining: Joining) -> RankState:
    here = (socket.gethostname(), f"{config.run_dir}/1.sock", ("127.0.0.1", 1))
    pid = os.getpid()
    return RankState(
        1, "lone/1", *here, "s", 0, 1, 0, pid, started_at(pid) or 0, incarnation=joining.incarnation, status="joining"
    )


def test_the_first_of_its_pool_begins_it(config):
    joining = Joining(config, 1)
    assert joining.incarnation == 1
    (mine,) = joining.meet(comer(config, joining))
    assert (mine.status, mine.weight) == ("live", 1.0), "nobody held its keys meanwhile"


def test_one_of_those_who_live_admits_it_as_the_incarnation_after_the_last(config, tmp_path):
    with lone_rank(tmp_path) as lone:
        known = [lone.state]

        def view(link, message, now_s):
            link.send(message.op, message.request, pack_view([entry_of(rank) for rank in known], whole=True))

        def join(link, message, now_s):
            (entry,), _ = unpack_view(message.body, "lone")
            known.append(meeting.rank_of(entry))
            view(link, message, now_s)

        lone.service.serve(Op.VIEW, view)
        lone.service.serve(Op.JOIN, join)
        before = replace(comer(config, Joining(config, 1)), incarnation=6, status="dead", alive=False, pid=1)
        known.append(before)
        publish(config, lone.state, replace(before, incarnation=4))
        joining = Joining(config, 1)
        assert joining.incarnation == 7, "those who live know better than the file"
        ranks = joining.meet(comer(config, joining))
        assert [(rank.rank, rank.status, rank.incarnation) for rank in ranks] == [(0, "live", 1), (1, "joining", 7)]


def test_who_answers_and_refuses_is_believed(config, tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "ADMIT_S", 0.3)
    with lone_rank(tmp_path) as lone:
        lone.service.serve(Op.JOIN, lambda link, message, now_s: link.refuse(message.request, Op.JOIN, "not you"))
        publish(config, lone.state)
        joining = Joining(config, 1)
        with pytest.raises(Refused, match="does not admit lone/1, incarnation 1: not you"):
            joining.meet(comer(config, joining))


def test_a_rank_of_another_version_is_no_reason_to_begin_a_second_pool(config, tmp_path, monkeypatch):
    monkeypatch.setattr(meeting, "ADMIT_S", 0.3)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "old.sock"))
        listener.listen()
        stop = threading.Event()

        def greet() -> None:
            while not stop.is_set():
                sock, _ = listener.accept()
                with sock, contextlib.suppress(OSError):
                    sock.sendall(wire.HEAD.pack(0, Op.HELLO, 0, wire.VERSION + 1, 0, 0))
                    sock.recv(1)

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        old = replace(comer(config, Joining(config, 1)), rank=0, identity="lone/0", unix=str(tmp_path / "old.sock"))
        publish(config, old)
        joining = Joining(config, 1)
        with pytest.raises(Refused, match="speaks version"):
            joining.meet(comer(config, joining))
        stop.set()
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(tmp_path / "old.sock"))
        thread.join(5)


def test_the_dead_and_the_mute_are_not_waited_for_long(config, tmp_path):
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute.sock"))
        mute.listen()
        silent = replace(comer(config, Joining(config, 1)), rank=0, identity="lone/0", unix=str(tmp_path / "mute.sock"))
        publish(config, silent, replace(silent, rank=2, identity="lone/2", unix=str(tmp_path / "nobody.sock")))
        began_s = time.monotonic()
        joining = Joining(config, 1)
        ranks = joining.meet(comer(config, joining))
    assert time.monotonic() - began_s < 4
    assert [(rank.rank, rank.status) for rank in ranks] == [(0, "joining"), (1, "live"), (2, "joining")]


def test_settings_of_another_kvtool_are_refused_with_a_sentence(tmp_path):
    (tmp_path / "rank.json").write_text('{"run_dir": "/nowhere"}')
    command = [sys.executable, "-m", "kvtool.pool.rank", "--config", str(tmp_path / "rank.json"), "--join", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith("rank 3: ") and "was it upgraded?" in done.stderr
