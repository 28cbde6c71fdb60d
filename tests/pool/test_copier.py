"""The copier between real rules and real memory of two ranks; only the network between them is a stand-in."""

from __future__ import annotations

import pytest
from blocks import KEYS, LAYOUT, payload, room_for

from kvtool.kv.copying import CopyLimits, CopyOf, Outcome, Why
from kvtool.kv.layout import KVLayout
from kvtool.kv.record import Commit, Grant, Want
from kvtool.kv.replicate import Replicator
from kvtool.kv.retention import DEFAULT, Retention
from kvtool.kv.store import Store
from kvtool.pool.copier import OWNER, Copier
from kvtool.pool.memory import SlotMemory
from kvtool.pool.state import PoolState, RankState
from kvtool.pool.tiers import Tiers
from kvtool.transfer.checksum import checksum

SIZE = LAYOUT.block_size


class Wire:
    """A mover that copies between the memories of this process, when it is told to."""

    def __init__(self, node: Node) -> None:
        self.node, self.jobs = node, []

    def submit(self, copy, sources, state, to, done) -> None:
        self.jobs.append((copy, sources, to, done))

    def close(self) -> None:
        pass

    def go(self, now_s: float) -> None:
        jobs, self.jobs = self.jobs, []
        for copy, sources, to, done in jobs:
            done(
                [self._one(copy, block, source, to, now_s) for block, source in zip(copy.blocks, sources, strict=True)]
            )

    def _one(self, copy, block: CopyOf, source, to, now_s: float) -> Outcome:
        there = self.node.others[to.rank]
        if source is None:
            return Outcome.GONE
        want = Want(source.key, source.length, source.parent, block.ttl_s, source.retention)
        owner = 100 + self.node.rank
        there.senders[owner] = self.node.rank
        (answer,) = there.store.reserve_copies(owner, [want], now_s, copy.why is Why.PUT)
        if answer.grant is not Grant.GRANTED:
            return Outcome.THERE if answer.grant is Grant.DUPLICATE else Outcome.NO_ROOM
        room = there.memory.slot(answer.slot, source.length)
        room[:] = self.node.memory.slot(source.slot, source.length)
        assert (
            there.store.commit(owner, answer.slot, answer.generation, checksum(room, source.key), now_s)
            is Commit.STORED
        )
        there.tiers.carry_out()
        return Outcome.STORED


class Node:
    """One rank without sockets."""

    def __init__(self, rank: int, copies: int) -> None:
        self.rank, self.senders, self.others = rank, {}, {}
        self.memory = SlotMemory(memoryview(bytearray(room_for(40))), 40, SIZE)
        self.store = Store(40, SIZE)
        self.tiers = Tiers(self.store, self.memory, None, lambda event: event(0.0))
        self.wire, self.events = Wire(self), []
        rules = Replicator(rank, self.store, CopyLimits(), copies)
        self.copier = Copier(rules, self.tiers, self.wire, self.events.append, self.senders.get)

    def put(self, key: bytes, now_s: float, retention: Retention = DEFAULT) -> None:
        (answer,) = self.store.reserve(1, [Want(key, SIZE, None, None, retention)], now_s)
        room = self.memory.slot(answer.slot, SIZE)
        room[:] = payload(key)
        self.store.commit(1, answer.slot, answer.generation, checksum(room, key), now_s)
        self.tiers.carry_out()

    def step(self, now_s: float) -> None:
        self.copier.tick(now_s, busy=False)
        self.wire.go(now_s)
        while self.events:
            self.events.pop(0)(now_s)
        self.store.tick(now_s)
        self.tiers.carry_out()


@pytest.fixture(params=[1, 2])
def nodes(request):
    hosts = ["here", "there", "there"]
    layout = KVLayout(layers=2, kv_heads=1, head_dim=64, block_tokens=32)
    ranks = [
        RankState(rank, f"p/{rank}", host, "", ("127.0.0.1", 0), "", 0, 40, 0, 10 + rank, 1)
        for rank, host in enumerate(hosts)
    ]
    state = PoolState(1, "", "", {}, layout.block_size, 10.0, ranks)
    nodes = [Node(rank, request.param) for rank in range(3)]
    for node in nodes:
        node.others = {other.rank: other for other in nodes}
        node.copier.view(state, 0.0)
    return nodes


def owned(nodes, count: int) -> list[bytes]:
    """Keys whose owner is the rank `here`, and no other copy of which belongs `there`."""
    rules = nodes[0].copier.rules
    copies = rules.copies_default
    return [key for key in KEYS if rules._placement.owners_of(key, copies)[0] == 0][:count]


