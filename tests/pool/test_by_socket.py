"""Blocks by socket: right, bounded, and never sent from or written to a slot that is somebody else's by now."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
from blocks import KEYS, LAYOUT, payload, puts
from lone import lone_rank
from watching import until

from kvtool.errors import Refused
from kvtool.kv.record import Grant, Want
from kvtool.pool import data as data_module
from kvtool.pool import link as link_module
from kvtool.pool import wire
from kvtool.pool.aio import AsyncPoolClient
from kvtool.pool.base import Outcome, Path, Put
from kvtool.pool.client import PoolClient
from kvtool.pool.data import PREFACE
from kvtool.pool.handshake import Knock, Seal, shake
from kvtool.pool.wire import Op
from kvtool.transfer.checksum import checksum

MOST = LAYOUT.block_size


@pytest.fixture
def lone(tmp_path):
    with lone_rank(tmp_path) as lone:
        yield lone


@pytest.fixture(params=["unix", "tcp"])
def client(lone, request):
    client = PoolClient(lone.state_file(far=request.param == "tcp"), LAYOUT, client_name="by socket")
    yield client
    client.close()


def quiet(lone) -> bool:
    """Nothing is held at the rank."""
    return lone.do(lambda: not lone.service.store.audit(time.monotonic()) and not lone.service.lanes.audit(0.0))


def test_batches_come_back_as_they_were_put_and_nothing_stays_held(lone, client):
    results = client.write(puts(KEYS[:12]))
    assert [(r.outcome, r.path) for r in results] == [(Outcome.STORED, Path.SOCKET)] * 12
    with client.read(KEYS[:14]) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:12]]
        assert {block.path for block in read.blocks} == {Path.SOCKET} and read.whole() == 12
        assert read.blocks[0].data.readonly
    assert client.counts().misses == {"absent": 2}
    assert {r.outcome for r in client.write(puts(KEYS[:3]))} == {Outcome.DUPLICATE}
    for _ in range(20):
        client.read(KEYS[3:4]).release()
    until(lambda: quiet(lone), 3, "nothing stays held")
    assert lone.do(lambda: lone.service.lanes.counts) == {"sent": 21, "received": 1, "broken": 0}
    assert lone.do(lambda: len(lone.service.lanes)) == 1, "one lane serves call after call"
    assert quiet(lone) and client._ranks.door.inbox.free == client._ranks.door.inbox.slots


def test_blocks_of_any_size_arrive(client):
    sizes = {b"size" + key[4:]: size for key, size in zip(KEYS, [1, 7, 4096, MOST - 1, MOST, 2], strict=False)}

    def part_of(key: bytes):
        return lambda room: room.__setitem__(slice(None), payload(key)[: sizes[key]])

    assert {r.outcome for r in client.write([Put(k, n, part_of(k)) for k, n in sizes.items()])} == {Outcome.STORED}
    with client.read(list(sizes)) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key)[:size] for key, size in sizes.items()]


def test_many_threads_read_and_write_at_once(lone, client):
    wrong, barrier = [], threading.Barrier(6)

    def work(number: int) -> None:
        keys = [bytes([number]) + key[1:] for key in KEYS[:2]]
        barrier.wait(5)
        for _ in range(10):
            client.write(puts(keys), budget_s=5)
            with client.read(keys, budget_s=5) as read:
                if [bytes(b.data) for b in read.blocks] != [payload(key) for key in keys[: len(read.blocks)]]:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert not wrong
    until(lambda: quiet(lone), 3, "nothing stays held")


def test_a_fill_that_fails_gives_everything_back(lone, client):
    client.write(puts(KEYS[:1]))

    def broken(room) -> None:
        raise FileNotFoundError("the source is gone")

    blocks = [*puts(KEYS[1:3]), Put(KEYS[3], LAYOUT.block_size, broken)]
    with pytest.raises(FileNotFoundError):
        client.write(blocks)
    until(lambda: quiet(lone), 3, "reservations and slots come back")
    assert client.match(KEYS[:3]) == 1, "a part of a transfer is no block"
    assert {r.outcome for r in client.write(puts(KEYS[1:3]))} == {Outcome.STORED}


def lane_of(lone, key: bytes, owner: int):
    """A data connection for `owner`, and its number."""
    sock = lone.connect()
    try:
        said, _, _ = shake(sock, Knock(key, {"data": owner}), time.monotonic() + 5)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(5)
    return sock, said["you"]


class Raw:
    """A client that says what it likes, when it likes."""

    def __init__(self, lone) -> None:
        self.sock = lone.connect(tcp=True)
        said, self.session, _ = shake(self.sock, lone.knock(), time.monotonic() + 5)
        self.sock.settimeout(5)
        self.owner, self._seal, self._splitter = said["you"], Seal(self.session.up), wire.Splitter()
        self._splitter.seal = Seal(self.session.down)
        self._numbers, self._got = 0, []

    def send(self, op: Op, body: bytes) -> int:
        self._numbers += 1
        self.sock.sendall(wire.frame(op, self._numbers, 0, body, seal=self._seal))
        return self._numbers

    def answer(self) -> wire.Message:
        while not self._got:
            data = self.sock.recv(2**18)
            assert data, "the rank hung up"
            self._got += self._splitter.feed(data)
        return self._got.pop(0)

    def ask(self, op: Op, body: bytes) -> bytes:
        self.send(op, body)
        return self.answer().body

    def lease(self, read: int, keys: list[bytes]) -> list[int]:
        """The slots of `keys`, all of them there."""
        found = wire.unpack_found(self.ask(Op.LOOKUP, wire.pack_lookup(read, 0, keys)))
        assert len(found.hits) == len(keys)
        return [hit[0] for hit in found.hits]

    def reserve(self, *keys: bytes) -> list[tuple[int, int]]:
        wants = [Want(key, LAYOUT.block_size) for key in keys]
        answers, _ = wire.unpack_grants(self.ask(Op.RESERVE, wire.pack_wants(0, wants)))
        assert {answer.grant for answer in answers} == {Grant.GRANTED}
        return [(answer.slot, answer.generation) for answer in answers]


@pytest.fixture
def raw(lone):
    raw = Raw(lone)
    yield raw
    raw.sock.close()


def test_only_the_client_itself_can_open_its_data_connection(lone, raw):
    other = Raw(lone)
    raw.send(Op.PING, b"")
    for key, number in ((other.session.data, raw.owner), (raw.session.data, other.owner), (b"k" * 32, raw.owner)):
        with pytest.raises(Refused, match="does not know the pool's key"):
            lane_of(lone, key, number)
    with pytest.raises(Refused, match="that is not here"):
        lane_of(lone, raw.session.data, 999)
    sock, number = lane_of(lone, raw.session.data, raw.owner)
    other.send(Op.READ, wire.pack_read(number, 1, 1, [0]))
    assert b"is not this client's" in other.answer().body
    sock.close()
    other.sock.close()


@pytest.fixture
def narrow(monkeypatch):
    """Kernel buffers that hold less than a block, so that a send waits for its receiver."""
    bound = data_module.bound

    def narrowed(sock: socket.socket, stall_s: float) -> None:
        bound(sock, stall_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(data_module, "bound", narrowed)


@pytest.mark.usefixtures("narrow")
def test_a_slow_send_keeps_its_slots_from_others_although_the_lease_is_long_over(lone, raw, client):
    """The receiver takes a few bytes and waits; meanwhile the whole pool is written anew, several times."""
    keys = KEYS[:8]
    client.write(puts(keys))
    sock, number = lane_of(lone, raw.session.data, raw.owner)
    raw.send(Op.READ, wire.pack_read(number, 9, 1, raw.lease(1, keys)))
    raw.send(Op.RELEASE, wire.pack_numbers([1]))
    raw.ask(Op.PING, b"")
    assert [line.kind for line in lone.do(lambda: lone.service.lanes.audit(time.monotonic()))] == ["send"]
    assert lone.do(lambda: len(lone.service.store.leases)) == 0
    for turn in range(4):
        others = [bytes([turn]) + key[1:] for key in KEYS[20:28]]
        client.write(puts(others), budget_s=0.3)
    got = bytearray()
    while len(got) < PREFACE.size + 8 * LAYOUT.block_size:
        got += sock.recv(2**16)
    assert bytes(got[PREFACE.size :]) == b"".join(map(payload, keys))
    until(lambda: quiet(lone), 3, "the slots are free when the send is over")
    sock.close()


@pytest.mark.usefixtures("narrow")
def test_a_receiver_that_stops_is_given_up_and_its_slots_come_back(lone, raw, client, monkeypatch):
    monkeypatch.setattr(data_module, "STALL_S", 0.3)
    client.write(puts(KEYS[:12]))
    sock, number = lane_of(lone, raw.session.data, raw.owner)
    raw.send(Op.READ, wire.pack_read(number, 1, 1, raw.lease(1, KEYS[:12])))
    raw.send(Op.RELEASE, wire.pack_numbers([1]))
    until(lambda: lone.do(lambda: lone.service.lanes.counts["broken"]) == 1, 5, "it was given up")
    until(lambda: quiet(lone), 3, "nothing stays held")
    sock.close()


def test_a_commit_waits_for_the_last_byte_and_a_reservation_outlives_nobody(lone, raw, client):
    sock, number = lane_of(lone, raw.session.data, raw.owner)
    (slot,) = raw.reserve(KEYS[0])
    data = payload(KEYS[0])
    raw.send(Op.WRITE, wire.pack_write(number, 5, [slot]))
    raw.send(Op.COMMIT, wire.pack_commits([(*slot, checksum(data, KEYS[0]))]))
    sock.sendall(PREFACE.pack(5, len(data)) + data[:1000])
    raw.send(Op.PING, b"")
    assert raw.answer().op is Op.PING, "the commit is not answered yet, others are"
    assert client.match(KEYS[:1]) == 0
    sock.sendall(data[1000:])
    assert raw.answer().body == b"\0"
    with client.read(KEYS[:1]) as read:
        assert bytes(read.blocks[0].data) == data
    sock.close()


@pytest.mark.parametrize("how", ["hang up", "abort", "client gone", "other bytes"])
def test_a_put_that_is_broken_off_midway_is_no_block_and_frees_its_slot_after_the_transfer(lone, client, how):
    raw = Raw(lone)
    sock, number = lane_of(lone, raw.session.data, raw.owner)
    slots = raw.reserve(KEYS[0], KEYS[1])
    raw.send(Op.WRITE, wire.pack_write(number, 5, slots))
    if how == "other bytes":
        sock.sendall(PREFACE.pack(6, 2 * LAYOUT.block_size))
    else:
        sock.sendall(PREFACE.pack(5, 2 * LAYOUT.block_size) + payload(KEYS[0]))
    if how == "hang up":
        sock.close()
        assert raw.ask(Op.COMMIT, wire.pack_commits([(*slot, 0) for slot in slots])) == b"\1\1"
    elif how == "abort":
        raw.send(Op.ABORT, wire.pack_aborts(0.0, slots))
        raw.ask(Op.PING, b"")
        assert lone.do(lambda: lone.service.store.dram.used) == 2, "still being written: nobody else's yet"
        sock.sendall(payload(KEYS[1]))
    elif how == "client gone":
        raw.sock.close()
    until(lambda: quiet(lone) and lone.do(lambda: lone.service.store.dram.used) == 0, 5, "both slots are free")
    assert client.match(KEYS[:1]) == 0
    raw.sock.close()
    sock.close()


def test_slots_that_are_not_reserved_cannot_be_written(lone, raw, client):
    client.write(puts(KEYS[:1]))
    (slot, generation) = lone.do(lambda: [(e.slot, e.generation) for e in lone.service.store._index.values()])[0]
    for wrong in ([(slot, generation)], [(999, 1)], [(slot, generation + 1)], raw.reserve(KEYS[1]) * 2):
        sock, number = lane_of(lone, raw.session.data, raw.owner)
        raw.send(Op.WRITE, wire.pack_write(number, 5, wrong))
        assert sock.recv(1) == b"", "the lane is closed"
        sock.close()
    with client.read(KEYS[:1]) as read:
        assert bytes(read.blocks[0].data) == payload(KEYS[0])


def test_slots_that_are_not_leased_cannot_be_read(lone, raw, client):
    client.write(puts(KEYS[:4]))
    mine = raw.lease(1, KEYS[:1])
    (other,) = raw.lease(2, KEYS[1:2])
    raw.send(Op.RELEASE, wire.pack_numbers([2]))
    raw.reserve(KEYS[9])
    for read, slots in ((1, [other]), (2, [other]), (1, [*mine, 999]), (3, mine), (1, [15])):
        sock, number = lane_of(lone, raw.session.data, raw.owner)
        raw.send(Op.READ, wire.pack_read(number, 1, read, slots))
        assert sock.recv(100) == b"", f"the lane is closed, nothing of {slots} is sent"
        sock.close()
    sock, number = lane_of(lone, raw.session.data, raw.owner)
    raw.send(Op.READ, wire.pack_read(number, 1, 1, mine))
    assert sock.recv(16, socket.MSG_WAITALL) == PREFACE.pack(1, MOST)
    assert sock.recv(MOST, socket.MSG_WAITALL) == payload(KEYS[0])
    sock.close()


def test_buffers_are_filled_in_place_and_a_corrupt_block_is_a_miss(lone, client):
    client.write(puts(KEYS[:6]))
    slot = lone.do(lambda: lone.service.store._index[KEYS[2]].slot)
    lone.service.tiers.memory.slot(slot, MOST)[7] ^= 1
    buffers = [bytearray(MOST) for _ in range(6)]
    result = client.get_into(KEYS[:6], buffers, leading=False)
    assert [got.tier is not None for got in result.blocks] == [True, True, False, True, True, True]
    assert [bytes(b) for n, b in enumerate(buffers) if n != 2] == [payload(k) for n, k in enumerate(KEYS[:6]) if n != 2]
    until(lambda: lone.do(lambda: lone.service.store.counts.corrupt) == 1, 3, "the rank is told")
    until(lambda: quiet(lone), 3, "nothing stays held")


def test_misses_cost_no_data_connection(lone, client):
    client.write(puts(KEYS[:2]))
    for _ in range(5):
        client.read(KEYS[50:52]).release()
        client.read(KEYS[:4]).release()
    until(lambda: quiet(lone), 3, "nothing stays held")
    assert lone.do(lambda: lone.service.lanes.counts) == {"sent": 5, "received": 1, "broken": 0}
    assert lone.do(lambda: len(lone.service.lanes)) == 1 and lone.do(lambda: lone.loop._owners) == 2


def test_data_connections_are_counted_and_the_dead_ones_make_room(lone, raw):
    socks = [lane_of(lone, raw.session.data, raw.owner)[0] for _ in range(data_module.CLIENT_LANES_MAX)]
    with pytest.raises(Refused, match="has them all"):
        lane_of(lone, raw.session.data, raw.owner)
    socks[3].close()
    socks.append(lane_of(lone, raw.session.data, raw.owner)[0])
    raw.sock.close()
    until(lambda: lone.do(lambda: len(lone.service.lanes)) == 0, 3, "they end with their client")
    [sock.close() for sock in socks]


def test_between_hosts_blocks_carry_tags_and_a_changed_one_is_no_block(lone, monkeypatch):
    """As to a rank on another host; somebody on the way shows an old block for a new one, checksum and all."""
    monkeypatch.setattr(link_module, "LOOPBACK", ())
    client = PoolClient(lone.state_file(far=True), LAYOUT, client_name="far")
    assert {r.outcome for r in client.write(puts(KEYS[:6]))} == {Outcome.STORED}
    buffers = [bytearray(MOST) for _ in range(6)]
    assert client.get_into(KEYS[:6], buffers).count == 6
    assert [bytes(buffer) for buffer in buffers] == [payload(key) for key in KEYS[:6]]
    with client.read(KEYS[:6]) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:6]]
    broken = lone.do(lambda: lone.service.lanes.counts["broken"])
    with monkeypatch.context() as change:
        honest = data_module.tag_of
        change.setattr(
            data_module, "tag_of", lambda key, preface, at, block: honest(key, preface, at + (at == 2), block)
        )
        result = client.get_into(KEYS[:6], buffers, budget_s=5)
        assert result.count == 2 and client.counts().misses
        stored = [r.outcome for r in client.write(puts(KEYS[20:24]), 5)]
        assert stored == [Outcome.FAILED] * 4, "none of a transfer that was tampered with"
    assert lone.do(lambda: lone.service.lanes.counts["broken"]) > broken
    until(lambda: quiet(lone), 3, "nothing stays held")
    assert client.get_into(KEYS[:6], buffers).count == 6
    client.close()


def test_the_client_for_asyncio_reads_and_writes_by_socket_too(lone):
    async def run() -> list[bytes]:
        client = AsyncPoolClient(lone.state_file(), LAYOUT, path="socket")
        try:
            results = await client.write(puts(KEYS[:12]), 10)
            assert {(r.outcome, r.path) for r in results} == {(Outcome.STORED, Path.SOCKET)}
            read = await client.read(KEYS[:14], 10)
            found = [bytes(block.data) for block in read.blocks]
            read.release()
            return found
        finally:
            await client.close()

    assert asyncio.run(run()) == [payload(key) for key in KEYS[:12]]
    until(lambda: quiet(lone), 3, "nothing stays held")
