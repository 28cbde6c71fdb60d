"""The client as a library: its documentation runs, it survives a fork, and says so when it cannot be pickled."""

from __future__ import annotations

import doctest
import multiprocessing
import os
import pickle
import subprocess
import sys

import pytest
from blocks import KEYS, LAYOUT, payload, puts
from watching import clean, until

import kvtool.pool
from kvtool.errors import PoolUnavailable, Refused
from kvtool.kv.layout import KVLayout
from kvtool.pool import AsyncPoolClient, EmbeddedPool, connect, connect_async
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import start_pool, stop_pool


@pytest.mark.real
def test_the_examples_of_the_package_run(tmp_path):
    handle = start_pool(PoolConfig(LAYOUT, ranks=1, dram_size=2**20, file_size=0, ucx=False), tmp_path)
    try:
        found = doctest.testmod(kvtool.pool, extraglobs={"run_dir": tmp_path}, optionflags=doctest.NORMALIZE_WHITESPACE)
    finally:
        stop_pool(handle.run_dir)
    assert found.attempted > 15 and not found.failed


def test_importing_the_package_is_light():
    code = (
        "import sys, kvtool.pool; "
        "print([name for name in ('numpy', 'msgpack', 'asyncio', 'torch', 'nixl_cu13') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in kvtool.pool.__all__:
        assert getattr(kvtool.pool, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvtool.pool.nothing


@pytest.mark.real
def test_connect_takes_the_layout_from_the_pool_and_refuses_another(pool, tmp_path):
    for where in (pool.run_dir, str(pool.state_file)):
        with connect(where) as client:
            assert client.layout == LAYOUT and client.alive()
    assert connect_async(pool.run_dir).layout == LAYOUT
    with pytest.raises(Refused, match="KV layouts differ"):
        connect(pool.run_dir, KVLayout(layers=3, kv_heads=1, head_dim=64, block_tokens=32))
    with pytest.raises(PoolUnavailable, match="kvtool pool up"):
        connect(tmp_path)
    with connect(tmp_path, LAYOUT) as early:
        assert early.match(KEYS[:3]) == 0


@pytest.mark.real
def test_a_client_cannot_be_pickled_and_says_what_to_do(client):
    for pool in (client, EmbeddedPool(LAYOUT, 2**20), AsyncPoolClient(client._outside._file, LAYOUT)):
        with pytest.raises(TypeError, match="connect anew there"):
            pickle.dumps(pool)


def _child(client, keys, said) -> None:
    with client.read(keys) as read:
        found = [bytes(block.data) for block in read.blocks] == [payload(key) for key in keys]
    stored = [result.outcome.value for result in client.write(puts([b"child" + key[5:] for key in keys]))]
    said.send((found, stored, len({a.link._sock.fileno() for a in client._ranks.all()})))
    client.close()
    os._exit(0)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(pool, client):
    keys = KEYS[300:308]
    client.write(puts(keys))
    reading = client.read(keys)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(client, keys, theirs))
    child.start()
    assert ours.poll(20)
    found, stored, _ = ours.recv()
    assert found and set(stored) == {"stored"}
    child.join(10)
    assert child.exitcode == 0
    assert client.match(keys) == 8, "the parent's connection is as it was"
    assert reading.whole() == 8
    reading.release()
    until(lambda: clean(pool.run_dir), 3, "the child's end released nothing of the parent's, and left nothing")
