"""One real pool for all tests that can share it: it takes seconds to start."""

from __future__ import annotations

import pytest
from blocks import LAYOUT
from watching import CONFIG

from kvtool.pool.client import PoolClient
from kvtool.pool.launch import start_pool, stop_pool
from kvtool.transfer.segment import SHM


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    handle = start_pool(CONFIG, tmp_path_factory.mktemp("pool"))
    yield handle
    stop_pool(handle.run_dir, purge=True)
    assert not list(SHM.glob(f"{handle.prefix}*"))


@pytest.fixture
def client(pool):
    client = PoolClient(pool.state_file, LAYOUT, client_name="test")
    yield client
    client.close()
