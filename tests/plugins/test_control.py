"""The channel: every rank is asked, the least of their answers counts; who is late, hung or gone counts as none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvtool.errors import EngineRefused, KvtoolError, ProtocolError
from kvtool_trtllm import control
from kvtool_trtllm.control import Control, ControlWorker, address_of, unpacked

HELLO = {"layout": "L"}
KEYS = [bytes([at]) * 32 for at in range(5)]
KEY = b"0123456789abcdef"


class Holds:
    """A stager that holds up to `blocks`; with `error` it fails, `hang` it waits for."""

    def __init__(self, blocks: int, error: Exception | None = None, hang: threading.Event | None = None) -> None:
        self.blocks, self.error, self.hang = blocks, error, hang
        self.held: dict[int, int] = {}
        self.asked: list[Sequence[bytes]] = []
        self.kept = threading.Condition()

    def stage(self, load_id: int, keys: Sequence[bytes], budget_s: float) -> int:
        self.asked.append(keys)
        if self.hang is not None:
            self.hang.wait(20)
        if self.error is not None:
            raise self.error
        self.held[load_id] = min(self.blocks, len(keys))
        return self.held[load_id]

    def keep(self, load_id: int, blocks: int) -> None:
        with self.kept:
            self.held[load_id] = min(blocks, self.held.get(load_id, 0))
            self.kept.notify_all()

    def only(self, load_ids: Sequence[int]) -> None:
        self.live = list(load_ids)

    def until(self, right: Callable[[], bool]) -> None:
        with self.kept:
            assert self.kept.wait_for(right, 10)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., tuple[Control, list[ControlWorker]]]]:
    """`made(stagers...)`: a scheduler and a worker for each, connected."""
    open_: list[Any] = []

    def make(*stagers: Any, hello: dict[str, Any] = HELLO, wait: bool = True) -> tuple[Control, list[ControlWorker]]:
        address = str(tmp_path / "c.sock")
        there = Control(address, KEY, len(stagers), HELLO)
        workers = [ControlWorker(address, KEY, {**hello, "rank": rank}, one) for rank, one in enumerate(stagers)]
        open_.extend([*workers, there])
        if wait:
            there.wait_for_workers(10)
        return there, workers

    yield make
    for one in open_:
        one.close()


def test_the_least_that_a_rank_holds_is_what_can_be_claimed(made: Any) -> None:
    stagers = Holds(5), Holds(2), Holds(4)
    there, _ = made(*stagers)
    assert there.stage(7, KEYS, 5.0) == 2
    assert all([*one.asked[0]] == KEYS for one in stagers)
    for one in stagers:
        one.until(lambda one=one: one.held[7] == 2)
    there.keep(7, 0)
    for one in stagers:
        one.until(lambda one=one: one.held[7] == 0)


def test_nothing_is_asked_for_no_keys_or_before_all_are_there(made: Any, tmp_path: Path) -> None:
    there, _ = made(Holds(5))
    assert there.stage(1, [], 1.0) == 0
    alone = Control(str(tmp_path / "d.sock"), KEY, 1, HELLO)
    assert not alone.ready and alone.stage(1, KEYS, 1.0) == 0
    with pytest.raises(EngineRefused, match=r"0 of 1 workers came to the scheduler within 0\.01 s"):
        alone.wait_for_workers(0.01)
    alone.close()


def test_one_that_is_late_counts_as_none_and_its_answer_is_not_taken_for_the_next(made: Any) -> None:
    hang = threading.Event()
    slow, fast = Holds(3, hang=hang), Holds(5)
    there, _ = made(slow, fast)
    began_s = time.monotonic()
    assert there.stage(1, KEYS, 0.2) == 0
    assert time.monotonic() - began_s < 2
    fast.until(lambda: fast.held[1] == 0)
    hang.set()
    assert there.stage(2, KEYS, 5.0) == 3
    slow.until(lambda: slow.held[1] == 0)


@pytest.mark.parametrize("error", [KvtoolError("pool down"), ValueError("a bug")])
def test_one_that_fails_counts_as_none_and_goes_on(made: Any, error: Exception) -> None:
    bad = Holds(5, error)
    there, _ = made(bad, Holds(5))
    assert there.stage(1, KEYS, 5.0) == 0
    bad.error = None
    assert there.stage(2, KEYS, 5.0) == 5


def test_one_that_does_not_fit_is_refused_with_both_sides(made: Any) -> None:
    there, (worker,) = made(Holds(1), hello={"layout": "other"}, wait=False)
    with pytest.raises(EngineRefused, match="rank 0 does not fit its scheduler: layout: found 'other', wanted 'L'"):
        there.wait_for_workers(10)
    with pytest.raises(EngineRefused, match="does not fit"):
        assert there.ready
    worker._thread.join(10)
    assert worker.refusal is not None and "found 'other'" in str(worker.refusal)


def test_strangers_are_not_heard(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, _ = made(Holds(3))
    with pytest.raises(Exception, match=r"digest|rejected|closed|reset"):
        Client(str(tmp_path / "c.sock"), authkey=b"wrong")
    with Client(str(tmp_path / "c.sock"), authkey=KEY) as stranger:
        stranger.send_bytes(b"\xc1")
        with pytest.raises((EOFError, OSError)):
            stranger.recv_bytes()
    monkeypatch.setattr(control, "_MEET_S", 0.1)
    with Client(str(tmp_path / "c.sock")) as silent:
        assert silent.recv_bytes(), "a challenge"
        with pytest.raises((EOFError, OSError)):
            silent.recv_bytes()
    assert there.stage(1, KEYS, 5.0) == 3


def test_a_worker_that_went_away_comes_again(made: Any, tmp_path: Path) -> None:
    there, (first,) = made(Holds(3))
    first.close()
    deadline = time.monotonic() + 10
    while there.stage(1, KEYS, 0.5) and time.monotonic() < deadline:
        pass
    assert there.stage(2, KEYS, 0.5) == 0
    there.keep(1, 0)
    fresh = Holds(4)
    again = ControlWorker(str(tmp_path / "c.sock"), KEY, {**HELLO, "rank": 0}, fresh)
    there.wait_for_workers(10)
    assert there.stage(3, KEYS, 5.0) == 4
    assert fresh.live == [], "it is told which loads live still: none"
    again.close()


def test_of_many_loads_the_newest_are_told(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_LIVE_MAX", 2)
    there, _ = made(Holds(3))
    assert [there.stage(load, KEYS, 5.0) for load in (1, 2, 3)] == [3, 3, 3]
    with Client(str(tmp_path / "c.sock"), authkey=KEY) as again:
        again.send_bytes(msgpack.packb({**HELLO, "rank": 0}))
        assert unpacked(again.recv_bytes()) == {"live": [2, 3]}


WORKER = """
import sys, time
from kvtool_trtllm.control import ControlWorker
class Stager:
    def stage(self, load_id, keys, budget_s): return len(keys)
    def keep(self, load_id, blocks): pass
    def only(self, load_ids): pass
