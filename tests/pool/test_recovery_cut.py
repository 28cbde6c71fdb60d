"""A network that is cut between two hosts, which here are namespaces with names, networks and run directories of their
own: both sides go on, and become one pool again when it heals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from blocks import LAYOUT, room_for
from watching import until

from kvtool.pool import launch
from kvtool.pool.config import PoolConfig
from kvtool.pool.state import PoolState, read_state
from kvtool.transfer.segment import unlink_prefix

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
LOST_S = 2.0


@dataclass
class Side:
    """One host: `kvt-a` or `kvt-b`."""

    name: str
    rank: int
    directory: Path
    address: str
    processes: list[subprocess.Popen] = field(default_factory=list)

    @property
    def state_file(self) -> Path:
        return self.directory / "pool.json"

    @property
    def state(self) -> PoolState:
        return read_state(self.state_file)

    def run(self, *command: str, **pipes) -> subprocess.Popen:
        line = f"hostname {self.name} && exec " + " ".join(command)
        process = subprocess.Popen(["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", line], **pipes)
        self.processes.append(process)
        return process

    def start_rank(self) -> None:
        log = (self.directory / "pool.log").open("ab")
        config = str(self.directory / "rank.json")
        command = (sys.executable, "-m", "kvtool.pool.rank", "--config", config, "--join", str(self.rank))
        self.run(*command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        log.close()

    def start_client(self) -> subprocess.Popen:
        command = (sys.executable, str(HERE / "side.py"), str(self.state_file), str(self.rank))
        return self.run(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture
def sides(tmp_path):
    """Two namespaces with one wire between them."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("network namespaces need root, ip and unshare")
    number = os.getpid() % 250
    sides = [
        Side(f"kvt{number}-{letter}", rank, tmp_path / letter, f"10.77.{number}.{rank + 1}")
        for rank, letter in enumerate("ab")
    ]
    try:
        try:
            for side in sides:
                side.directory.mkdir(mode=0o700)
                ip("netns", "add", side.name)
            ip(
                "link",
                "add",
                "wire",
                "netns",
                sides[0].name,
                "type",
                "veth",
                "peer",
                "name",
                "wire",
                "netns",
                sides[1].name,
            )
            for side in sides:
                ip("-n", side.name, "addr", "add", f"{side.address}/24", "dev", "wire")
                ip("-n", side.name, "link", "set", "wire", "up")
                ip("-n", side.name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield sides
    finally:
        for process in [process for side in sides for process in side.processes]:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait(5)
        for side in sides:
            with contextlib.suppress(OSError):
                ip("netns", "del", side.name)
        unlink_prefix(f"kvtool-cut{number}")


def configure(side: Side) -> None:
    """As for a pool of one host; then the address, and what both must have in common."""
    settings = PoolConfig(LAYOUT, 1, dram_size=room_for(120), file_size=0, lease_term_s=2, ucx=False, lost_s=LOST_S)
    launch._write_rank_config(settings, side.directory, f"kvtool-cut{os.getpid() % 250}")
    file = side.directory / "rank.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": side.address, "key": "5a" * 32, "base": 1}))


def ask(client: subprocess.Popen) -> dict:
    client.stdin.write("\n")
    client.stdin.flush()
    seen = json.loads(client.stdout.readline())
    assert seen["wrong"] == 0 and seen["errors"] == [], seen
    return seen


def serving(state: PoolState) -> dict[int, int]:
    return {rank.rank: rank.incarnation for rank in state.ranks if rank.alive}


def cut(sides: list[Side], state: str) -> None:
    ip("-n", sides[0].name, "link", "set", "wire", state)


def test_both_sides_of_a_cut_go_on_and_become_one_pool_again(sides):
    here, there = sides
    for side in sides:
        configure(side)
    here.start_rank()
    until(here.state_file.exists, 10, "the first rank begins a pool")
    shutil.copy(here.state_file, there.state_file)  # how the second host is told where the pool is
    there.start_rank()
    until(lambda: serving(here.state) == serving(there.state) == {0: 1, 1: 1}, 15, "the second joins over TCP")
    clients = [side.start_client() for side in sides]
    until(lambda: all(ask(client).get("hit", 0) > 30 for client in clients), 10, "both sides read")

    cut(sides, "down")
    began_s = time.monotonic()
    until(lambda: serving(here.state) == {0: 1} and serving(there.state) == {1: 1}, 15, "each takes the other for dead")
    alone_s = time.monotonic() - began_s
    before = [ask(client)["hit"] for client in clients]
    until(lambda: all(ask(c)["hit"] > hit + 30 for c, hit in zip(clients, before, strict=True)), 10, "both go on")

    cut(sides, "up")
    began_s = time.monotonic()
    until(
        lambda: serving(here.state) == serving(there.state) == {0: 2, 1: 2}, 15, "both go on as their next incarnation"
    )
    until(lambda: here.state.epoch == there.state.epoch, 5, "and know the same")
    print(f"cut: alone after {alone_s:.2f} s; healed: one pool again after {time.monotonic() - began_s:.2f} s")
    before = [ask(client)["hit"] for client in clients]
    until(lambda: all(ask(c)["hit"] > hit + 30 for c, hit in zip(clients, before, strict=True)), 10, "clients go on")
