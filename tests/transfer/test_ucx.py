"""UCX between real processes: whole bytes, and bounded, typed failures when a peer is killed or hangs.

Runs over UCX's default transports here, and once more as a whole over TCP alone (the last test), as UCX reads its
settings when it is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import Thread

import numpy as np
import pytest

from kvtool.errors import Missing, ProtocolError, Refused, Unavailable
from kvtool.transfer import nixl, ucx
from kvtool.transfer.staging import StagingExhausted
from kvtool.transfer.ucx import PeerDead, PeerHung, UcxOwner, UcxReader

sys.path.insert(0, str(Path(__file__).parent))
from ucx_owner import pattern, serve

pytestmark = pytest.mark.real
KIB, MIB = 2**10, 2**20
SIZE = 16 * MIB
OVER_TCP = os.environ.get("UCX_TLS") == "tcp,self"


# Owners are forked from a process that has imported everything: importing NIXL takes longer than most of these tests.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["numpy", "kvtool.transfer.ucx", "nixl_cu13._api"])


class Owner:
    def __init__(self, name: str, seed: int) -> None:
        nixl.load()  # its settings are inherited
        self._link, link = FORKS.Pipe()
        self.process = FORKS.Process(target=serve, args=(name, SIZE, seed, link), daemon=True)
        self.process.start()
        link.close()
        self.bytes = pattern(SIZE, seed)
        assert self._link.poll(30), "the owner did not start"
        self.metadata = self._link.recv_bytes()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(5)

    def end(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
        self._link.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


def within(seconds: float) -> float:
    return time.monotonic() + seconds


def until(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline_s = within(seconds)
    while not true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def start() -> Iterator[Callable[[str, int], Owner]]:
    owners: list[Owner] = []

    def one(name: str = "rank", seed: int = 0) -> Owner:
        owners.append(Owner(name, seed))
        return owners[-1]

    yield one
    for owner in owners:
        owner.end()


@pytest.fixture(scope="module")
def calm() -> Iterator[tuple[Owner, UcxReader]]:
    """One owner and one reader for the tests that do them no harm; a start of each costs a second or more."""
    owner, made = Owner("calm", 0), UcxReader("client", 16 * MIB, 256 * KIB)
    made.connect("a", owner.metadata, within(10))
    yield owner, made
    made.close()
    made.close()
    owner.end()


@pytest.fixture
def reader() -> Iterator[UcxReader]:
    made = UcxReader("client", 16 * MIB, 256 * KIB)
    yield made
    made.close()
    made.close()


def ranges_of(count: int, size: int, seed: int) -> list[tuple[int, int]]:
    rng = Random(seed)
    return [(at * size, size if at else size - 3) for at in rng.sample(range(SIZE // size), count)]


@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_reads_and_writes_are_byte_exact(calm, count):
    owner, reader = calm
    size, free = 250_000 if count <= 7 else 200_001, reader.staging.free
    ranges = [(at + 5, length) for at, length in ranges_of(count, size, seed=count)]
    with reader.read("a", ranges, within(10)) as blocks:
        for (at, length), block in zip(ranges, blocks, strict=True):
            assert np.array_equal(np.frombuffer(block, np.uint8), owner.bytes[at : at + length])
    new = [np.random.default_rng(count + n).integers(0, 256, length, np.uint8) for n, (_, length) in enumerate(ranges)]
    if count % 2:  # from memory of our own
        reader.write("a", [(at, memoryview(data)) for (at, _), data in zip(ranges, new, strict=True)], within(10))
    elif count <= reader.staging.slots:  # filled in place
        with reader.staging.take([len(data) for data in new], within(1)) as staged:
            for view, data in zip(staged, new, strict=True):
                view[:] = memoryview(data)
            reader.write("a", [(at, view) for (at, _), view in zip(ranges, staged, strict=True)], within(10))
    for (at, length), data in zip(ranges, new, strict=True):
        owner.bytes[at : at + length] = data
    for at in range(0, SIZE, 64 * 256 * KIB):
        with reader.read("a", [(at + n * 256 * KIB, 256 * KIB) for n in range(64)], within(10)) as blocks:
            found = np.concatenate([np.frombuffer(block, np.uint8) for block in blocks])
            assert np.array_equal(found, owner.bytes[at : at + len(found)]), "nothing beside the ranges was touched"
    assert reader.staging.free == free


def test_threads_share_one_reader_and_two_owners(start, reader):
    owners = {"a": start("a", 1), "b": start("b", 2)}
    for peer, owner in owners.items():
        reader.connect(peer, owner.metadata, within(10))
    wrong: list[object] = []

    def work(seed: int) -> None:
        peer = "ab"[seed % 2]
        for at, length in ranges_of(12, 256 * KIB, seed):
            try:
                with reader.read(peer, [(at, length)], within(10)) as (block,):
                    if not np.array_equal(np.frombuffer(block, np.uint8), owners[peer].bytes[at : at + length]):
                        wrong.append((peer, at))
            except Exception as error:
                wrong.append(error)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == [] and reader.staging.free == reader.staging.slots


def test_a_killed_owner_is_an_error_in_well_under_a_second_and_its_replacement_serves(start, reader):
    owner = start("rank-0", 1)
    reader.connect("rank-0", owner.metadata, within(10))
    assert reader.connected("rank-0")
    owner.signal(signal.SIGKILL)
    for _ in range(2):
        began_s = time.monotonic()
        with pytest.raises(PeerDead, match=r"peer rank-0 (died|is dead)"):
            reader.read("rank-0", [(0, 4096)] * 8, within(5))
        assert time.monotonic() - began_s < 1.0
    assert not reader.connected("rank-0") and reader.staging.free == reader.staging.slots
    with pytest.raises(PeerDead):
        reader.write("rank-0", [(0, memoryview(b"x"))], within(5))
    replacement = start("rank-0", 9)
    reader.connect("rank-0", replacement.metadata, within(10))
    with reader.read("rank-0", [(100, 1000)], within(5)) as (block,):
        assert bytes(block) == replacement.bytes[100:1100].tobytes()


def test_an_owner_killed_during_a_read_is_an_error_in_well_under_a_second(start, reader):
    owner = start()
    reader.connect("a", owner.metadata, within(10))
    owner.signal(signal.SIGSTOP)  # so that the read is under way for sure; over CMA it is simply served
    seen: list[tuple[str, float]] = []

    def read() -> None:
        try:
            reader.read("a", [(0, 4096)], within(10)).release()
            seen.append(("served", time.monotonic()))
        except PeerDead:
            seen.append(("dead", time.monotonic()))

    thread = Thread(target=read)
    thread.start()
    assert until(lambda: bool(seen) or reader._peers["a"].running > 0)
    killed_s = time.monotonic()
    owner.signal(signal.SIGKILL)
    thread.join(10)
    assert seen[0][0] == ("dead" if OVER_TCP else "served")
    assert seen[0][1] - killed_s < 1.0


def test_an_owner_that_closed_is_dead_to_its_readers(start, reader):
    owner = start()
    reader.connect("a", owner.metadata, within(10))
    owner.end()
    with pytest.raises(PeerDead):
        reader.read("a", [(0, 64)], within(5))


def test_a_hung_owner_costs_its_deadline_and_holds_what_it_may_still_write(start, reader):
    """Over CMA a stopped process is still read; then there is nothing to time out."""
    hung, other = start("hung", 1), start("other", 2)
    reader.connect("hung", hung.metadata, within(10))
    hung.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    if not OVER_TCP:
        with reader.read("hung", [(0, 4096)] * 4, within(0.3)) as blocks:
            assert bytes(blocks[3]) == hung.bytes[:4096].tobytes()
        return
    with pytest.raises(PeerHung, match=r"peer hung did not serve a READ of 4 blocks in 0\.3"):
        reader.read("hung", [(0, 256 * KIB)] * 4, within(0.3))
    assert 0.25 < time.monotonic() - began_s < 0.6
    assert reader.staging.held == 4 and reader.staging.free == reader.staging.slots - 4
    with pytest.raises(PeerHung, match="1 transfers that were given up"):
        reader.read("hung", [(0, 64)], within(5))
    assert time.monotonic() - began_s < 1.0, "the second is refused at once"

    reader.connect("other", other.metadata, within(10))
    with reader.read("other", [(0, 256 * KIB)] * 8, within(5)) as blocks:
        before = [bytes(block) for block in blocks]
        reader.disconnect("hung")
        hung.signal(signal.SIGCONT)  # now its bytes arrive, long after the read was given up
        assert until(lambda: reader.progress() == 0), "over when the peer went on"
        assert [bytes(block) for block in blocks] == before, "late bytes landed in held slots only"
        assert reader.staging.held == 0
    assert reader.staging.free == reader.staging.slots
    reader.connect("hung", hung.metadata, within(10))
    with reader.read("hung", [(7, 100)], within(5)) as (block,):
        assert bytes(block) == hung.bytes[7:107].tobytes()


@pytest.mark.skipif(not OVER_TCP, reason="over CMA a stopped process is still read")
def test_a_closed_reader_keeps_mapped_what_a_hung_owner_may_still_write(start):
    hung = start()
    closed = UcxReader("client", 4 * MIB, 256 * KIB)
    closed.connect("a", hung.metadata, within(10))
    hung.signal(signal.SIGSTOP)
    with pytest.raises(PeerHung):
        closed.read("a", [(0, 256 * KIB)], within(0.05))
    closed.close()
    assert closed in ucx._kept_mapped and closed.progress() == 1
    hung.signal(signal.SIGCONT)
    assert until(lambda: closed.progress() == 0)


@pytest.mark.skipif(not OVER_TCP, reason="over CMA a stopped process is still read")
def test_the_slots_of_a_hung_owner_come_back_when_it_is_killed(start, reader):
    hung = start()
    reader.connect("a", hung.metadata, within(10))
    hung.signal(signal.SIGSTOP)
    with pytest.raises(PeerHung):
        reader.write("a", [(0, memoryview(bytes(100_000)))] * 3, within(0.1))
    assert reader.staging.held == 3
    hung.signal(signal.SIGKILL)
    assert until(lambda: reader.progress() == 0, 1.0)
    assert reader.staging.free == reader.staging.slots
    replacement = start()
    reader.connect("a", replacement.metadata, within(10))
    reader.read("a", [(0, 64)], within(5)).release()


def test_connecting_to_an_owner_that_does_not_progress_ends_at_the_deadline(start, reader):
    stopped, other = start("stopped", 1), start("other", 2)
    stopped.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    with pytest.raises(PeerHung, match="does not call progress"):
        reader.connect("a", stopped.metadata, within(0.3))
    assert time.monotonic() - began_s < 0.8 and not reader.connected("a")
    reader.connect("b", other.metadata, within(10))
    stopped.signal(signal.SIGCONT)
    reader.connect("a", stopped.metadata, within(10))
    with reader.read("a", [(0, 64)], within(5)) as (block,):
        assert bytes(block) == stopped.bytes[:64].tobytes()
    assert until(lambda: reader.progress() == 0)


def test_an_owner_outlives_a_reader_that_was_killed(start, reader):
    owner = start()
    code = (
        "import sys, time; from kvtool.transfer.ucx import UcxReader\n"
        "r = UcxReader('c', 1 << 22, 1 << 20); r.connect('a', bytes.fromhex(sys.argv[1]), time.monotonic() + 10)\n"
        "print('up', flush=True)\nwhile True: r.read('a', [(0, 1 << 20)] * 4, time.monotonic() + 10).release()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, owner.metadata.hex()], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"up\n"
    other.kill()
    other.communicate(timeout=5)
    reader.connect("a", owner.metadata, within(10))
    with reader.read("a", [(1, 5000)], within(5)) as (block,):
        assert bytes(block) == owner.bytes[1:5001].tobytes()


def test_staging_is_bounded_and_says_so(calm):
    _, reader = calm
    first = reader.read("a", [(0, 100)] * 60, within(5))
    with pytest.raises(StagingExhausted, match=r"wanted 5 staging slots of 256.0 KiB, 4 of 64 are free \(0 held"):
        reader.read("a", [(0, 100)] * 5, within(0.05))
    waiter = Thread(target=lambda: reader.read("a", [(0, 100)] * 5, within(10)).release())
    waiter.start()
    first.release()
    waiter.join(10)
    assert reader.staging.free == 64
    with pytest.raises(ValueError):
        first[0][0]
    with pytest.raises(ValueError, match="65 slots at once, staging has 64"):
        reader.read("a", [(0, 100)] * 65, within(1))


def test_misuse_is_refused(calm, reader):
    with pytest.raises(Unavailable, match="peer nobody is not connected"):
        reader.read("nobody", [(0, 1)], within(1))
    reader.connect("a", calm[0].metadata, within(10))
    with pytest.raises(ValueError, match="connected under another name already"):
        reader.connect("b", calm[0].metadata, within(10))
    with pytest.raises(PeerHung, match="no time was left for a READ; nothing was sent"):
        reader.read("a", [(0, 64)], within(0))
    assert reader.staging.held == 0 and reader.connected("a")
    for offset, size in [(-1, 2), (SIZE - 1, 2), (SIZE, 1), (0, 0)]:
        with pytest.raises(ValueError, match="its memory is"):
            reader.read("a", [(offset, size)], within(1))
    with pytest.raises(ValueError, match=r"sizes of 0 to 262144 bytes \(one slot\), got 262145"):
        reader.read("a", [(0, 256 * KIB + 1)], within(1))
    assert reader.read("a", [], within(1)) is not None
    reader.close()
    with pytest.raises(Unavailable, match="this reader is closed"):
        reader.read("a", [(0, 1)], within(1))


@pytest.mark.parametrize("raw", [b"", b"nonsense", b"\x93\x01\x02\x03", b"\x81\xa1a\x01", bytes(500)])
def test_metadata_that_is_not_ours_is_refused(reader, raw):
    with pytest.raises(ProtocolError, match="wanted the UCX metadata of a kvtool pool rank"):
        reader.connect("a", raw, within(1))


def test_metadata_of_another_version_is_refused_with_both(reader, monkeypatch):
    owner = UcxOwner("a", memoryview(bytearray(4096)))
    raw = owner.metadata()
    owner.close()
    owner.close()
    owner.progress()
    monkeypatch.setattr(nixl, "version", lambda: "9.9")
    with pytest.raises(ProtocolError, match=r"of NIXL 1\.\d+, this process 1 of NIXL 9\.9; install the same"):
        reader.connect("a", raw, within(1))


def test_a_transport_list_without_tcp_is_refused_before_nixl_crashes_on_it():
    for fine in ("", "all", "tcp,self", "^cma", "posix,tcp"):
        nixl.check_transports(fine)
    for setting, instead in [("posix,sysv,cma", "posix,sysv,cma,tcp"), ("^tcp,cma", "all")]:
        with pytest.raises(Refused, match=rf"leaves out tcp, .*UCX_TLS={instead}\)"):
            nixl.check_transports(setting)


def test_without_nixl_the_error_has_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(nixl, "_PACKAGES", ("nixl_of_no_one",))
    nixl.load.cache_clear()
    with pytest.raises(Missing, match="pip install"):
        UcxOwner("a", memoryview(bytearray(64)))
    nixl.load.cache_clear()


@pytest.mark.skipif(OVER_TCP, reason="is the inner run")
def test_all_of_this_holds_over_tcp_too():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "byte_exact or owner", __file__],
        env={**os.environ, "UCX_TLS": "tcp,self"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
