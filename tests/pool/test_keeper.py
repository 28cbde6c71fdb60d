"""The keeper alone: who is started when, how often at most, and what it says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from watching import until

from kvtool.pool import keeper as keeper_module
from kvtool.pool.keeper import Keeper, only_one
from kvtool.pool.keeping import keeper_status, start_keeper, want, wanted
from kvtool.pool.process import runs, started_at

GONE = 2**22 - 1
"""Of no process."""


def rank(number: int, pid: int = GONE, started: int = 1, host: str | None = None) -> dict:
    return {"rank": number, "pid": pid, "started": started, "status": "live", "host": host or os.uname().nodename}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """A pool whose ranks cannot start: they find no settings."""
    (tmp_path / "rank.json").write_text("{}")
    (tmp_path / "pool.json").write_text(json.dumps({"ranks": [rank(0, os.getpid(), started_at(os.getpid())), rank(1)]}))
    want(tmp_path, [0, 1])
    return tmp_path


def children(keeper: Keeper) -> list[int]:
    return sorted(keeper._children)


def over(keeper: Keeper, number: int) -> bool:
    keeper._reap()
    return not runs(*keeper._children[number])


def test_who_ends_at_once_is_started_ever_more_slowly_and_given_up_and_that_is_said(directory, monkeypatch):
    monkeypatch.setattr(keeper_module, "FAILURES_MAX", 2)
    keeper, now_s = Keeper(directory), 1000.0
    keeper.look(now_s)
    assert children(keeper) == [1], "rank 0 runs"
    until(lambda: over(keeper, 1), 20, "it ends")
    wait_s = keeper.look(now_s + 1)
    assert 0 < wait_s <= 0.5 and children(keeper) == [], "not at once"
    keeper.look(now_s + 2)
    until(lambda: over(keeper, 1), 20, "it ends again")
    keeper.look(now_s + 10)
    keeper.look(now_s + 1000)
    assert children(keeper) == []
    status = keeper_status(directory)
    assert (status.given_up, status.starts, status.pid) == ([1], {1: 2}, os.getpid())


def test_only_ranks_of_this_host_that_are_wanted_are_started(directory):
    keeper = Keeper(directory)
    (directory / "pool.json").write_text(json.dumps({"ranks": [rank(0, host="elsewhere"), rank(1)]}))
    want(directory, [0])
    keeper.look(1000.0)
    assert children(keeper) == []
    (directory / "pool.json").unlink()
    fresh = Keeper(directory)
    fresh.look(1000.0)
    assert children(fresh) == [], "what nobody has published yet is being started by somebody else"
    assert wanted(directory) == [0]


@pytest.mark.real
def test_there_is_one_it_wakes_seldom_and_ends_with_its_pool(directory):
    want(directory, [0])
    start_keeper(directory, dict(os.environ))
    status = keeper_status(directory)
    assert status.runs and only_one(directory) is None
    second = subprocess.run([sys.executable, "-m", "kvtool.pool.keeper", directory], timeout=20, check=False)
    assert second.returncode == 0 and keeper_status(directory).pid == status.pid
    started, began_s, before = started_at(status.pid), time.monotonic(), cpu_s(status.pid)
    until(lambda: time.monotonic() - began_s > 1.5, 3, "it has nothing to do")
    assert cpu_s(status.pid) - before < 0.1
    (directory / "rank.json").unlink()
    until(lambda: not runs(status.pid, started), 3, "its pool is gone")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
