"""A pool that other hosts reach: only with a key of its own, and every message sealed."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest
from blocks import KEYS, LAYOUT, payload, puts
from lone import KEY, lone_rank
from watching import CONFIG, until

from kvtool.errors import SpecRefused
from kvtool.pool.base import Outcome, Path
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.dial import Dialler
from kvtool.pool.launch import pool_status, start_pool
from kvtool.pool.loop import Loop
from kvtool.pool.state import read_state, write_state
from kvtool.pool.wire import Op


def outward_address() -> str | None:
    """Of this host, not loopback; asks nobody."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(sock.getsockname()[0])
    return None if address.startswith("127.") else address


def key_file(directory, mode: int = 0o600):
    path = directory / "pool.key"
    path.write_text(KEY.hex())
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("10.0.0.5", r"10\.0\.0\.5 can be reached from other hosts, so pool\.key_file is wanted"),
        ("2001:db8::1", r"2001:db8::1 can be reached from other hosts, so pool\.key_file is wanted"),
        ("0.0.0.0", r"wanted the address that clients and other ranks connect to, found 0\.0\.0\.0; name it"),
        ("::", "wanted the address that clients"),
        ("node-3", "wanted an IP address of this host, found 'node-3'"),
    ],
)
def test_an_address_that_others_reach_wants_a_key_and_a_name(host, words):
    with pytest.raises(SpecRefused, match=words):
        PoolConfig(LAYOUT, host=host)
    for fine in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        assert PoolConfig(LAYOUT, host=fine).host == fine


def test_ranks_reach_each_other_by_tcp_with_the_same_handshake_and_sealed(tmp_path):
    """As two ranks on two hosts do: one dials, the other's loop answers."""
    with lone_rank(tmp_path) as lone:
        answered, got = threading.Event(), []
        loop = Loop(
            lambda: 1, lambda c: None, lambda c, m: (got.append(m.op), answered.set()), lambda c: None, lambda s: 0.05
        )
        dialler = Dialler(loop.post, KEY, lambda: {"name": "rank 1"})

        def ended(dialled, error) -> None:
            assert error is None and dialled.session is not None and dialled.sock.family == socket.AF_INET
            link = loop.adopt(dialled.sock)
            link.admit(dialled.session, client=True)
            link.send(Op.PING, 5)

        thread = threading.Thread(target=loop.run)
        thread.start()
        assert dialler.dial(lone.state, local=False, introduce=True, ended=ended)
        assert answered.wait(5) and got == [Op.PING]
        assert all(c._seal is not None for c in lone.do(lambda: list(lone.loop.connections.values())))
        loop.running = False
        loop.post(lambda: None)
        thread.join(5)
        for connection in list(loop.connections.values()):
            loop.close(connection, "end")


@pytest.mark.real
def test_a_pool_on_this_hosts_own_address_is_used_by_tcp_and_shows_its_metrics_to_nobody_else(tmp_path):
    address = outward_address()
    if address is None:
        pytest.skip("this host has no address but loopback")
    config = replace(CONFIG, host=address, key_file=key_file(tmp_path), heal=False)
    handle = start_pool(config, tmp_path / "run")
    try:
        state = read_state(handle.state_file)
        assert state.key == KEY.hex()
        assert {rank.tcp[0] for rank in state.ranks} == {address}
        assert {rank.metrics.partition(":")[0] for rank in state.ranks} == {"127.0.0.1"}
        far = tmp_path / "far.json"
        write_state(far, replace(state, ranks=[replace(rank, host="elsewhere") for rank in state.ranks]))
        client = PoolClient(far, LAYOUT, path="socket", client_name="far")
        assert {(r.outcome, r.path) for r in client.write(puts(KEYS[:12]), 20)} == {(Outcome.STORED, Path.SOCKET)}
        with client.read(KEYS[:12], 20) as read:
            assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:12]]
        client.close()
        until(lambda: pool_status(handle.run_dir).whole, 5, "the ranks are well")
    finally:
        handle.stop()


def test_a_client_with_another_key_has_misses_and_no_more(tmp_path):
    with lone_rank(tmp_path) as lone:
        path = lone.state_file(far=True)
        state = read_state(path)
        write_state(path, replace(state, key=(b"x" * 32).hex()))
        client, began_s = PoolClient(path, LAYOUT), time.monotonic()
        assert client.match(KEYS[:3]) == 0
        assert {r.outcome for r in client.write(puts(KEYS[:2]), 1)} == {Outcome.FAILED}
        assert time.monotonic() - began_s < 3
        client.close()
        assert lone.do(lambda: len(lone.service.store.resident())) == 0