worker = ControlWorker(sys.argv[1], {key!r}, {{"layout": "L", "rank": 1}}, Stager())
print("up", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def a_worker_apart(folder: Path) -> Iterator[tuple[Control, subprocess.Popen[bytes]]]:
    """A scheduler, a worker in this process, and one in a process of its own, which have met."""
    address = str(folder / "c.sock")
    there = Control(address, KEY, 2, HELLO)
    own = ControlWorker(address, KEY, {**HELLO, "rank": 0}, Holds(5))
    script = WORKER.format(key=KEY)
    other = subprocess.Popen([sys.executable, "-c", script, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        there.wait_for_workers(30)
        yield there, other
    finally:
        other.kill()
        other.communicate()
        own.close()
        there.close()


@pytest.mark.real
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_hung_process_costs_one_budget_at_most(tmp_path: Path, signal_: signal.Signals) -> None:
    with a_worker_apart(tmp_path) as (there, other):
        assert there.stage(1, KEYS, 10.0) == 5
        os.kill(other.pid, signal_)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)  # a signal takes its time
        began_s = time.monotonic()
        assert there.stage(2, KEYS, 0.5) == 0
        assert time.monotonic() - began_s < 5
        if signal_ is signal.SIGSTOP:
            os.kill(other.pid, signal.SIGCONT)
            assert there.stage(3, KEYS, 10.0) == 5


def test_half_an_answer_costs_no_more_than_none(tmp_path: Path) -> None:
    there = Control(str(tmp_path / "c.sock"), KEY, 1, HELLO)
    with Client(str(tmp_path / "c.sock"), authkey=KEY) as half:
        half.send_bytes(msgpack.packb({**HELLO, "rank": 0}))
        half.recv_bytes()
        there.wait_for_workers(10)
        os.write(half.fileno(), (9).to_bytes(4, "big"))
        held: list[int] = []
        asked = threading.Thread(target=lambda: held.append(there.stage(1, KEYS, 5.0)), daemon=True)
        asked.start()
        asked.join(10)
        assert held == [0] and not there.ready
    there.close()


@pytest.mark.real
def test_a_process_that_reads_nothing_never_blocks_the_engine(tmp_path: Path) -> None:
    """Keys of long prompts fill its socket: it is given up then, and meets the scheduler again when it goes on."""
    keys = [bytes(32)] * 4096
    with a_worker_apart(tmp_path) as (there, other):
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        asked = threading.Thread(target=lambda: [there.stage(load, keys, 0.05) for load in range(20)], daemon=True)
        asked.start()
        asked.join(15)
        assert not asked.is_alive(), "a write to it waits for ever"
        assert not there.ready
        os.kill(other.pid, signal.SIGCONT)
        there.wait_for_workers(30)
        assert there.stage(99, keys, 10.0) == 5


def test_a_worker_gives_up_where_there_is_no_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONNECT_S", 0.1)
    worker = ControlWorker(str(tmp_path / "nobody.sock"), KEY, HELLO, Holds(1))
    worker._thread.join(10)
    assert not worker._thread.is_alive()
    worker.close()


def test_a_worker_leaves_a_scheduler_that_talks_nonsense(tmp_path: Path) -> None:
    address = str(tmp_path / "c.sock")
    with Listener(address, authkey=KEY) as listener:
        worker = ControlWorker(address, KEY, {**HELLO, "rank": 0}, Holds(1))
        for nonsense in ({"op": "dance"}, {"op": "stage", "load": "x"}):
            with listener.accept() as connection:
                assert unpacked(connection.recv_bytes())["rank"] == 0
                connection.send_bytes(msgpack.packb({"live": []}))
                connection.send_bytes(msgpack.packb(nonsense))
                with pytest.raises((EOFError, OSError)):
                    connection.recv_bytes()
    worker.close()


@pytest.mark.parametrize("raw", [b"", b"\xc1", msgpack.packb([1])])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="control: "):
        unpacked(raw)


def test_addresses(tmp_path: Path) -> None:
    assert address_of("/run/c.sock", None)[0] == "/run/c.sock"
    assert str(os.getpid()) in address_of(None, None)[0]
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    assert address_of("tcp://10.0.0.1:70", str(key)) == (("10.0.0.1", 70), KEY)
    for given, file, said in (
        ("tcp://x", None, "wanted tcp://HOST:PORT"),
        ("tcp://h:1", None, "TCP needs key_file"),
        ("tcp://h:1", str(tmp_path / "none"), "No such file"),
    ):
        with pytest.raises(EngineRefused, match=said):
            address_of(given, file)
    key.chmod(0o644)
    with pytest.raises(EngineRefused, match="wanted mode 0600 and 16 bytes or more, found 0644"):
        address_of("tcp://h:1", str(key))


def test_over_tcp_with_a_key(tmp_path: Path) -> None:
    there = Control(("127.0.0.1", 0), KEY, 1, HELLO)
    worker = ControlWorker(there._listener.address, KEY, {**HELLO, "rank": 0}, Holds(2))
    there.wait_for_workers(10)
    assert there.stage(1, KEYS, 5.0) == 2
    worker.close()
    there.close()


def test_an_address_that_cannot_be_listened_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineRefused, match="cannot listen there"):
        Control(str(tmp_path / "no" / "such" / "place"), KEY, 1, HELLO)
