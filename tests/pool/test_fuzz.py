"""Whatever comes in at a rank's door: no crash, no hang, no memory to speak of, and others are served meanwhile.

Random bytes, valid sessions with some bits wrong, counts without their records, frames cut off, slow drips; before the
handshake and after it, on connections and on data connections. And clients that come and go, by the thousand.
"""

from __future__ import annotations

import gc
import socket
import struct
import time
import tracemalloc
from pathlib import Path
from random import Random

import pytest
from blocks import KEYS, LAYOUT, payload, puts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lone import lone_rank
from test_by_socket import Raw, lane_of

from kvtool.kv.record import Want
from kvtool.pool import wire
from kvtool.pool.client import PoolClient
from kvtool.pool.wire import Op

FIRST = (Op.LOOKUP, Op.RESERVE, Op.COMMIT, Op.FETCH, Op.READ, Op.WRITE, Op.GATHER)
MEMORY_MAX = 24 * 2**20
"""What a rank may take for one client's nonsense: a few frames at their limit."""
PACKED = [
    (Op.LOOKUP, wire.pack_lookup(9, 0.01, KEYS[:3])), (Op.GATHER, wire.pack_lookup(8, 0.01, KEYS[:3])),
    (Op.FETCH, wire.pack_fetch(3, 1, False, wire.pack_lookup(7, 0.01, KEYS[:3]))),
    (Op.RESERVE, wire.pack_wants(0.01, [Want(KEYS[0], 77, KEYS[1])])), (Op.COMMIT, wire.pack_commits([(1, 2, 3)])),
    (Op.ABORT, wire.pack_aborts(0.5, [(1, 2)])), (Op.RELEASE, wire.pack_numbers([1, 2**60])),
    (Op.CORRUPT, wire.pack_corrupt(KEYS[0], 3, 4)), (Op.READ, wire.pack_read(3, 1, 9, [1, 2])),
    (Op.WRITE, wire.pack_write(3, 1, [(1, 2)])), (Op.MATCH, KEYS[0]), (Op.HAS, KEYS[0]), (Op.DROP, KEYS[0]),
    (Op.DELETE, KEYS[0]), (Op.HELLO, bytes(40)), (Op.STATUS, b""), (Op.AUDIT, b""), (Op.PING, b"x"),
]  # fmt: skip


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    with lone_rank(tmp_path_factory.mktemp("fuzz")) as lone:
        yield lone


def is_well(lone) -> None:
    """A client that comes now is served at once, with the right bytes."""
    assert not lone.failed
    client = PoolClient(lone.state_file(), LAYOUT, client_name="friend")
    try:
        client.write(puts(KEYS[:2]), 5)
        with client.read(KEYS[:2], 5) as read:
            assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:2]]
    finally:
        client.close()


@st.composite
def streams(draw):
    """Frames of ours, whole or with bytes changed, cut or added, and heads that announce anything."""
    parts = []
    for _ in range(draw(st.integers(1, 5))):
        op, body = draw(st.sampled_from(PACKED))
        frame = bytearray(wire.frame(op, draw(st.integers(0, 3)), 7, body))
        for _ in range(draw(st.integers(0, 3))):
            frame[draw(st.integers(0, len(frame) - 1))] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
        parts.append(bytes(frame[: draw(st.integers(0, len(frame)))] if draw(st.booleans()) else frame))
        if draw(st.integers(0, 9)) == 0:
            parts.append(draw(st.binary(max_size=60)))
    return b"".join(parts)


def hung_up_or_quiet(sock: socket.socket, wait_s: float = 0.02) -> None:
    """Take what it says, until it hangs up or says nothing more."""
    sock.settimeout(wait_s)
    try:
        while sock.recv(2**16):
            pass
    except (TimeoutError, ConnectionError):
        pass


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(data=st.binary(max_size=400) | streams())
def test_strangers_may_say_anything(lone, data):
    with lone.connect() as sock:
        try:
            sock.sendall(data)
        except ConnectionError:
            pass
        hung_up_or_quiet(sock)
    assert not lone.failed


@FUZZ
@given(data=streams())
def test_friends_who_lost_their_mind_may_say_anything(lone, data):
    sock, _ = lone.enter()
    with sock:
        try:
            sock.sendall(data)
        except ConnectionError:
            pass
        hung_up_or_quiet(sock)
    assert not lone.failed


def test_after_all_that_others_are_served_and_nothing_is_held(lone):
    is_well(lone)
    deadline_s = time.monotonic() + 5
    while lone.do(lambda: len(lone.loop.connections)):
        assert time.monotonic() < deadline_s, "all are gone"
    store = lone.service.store
    assert lone.do(store.lost_slots) == 0 and lone.do(lambda: len(store.leases)) == 0