def test_a_block_that_came_is_copied_and_copies_do_not_come_back(nodes):
    copies = nodes[0].copier.rules.copies_default
    for key in owned(nodes, 5):
        nodes[0].put(key, 0.0)
    for at in range(10):
        for node in nodes:
            node.step(0.1 * at)
    made = [node.copier.status()["counts"]["stored"] for node in nodes]
    assert made == [5 * (copies - 1), 0, 0]
    assert sum(len(node.store.resident()) for node in nodes) == 5 * copies
    assert all(node.copier.rules.quiet and not node.copier.audit(1.0) and not node.store.audit(1.0) for node in nodes)


def test_a_transient_block_stays_where_it_is(nodes):
    (answer,) = nodes[0].store.reserve(1, [Want(KEYS[0], SIZE, None, 5.0)], 0.0)
    nodes[0].store.commit(1, answer.slot, answer.generation, 0, 0.0)
    nodes[0].tiers.carry_out()
    nodes[0].step(0.1)
    assert nodes[0].copier.rules.quiet


def test_a_transient_block_that_is_put_for_good_has_its_copies_too(nodes):
    node, key = nodes[0], owned(nodes, 1)[0]
    (answer,) = node.store.reserve(1, [Want(key, SIZE, None, 5.0)], 0.0)
    room = node.memory.slot(answer.slot, SIZE)
    room[:] = payload(key)
    node.store.commit(1, answer.slot, answer.generation, checksum(room, key), 0.0)
    node.tiers.carry_out()
    node.step(0.1)
    assert not node.copier.status()["counts"]["stored"]
    node.store.reserve(2, [Want(key, SIZE)], 0.2)
    node.tiers.carry_out()
    node.step(0.3)
    assert node.copier.status()["counts"]["stored"] == node.copier.rules.copies_default - 1


def test_a_copy_in_flight_is_in_the_audit_and_holds_its_source(nodes):
    key = owned(nodes, 1)[0]
    nodes[0].put(key, 0.0, Retention(copies=2))
    nodes[0].copier.tick(0.0, busy=False)
    (held,) = nodes[0].copier.audit(0.25)
    assert (held.kind, held.count, held.owner, held.age_s) == ("copy", 1, OWNER, 0.25)
    assert [line.kind for line in nodes[0].store.audit(0.25)] == ["lease"]
    nodes[0].wire.go(0.3)
    nodes[0].events.pop(0)(0.3)
    assert not nodes[0].copier.audit(0.4) and not nodes[0].store.audit(0.4)


@pytest.mark.parametrize("late", [False, True])
def test_a_block_that_its_copy_finds_damaged_is_never_served_again_unless_the_copy_was_too_late_to_know(nodes, late):
    node, key = nodes[0], owned(nodes, 1)[0]
    node.put(key, 0.0, Retention(copies=2))
    node.copier.tick(0.0, busy=False)
    ((_, _, _, done),) = node.wire.jobs
    done([Outcome.DAMAGED])
    node.events.pop(0)(20.0 if late else 0.1)
    assert (key in node.store.resident()) is late
    assert node.store.counts.corrupt == (not late) and node.copier.status()["counts"]["damaged"] == 1
    assert node.copier.rules.quiet


def test_what_is_read_often_from_another_host_is_copied_there_for_a_while_and_hinted_at(nodes):
    node = nodes[0]
    key = next(key for key in owned(nodes, 40) if len(node.copier.rules._placement.owners_of(key, 1)) == 1)
    node.put(key, 0.0, Retention(copies=1))
    node.step(0.0)
    hints = [node.copier.read("there", [CopyOf(key, SIZE)], 0.01 * at) for at in range(8)]
    assert hints == [[]] * 8
    assert [node.copier.read("here", [CopyOf(key, SIZE)], 0.1) for _ in range(20)] == [[]] * 20
    node.step(0.2)
    (near,) = node.copier.read("there", [CopyOf(key, SIZE)], 1.0)
    assert [(held.kind, held.count) for held in node.copier.audit(1.0)] == [("near copy", 1)]
    assert near.position == 0 and near.rank in (1, 2) and 50 < near.left_s <= 60
    there = nodes[near.rank]
    assert bytes(there.memory.slot(0, SIZE)) == payload(key)
    there.step(1.0)
    assert there.copier.rules.quiet, "a near copy is nobody's to copy"
    there.step(70.0)
    assert not there.store.resident()
    assert node.copier.read("there", [CopyOf(key, SIZE)], 70.0) == []
