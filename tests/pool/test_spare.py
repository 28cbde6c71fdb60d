"""Puts of one block after the other into a real rank: one message each, and nothing kept that nobody uses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blocks import KEYS, LAYOUT, payload, puts, room_for
from watching import until

from kvtool.pool.base import Outcome, Put
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.wire import Op

pytestmark = pytest.mark.real
HERE = Path(__file__).parent
MINE = [b"spare" + key[5:] for key in KEYS[:40]]


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    config = PoolConfig(LAYOUT, ranks=1, dram_size=room_for(64), file_size=0, ucx=False)
    handle = start_pool(config, tmp_path_factory.mktemp("roomy"))
    yield handle
    stop_pool(handle.run_dir)


@pytest.fixture
def client(roomy):
    client = PoolClient(roomy.state_file, LAYOUT, client_name="one by one")
    client.write(puts([os.urandom(32)]), budget_s=10)  # maps the memory
    yield client
    client.close()


def count_ops(client: PoolClient, monkeypatch) -> list[Op]:
    (access,) = client._ranks.all()
    said, start = [], access.link.start

    def counted(op: Op, *rest):
        said.append(op)
        return start(op, *rest)

    monkeypatch.setattr(access.link, "start", counted)
    return said


def held(roomy) -> dict[str, int]:
    (rank,) = pool_status(roomy.run_dir, audit=True).ranks
    return {line["kind"]: line["count"] for line in rank.audit}


def test_puts_one_after_the_other_take_one_message_each(roomy, client, monkeypatch):
    said = count_ops(client, monkeypatch)
    for key in MINE[:20]:
        assert (
            client.write([Put(key, LAYOUT.block_size, None, data=memoryview(payload(key)))])[0].outcome
            is Outcome.STORED
        )
    assert said.count(Op.STORE) == 20 and said.count(Op.RESERVE) <= 2
    into = [bytearray(LAYOUT.block_size) for _ in MINE[:20]]
    assert client.get_into(MINE[:20], into).count == 20
    assert [bytes(data) for data in into] == [payload(key) for key in MINE[:20]]
    del said[:]
    assert client.write(puts(MINE[:1]))[0].outcome is Outcome.DUPLICATE and said == []
    until(lambda: held(roomy) == {}, 3, "the spare slot is given back when no more puts come")
    assert client.write(puts(MINE[20:21]))[0].outcome is Outcome.STORED


def test_fill_that_raises_leaves_no_slot_behind(roomy, client):
    def fill(room: memoryview) -> None:
        raise RuntimeError("no bytes")

    for key in MINE[21:23]:
        client.write(puts([key]))
    with pytest.raises(RuntimeError, match="no bytes"):
        client.write([Put(MINE[23], LAYOUT.block_size, fill)])
    until(lambda: held(roomy) == {}, 3, "what was reserved is given back")
    assert client.match(MINE[23:24]) == 0 and client.write(puts(MINE[23:24]))[0].outcome is Outcome.STORED


def test_spare_slot_of_a_killed_client_comes_back_at_once(roomy, client):
    code = (
        "import sys, os, threading; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from blocks import *; from kvtool.pool.client import PoolClient\n"
        "pool = PoolClient(Path(sys.argv[1]), LAYOUT)\n"
        "pool.write(puts([os.urandom(32)]), budget_s=10)\n"
        "while True: pool.write(puts([os.urandom(32)])); print('put', flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, roomy.state_file, str(HERE)], stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(5):
            assert writer.stdout.readline() == "put\n"
        writer.send_signal(signal.SIGKILL)
    finally:
        writer.kill()
        writer.communicate(timeout=10)
    began_s = time.monotonic()
    until(lambda: held(roomy) == {}, 2, "what a dead client held is free")
    assert time.monotonic() - began_s < 1.5


def test_view_in_place_holds_a_lease_that_nobody_waited_for(roomy, client, monkeypatch):
    keys = [b"view" + key[4:] for key in KEYS[:6]]
    client.write(puts(keys))
    said = count_ops(client, monkeypatch)
    with client.read(keys) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in keys] and said == []
        until(lambda: held(roomy).get("lease") == 1, 3, "the rank knows of the read")
        assert read.whole() == 6
    until(lambda: held(roomy) == {}, 3, "and of its end")
