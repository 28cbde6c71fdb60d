"""Starting and stopping: one at a time in a run directory, and whatever happens nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest
from blocks import LAYOUT, room_for
from watching import CONFIG

from kvtool.errors import Refused
from kvtool.pool import launch
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.rundir import turn
from kvtool.transfer.segment import SHM, Segment


@pytest.mark.real
def test_of_two_starts_in_one_run_directory_one_wins_and_the_other_is_refused(tmp_path):
    config = PoolConfig(LAYOUT, ranks=1, dram_size=room_for(4), file_size=0, ucx=False)
    together, came = threading.Barrier(2), []

    def start() -> None:
        together.wait(5)
        try:
            came.append(start_pool(config, tmp_path))
        except Refused as error:
            came.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        (refused,) = [one for one in came if isinstance(one, Refused)]
        assert "a pool" in str(refused) and str(tmp_path) in str(refused)
        (handle,) = [one for one in came if one is not refused]
        assert pool_status(tmp_path).whole and pool_status(tmp_path).state.prefix == handle.prefix
    finally:
        stop_pool(tmp_path)
    assert not list(SHM.glob(f"{handle.prefix}*"))


def test_a_start_while_another_has_its_turn_is_refused_with_a_sentence(tmp_path):
    config = PoolConfig(LAYOUT, ranks=1, dram_size=room_for(4), file_size=0, ucx=False)
    with turn(tmp_path, 0), pytest.raises(Refused, match=r"another process starts or stops a pool in .* right now"):
        start_pool(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["pool.log"]


@pytest.mark.real
def test_a_failed_start_leaves_the_pool_alone_that_runs_there_by_now(pool):
    """Stopped by somebody else while it waited for its ranks, who then started another pool."""
    other = Segment.create("kvtool-0123456789-0", 4096)
    other.close()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(20)
        launch._undo(CONFIG, pool.run_dir, "kvtool-0123456789", ended)
    assert pool_status(pool.run_dir).whole
    assert not (SHM / other.name).exists(), "what it made itself goes"


def test_names_are_removed_though_the_launcher_does_not_end(tmp_path, monkeypatch):
    class Stuck:
        def poll(self) -> None:
            return None

        def wait(self, timeout: float) -> None:
            raise subprocess.TimeoutExpired("mpiexec", timeout)

    pid = 2**30  # of no process
    monkeypatch.setitem(launch._children, pid, Stuck())
    note = {"pid": pid, "started": 1, "prefix": "kvtool-9876543210", "file_dir": str(tmp_path)}
    (tmp_path / "launch.json").write_text(json.dumps(note))
    Segment.create("kvtool-9876543210-0", 4096).close()
    try:
        assert stop_pool(tmp_path)
        assert not list(SHM.glob("kvtool-9876543210*"))
        assert [path.name for path in tmp_path.iterdir()] == ["pool.log"]
    finally:
        (SHM / "kvtool-9876543210-0").unlink(missing_ok=True)


def test_stopping_where_no_pool_ever_was_leaves_no_trace(tmp_path):
    assert not stop_pool(tmp_path) and not stop_pool(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