@pytest.mark.parametrize("op", FIRST, ids=lambda op: op.name)
def test_counts_without_their_records_cost_no_memory(lone, op):
    heads = [struct.pack("<I", 2**32 - 1) * n for n in range(1, 9)] + [b"\xff" * n for n in (4, 8, 12, 16, 20, 24, 64)]
    tracemalloc.start()
    try:
        for head in heads:
            sock, _ = lone.enter()
            with sock:
                sock.sendall(wire.frame(op, 1, 0, head))
                hung_up_or_quiet(sock)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()
    assert not lone.failed


def test_frames_that_never_end_are_bounded_in_number_and_size(lone):
    """Thirty clients leave the largest frame unfinished, and strangers try the same."""
    socks = [lone.enter()[0] for _ in range(8)] + [lone.connect() for _ in range(30)]
    tracemalloc.start()
    try:
        for sock in socks:
            sock.setblocking(False)
            try:
                sock.send(wire.HEAD.pack(wire.FRAME_MAX, Op.LOOKUP, 0, wire.VERSION, 1, 0) + bytes(2**16))
            except (BlockingIOError, ConnectionError):
                pass
        is_well(lone)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX + 8 * 2**18
    finally:
        tracemalloc.stop()
    for sock in socks:
        sock.close()


def test_a_client_that_drips_holds_nobody_up(lone):
    slow, _ = lone.enter()
    with slow:
        frame = wire.frame(Op.LOOKUP, 1, 0, wire.pack_lookup(1, 0, KEYS[:20]))
        began_s = time.monotonic()
        for at in range(0, len(frame), 64):
            slow.sendall(frame[at : at + 64])
            if at % 256 == 0:
                is_well(lone)
        assert slow.recv(2**16), "it is answered when it is through"
        assert time.monotonic() - began_s < 20


@pytest.mark.parametrize("seed", range(8))
def test_data_connections_may_carry_anything(lone, seed):
    rng, raw = Random(seed), Raw(lone)
    before = lone.do(lambda: lone.service.store.dram.used)
    for _ in range(6):
        sock, number = lane_of(lone, raw.session.data, raw.owner)
        slots = raw.reserve(*(rng.randbytes(32) for _ in range(2)))
        raw.send(Op.WRITE, wire.pack_write(number, 1, slots))
        try:
            sock.sendall(rng.randbytes(rng.randrange(40)) + rng.choice([b"", bytes(2 * LAYOUT.block_size)]))
        except ConnectionError:
            pass
        sock.close()
        assert raw.ask(Op.COMMIT, wire.pack_commits([(*slot, 0) for slot in slots])) == b"\1\1", "no block came of it"
    raw.sock.close()
    is_well(lone)
    deadline_s = time.monotonic() + 5
    while lone.do(lambda: lone.service.store.dram.used) > max(before, 2):
        assert time.monotonic() < deadline_s, "the slots come back"


def resident_size() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def come_and_go(lone, times: int) -> None:
    rng = Random(times)
    for _ in range(times):
        match rng.randrange(4):
            case 0:
                lone.connect(tcp=rng.random() < 0.5).close()
            case 1:
                lone.enter(tcp=rng.random() < 0.5)[0].close()
            case 2:
                raw = Raw(lone)
                raw.reserve(rng.randbytes(32))
                raw.sock.close()
            case 3:
                raw = Raw(lone)
                sock, number = lane_of(lone, raw.session.data, raw.owner)
                found = wire.pack_fetch(number, 1, False, wire.pack_lookup(1, 0, KEYS[:1]))
                raw.send(Op.FETCH, found)
                sock.close() if rng.random() < 0.5 else raw.sock.close()
                sock.close()
                raw.sock.close()


@pytest.mark.parametrize("times", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_clients_that_come_and_go_leave_nothing_behind(lone, times):
    """Descriptors, threads and memory are what they were; the first hundred fill caches."""
    is_well(lone)
    come_and_go(lone, 100)
    fds, size = settled(lone)
    come_and_go(lone, times)
    fds_after, size_after = settled(lone)
    assert fds_after <= fds + 2
    assert size_after - size < 8 * 2**20 + times * 200, f"{size_after - size} bytes more"
    is_well(lone)


def settled(lone) -> tuple[int, int]:
    """(descriptors, resident bytes) once everybody is gone."""
    deadline_s = time.monotonic() + 10
    while lone.do(lambda: len(lone.loop.connections) + len(lone.service.lanes)):
        assert time.monotonic() < deadline_s, "all are gone"
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), resident_size()
