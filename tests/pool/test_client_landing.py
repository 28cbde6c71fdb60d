"""Registered buffers: blocks by UCX without a copy on the way, and what a hung rank does to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blocks import KEYS, LAYOUT, payload, puts
from watching import clean, until

from kvtool.pool import PoolClient, connect

pytestmark = [pytest.mark.real, pytest.mark.skipif(not pytest.importorskip("nixl_cu13"), reason="no NIXL")]

SIZE = LAYOUT.block_size
COUNT = 12


def blocks_of(array: np.ndarray) -> list[bytes]:
    return [bytes(row) for row in array]


def test_blocks_land_in_a_registered_buffer_without_staging(pool, client):
    keys = [b"land" + key[4:] for key in KEYS[:COUNT]]
    client.write(puts(keys))
    array, other = np.zeros((COUNT, SIZE), np.uint8), np.zeros((COUNT, SIZE), np.uint8)
    with connect(pool.run_dir, path="ucx") as far, far.register(array) as landing:
        assert far.get_into(keys, other, 10).count == COUNT, "what is not registered comes by staging"
        reader = far._ranks.door.reader
        reader.read = None
        result = far.get_into(keys, array, 10)
        assert result.count == COUNT and {got.path.value for got in result.blocks} == {"ucx"} and not result.held
        assert blocks_of(array) == blocks_of(other) == [payload(key) for key in keys]
        array[:] = 0
        picked = far.get_into([keys[3], bytes(32), keys[5]], array[:3], 10, leading=False)
        assert [got.hit for got in picked.blocks] == [True, False, True]
        assert blocks_of(array[:3]) == [payload(keys[3]), bytes(SIZE), payload(keys[5])]
        assert landing.free
        landing.release()
        assert far._ranks.door.landing(array.ctypes.data, SIZE) is None
    until(lambda: clean(pool.run_dir), 6, "no lease is left")


def test_only_host_memory_that_can_be_written_is_registered(client):
    with pytest.raises(ValueError, match="read-only"):
        client.register(b"fixed")
    with pytest.raises(ValueError, match="at least a byte"):
        client.register(bytearray())
    with client.register(bytearray(SIZE)) as landing:
        assert landing.free


def hung(state_file: Path) -> None:
    """A get over TCP during which every rank stops, and goes on later."""
    import signal

    from kvtool.pool.state import read_state

    keys = [b"land" + key[4:] for key in KEYS[:COUNT]]
    pids = [rank.pid for rank in read_state(state_file).ranks]
    pool = PoolClient(state_file, LAYOUT, path="ucx", client_name="hung reader")
    array = np.zeros((COUNT, SIZE), np.uint8)
    landing = pool.register(array)
    first = pool.get_into(keys, array, 20).count
    reader = pool._ranks.door.reader
    read_into = reader.read_into

    def stop_and_read(*arguments) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        read_into(*arguments)

    reader.read_into = stop_and_read
    result = pool.get_into(keys, array, 0.5)
    said = {"first": first, "count": result.count, "held": len(result.held), "free": landing.free}
    reader.read_into = read_into
    said["again"] = pool.get_into(keys, array, 0.2).count
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    until(lambda: landing.free, 10, "the transfer is over")
    until(lambda: pool.get_into(keys, array, 2).count == COUNT, 10, "and the buffer is of use again")
    said["right"] = blocks_of(array) == [payload(key) for key in keys]
    landing.release()
    pool.close()
    print(json.dumps(said), flush=True)


def test_a_buffer_is_held_while_a_hung_rank_may_write_to_it(pool, client):
    client.write(puts([b"land" + key[4:] for key in KEYS[:COUNT]]))
    done = subprocess.run(
        [sys.executable, __file__, pool.state_file], capture_output=True, text=True, timeout=60,
        env={**os.environ, "UCX_TLS": "tcp,self", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["first"] == COUNT and said["right"]
    assert said["count"] == said["again"] == 0
    assert said["held"] == COUNT and not said["free"]
    until(lambda: clean(pool.run_dir), 6, "nothing is left of the reader")


if __name__ == "__main__":
    hung(Path(sys.argv[1]))
