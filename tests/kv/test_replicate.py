"""Blocks get their copies whoever comes or goes, within bounds, and then nothing moves any more."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from kvtool.kv.block import block_keys
from kvtool.kv.copying import Copy, CopyLimits, CopyOf, Outcome, Wanted, Why
from kvtool.kv.placement import Member, Placement
from kvtool.kv.replicate import Replicator

KEYS = block_keys(b"s" * 32, np.arange(32 * 2000), 32)
SIZE = 1000
LIMITS = CopyLimits(blocks_max=16, bytes_max=12 * SIZE, batch_max=4, rate=1e6, pending_max=256, rescan_s=5.0)


class Held:
    """One rank's blocks: key -> copies wanted. `room`: blocks that it takes from others before it is full."""

    def __init__(self, room: int = 10**9) -> None:
        self.blocks: dict[bytes, int] = {}
        self.room = room

    def catalog(self) -> list[bytes]:
        return list(reversed(self.blocks))

    def wanted(self, keys) -> list[Wanted]:
        return [Wanted(key, SIZE, self.blocks[key]) for key in keys if key in self.blocks]


class Cluster:
    """Ranks with real rules, and copies that take time, fail, and arrive at ranks that died meanwhile."""

    def __init__(self, seed: int, ranks: int, limits: CopyLimits = LIMITS, copies: int = 2) -> None:
        self.rng, self.now_s, self.epoch = Random(seed), 0.0, 0
        self.limits, self.copies = limits, copies
        self.weights: dict[int, float] = {}
        self.incarnations: dict[int, int] = {}
        self.held: dict[int, Held] = {}
        self.rules: dict[int, Replicator] = {}
        self.flying: list[tuple[float, int, int, Copy]] = []  # (arrives, sender, its incarnation, copy)
        self.hung: set[int] = set()
        self.made = Counter()
        for rank in range(ranks):
            self.start(rank)
        self.tell()

    @property
    def placement(self) -> Placement:
        return Placement(self.epoch, [Member(r, f"p/{r}", w) for r, w in self.weights.items()])

    def start(self, rank: int, weight: float = 1.0) -> None:
        self.weights[rank], self.held[rank] = weight, Held()
        self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        self.rules[rank] = Replicator(rank, self.held[rank], self.limits, self.copies)

    def die(self, rank: int) -> None:
        del self.weights[rank], self.held[rank], self.rules[rank]

    def tell(self, ranks=None) -> None:
        self.epoch += 1
        live = {rank: self.incarnations[rank] for rank in self.weights}
        for rank in self.rules if ranks is None else ranks:
            self.rules[rank].view(self.placement, live, self.now_s)

    def put(self, key: bytes, copies: int = 0) -> None:
        rank = self.placement.owner(key)
        if key not in self.held[rank].blocks:
            self.held[rank].blocks[key] = copies
            self.rules[rank].entered([Wanted(key, SIZE, copies)], self.now_s)

    def step(self, seconds: float = 0.05, busy: bool = False) -> None:
        self.now_s += seconds
        arrived = [flight for flight in self.flying if flight[0] <= self.now_s]
        self.flying = [flight for flight in self.flying if flight[0] > self.now_s]
        for _, sender, incarnation, copy in arrived:
            if sender in self.rules and self.incarnations[sender] == incarnation:
                self.rules[sender].ended(copy, self.arrive(sender, copy), self.now_s)
        for rank, rules in self.rules.items():
            for copy in rules.pump(self.now_s, busy):
                assert copy.to != rank and len(copy.blocks) <= self.limits.batch_max
                delay_s = 2.0 if copy.to in self.hung else self.rng.choice([0.0, 0.01, 0.1])
                self.flying.append((self.now_s + delay_s, rank, self.incarnations[rank], copy))
            mine = [flight[3] for flight in self.flying if flight[1:3] == (rank, self.incarnations[rank])]
            assert sum(len(copy.blocks) for copy in mine) == rules.outbox.flying <= self.limits.blocks_max
            assert sum(block.length for copy in mine for block in copy.blocks) <= self.limits.bytes_max
            assert rules.outbox.pending <= self.limits.pending_max
            there = Counter((copy.to, block.key) for copy in mine for block in copy.blocks)
            assert max(there.values(), default=0) <= 1, "a block is on its way to one rank twice"

    def arrive(self, sender: int, copy: Copy) -> list[Outcome]:
        if copy.to not in self.held or copy.to in self.hung or self.rng.random() < 0.05:
            return [Outcome.RETRY] * len(copy.blocks)
        outcomes, stored, there = [], [], self.held[copy.to]
        for block in copy.blocks:
            if block.key not in self.held[sender].blocks:
                outcomes.append(Outcome.GONE)
            elif block.key in there.blocks:
                outcomes.append(Outcome.THERE)
            elif there.room <= 0 and copy.why is not Why.PUT:
                outcomes.append(Outcome.NO_ROOM)
            else:
                outcomes.append(Outcome.STORED)
                self.made[copy.to, block.key] += 1
                there.room -= 1
                there.blocks[block.key] = self.held[sender].blocks[block.key]
                stored.append(Wanted(block.key, block.length, there.blocks[block.key]))
        self.rules[copy.to].entered(stored, self.now_s, sender)
        return outcomes

    def settle(self, within_s: float = 120.0) -> None:
        until_s = self.now_s + within_s
        while not all(rules.quiet and rules.next_due_s(self.now_s) is None for rules in self.rules.values()):
            assert self.now_s < until_s, {r: (x.outbox.pending, x.outbox.flying, x.left) for r, x in self.rules.items()}
            self.step()

    def holders(self, key: bytes) -> set[int]:
        return {rank for rank, held in self.held.items() if key in held.blocks}

    def check(self, keys) -> None:
        for key in keys:
            wanted = next(self.held[rank].blocks[key] for rank in self.holders(key)) or self.copies
            owners = set(self.placement.owners_of(key, wanted))
            assert owners <= self.holders(key), (key.hex()[:8], owners, self.holders(key))


def test_a_block_that_is_wanted_twice_is_copied_once_to_its_second_owner():
    cluster = Cluster(1, 4)
    for key in KEYS[:100]:
        cluster.put(key)
    cluster.settle()
    cluster.check(KEYS[:100])
    assert set(cluster.made.values()) == {1} and len(cluster.made) == 100
    assert all(len(cluster.holders(key)) == 2 for key in KEYS[:100])


def test_a_pool_of_one_copy_moves_nothing():
    cluster = Cluster(1, 4, copies=1)
    for key in KEYS[:100]:
        cluster.put(key)
    cluster.settle()
    assert not cluster.made and all(not rules.pump(1e9) for rules in cluster.rules.values())


def test_after_a_death_every_block_has_two_holders_again():
    cluster = Cluster(2, 4)
    for key in KEYS[:300]:
        cluster.put(key)
        cluster.step(0.01)
    cluster.settle()
    cluster.die(2)
    cluster.tell()
    cluster.settle()
    cluster.check(KEYS[:300])


def test_a_newcomer_gets_its_own_keys_and_nobody_elses():
    cluster = Cluster(3, 3, copies=1)
    for key in KEYS[:400]:
        cluster.put(key)
    cluster.settle()
    before = cluster.placement
    for weight in (0.25, 0.5, 1.0):
        if 3 not in cluster.held:
            cluster.start(3, weight)
        cluster.weights[3] = weight
        cluster.tell()
        cluster.settle()
    cluster.check(KEYS[:400])
    moved = {key for _, key in cluster.made}
    assert moved == {key for key in KEYS[:400] if cluster.placement.owner(key) == 3} and 50 < len(moved) < 150
    assert all(before.owner(key) in cluster.holders(key) for key in moved), "the old owner keeps its copy meanwhile"


def test_a_rank_that_started_anew_is_filled_again_though_it_never_left_the_view():
    cluster = Cluster(4, 3)
    for key in KEYS[:200]:
        cluster.put(key)
    cluster.settle()
    cluster.die(1)
    cluster.start(1)
    cluster.tell()
    cluster.settle()
    cluster.check(KEYS[:200])


def test_a_leaving_rank_says_how_much_is_left_until_all_is_elsewhere():
    cluster = Cluster(5, 3, copies=1)
    for key in KEYS[:300]:
        cluster.put(key)
    cluster.settle()
    rules, count = cluster.rules[0], len(cluster.held[0].blocks)
    assert not rules.leaving
    cluster.weights[0] = 0.0
    cluster.tell()
    assert rules.leaving and rules.left == count > 50
    seen = {rules.left}
    while rules.left:
        cluster.step()
        seen.add(rules.left)
    assert len(seen) > 5 and rules.quiet
    for key in cluster.held[0].blocks:
        assert cluster.placement.owner(key) in cluster.holders(key)
    late = next(key for key in KEYS[300:])
    cluster.held[0].blocks[late] = 0  # from a client that did not know yet
    rules.entered([Wanted(late, SIZE, 0)], cluster.now_s)
    assert rules.left == 1
    cluster.settle()
    assert cluster.placement.owner(late) in cluster.holders(late)


def test_a_leaving_rank_keeps_what_nobody_has_room_for_and_asks_again():
    cluster = Cluster(6, 2, copies=1)
    for key in KEYS[:100]:
        cluster.put(key)
    cluster.settle()
    cluster.held[1].room = 10
    count = len(cluster.held[0].blocks)
    cluster.weights[0] = 0.0
    cluster.tell()
    for _ in range(200):
        cluster.step()
    assert cluster.rules[0].left >= cluster.rules[0].homeless > 0
    assert len(cluster.held[1].blocks) == 100 - count + 10
    cluster.held[1].room = 1000
    cluster.settle()
    assert cluster.rules[0].left == 0 and len(cluster.held[1].blocks) == 100


def test_a_full_pool_is_not_asked_again_and_again():
    cluster = Cluster(7, 3)
    for key in KEYS[:200]:
        cluster.put(key)
    cluster.settle()
    for held in cluster.held.values():
        held.room = 0
    cluster.die(0)
    cluster.tell()
    cluster.settle(30.0)
    refused = [rules.counts.no_room for rules in cluster.rules.values()]
    for _ in range(1000):
        cluster.step()
    assert sum(refused) > 0 and refused == [rules.counts.no_room for rules in cluster.rules.values()]


def test_a_hung_rank_is_given_up_and_looked_after_when_it_answers():
    cluster = Cluster(8, 3)
    cluster.hung.add(1)
    for key in KEYS[:100]:
        if cluster.placement.owner(key) != 1:
            cluster.put(key)
    for _ in range(1000):
        cluster.step()
    gave_up = sum(rules.counts.gave_up for rules in cluster.rules.values())
    assert gave_up > 0
    cluster.hung.clear()
    cluster.settle(700.0)
    cluster.check([key for key in KEYS[:100] if cluster.holders(key)])


def test_while_foreground_waits_next_to_nothing_is_copied_and_then_all():
    cluster = Cluster(9, 2)
    for key in KEYS[:100]:
        cluster.put(key)
    for _ in range(100):
        cluster.step(0.01, busy=True)
        for rules in cluster.rules.values():
            due_s = rules.next_due_s(cluster.now_s, busy=True)
            assert due_s is None or due_s > cluster.now_s, "waiting for nothing would spin"
    assert len(cluster.made) <= 2 * (1 + 1.0 / LIMITS.trickle_s)
    cluster.settle()
    cluster.check(KEYS[:100])


def test_bytes_a_second_are_bounded():
    limits = CopyLimits(rate=100 * SIZE, batch_max=4, bytes_max=100 * SIZE)
    cluster = Cluster(10, 2, limits)
    for key in KEYS[:400]:
        cluster.put(key)
    for _ in range(200):
        cluster.step(0.01)
    for rules in cluster.rules.values():
        assert rules.counts.stored + rules.outbox.flying <= 2.0 * 100 + 4


def test_what_did_not_fit_into_the_queue_is_found_again():
    limits = CopyLimits(pending_max=20, rate=1e9, rescan_s=1.0)
    cluster = Cluster(11, 2, limits)
    for key in KEYS[:300]:
        cluster.put(key)
    assert sum(rules.counts.overflowed for rules in cluster.rules.values()) > 100
    cluster.settle()
    cluster.check(KEYS[:300])


def test_near_copies_carry_their_time_and_go_to_the_rank_that_was_named():
    rules = Replicator(0, Held(), LIMITS)
    rules.view(Placement(1, [Member(0, "a"), Member(1, "b")]), {0: 1, 1: 1}, 0.0)
    rules.near(CopyOf(KEYS[0], SIZE, 30.0), 1, 0.0)
    rules.near(CopyOf(KEYS[1], SIZE, 30.0), 0, 0.0)
    rules.near(CopyOf(KEYS[2], SIZE, 30.0), 9, 0.0)
    (copy,) = rules.pump(0.0)
    assert (copy.to, copy.why, copy.blocks) == (1, Why.NEAR, (CopyOf(KEYS[0], SIZE, 30.0),))
    rules.ended(copy, [Outcome.NO_ROOM], 0.1)
    assert rules.quiet and rules.next_due_s(0.1) is None


def test_puts_go_before_mending_and_mending_before_near_copies():
    held = Held()
    held.blocks = dict.fromkeys(KEYS[:3], 2)
    rules = Replicator(0, held, LIMITS)
    rules.view(Placement(1, [Member(0, "a"), Member(1, "b")]), {0: 1, 1: 1}, 0.0)
    rules.near(CopyOf(KEYS[5], SIZE, 30.0), 1, 0.0)
    order = []
    rules.entered([Wanted(KEYS[9], SIZE, 2)], 0.0)
    for at in range(1, 4):
        (copy,) = rules.pump(float(at))
        order.append(copy.why)
        rules.ended(copy, [Outcome.STORED] * len(copy.blocks), float(at))
    assert order == [Why.PUT, Why.MEND, Why.NEAR]


@pytest.mark.parametrize("seed", range(30))
def test_random_deaths_joins_ramps_and_evictions_end_with_every_block_at_its_owners(seed):
    """What a death takes before it was copied is lost; every other block ends at all of its owners."""
    rng = Random(seed)
    cluster = Cluster(seed, rng.randint(2, 6), copies=rng.randint(1, 3))
    spare = iter(range(len(cluster.held), 100))
    gone: set[bytes] = set()
    for key in KEYS[:250]:
        match rng.choices(["put", "step", "die", "join", "ramp", "hang", "late", "evict"], [60, 25, 1, 1, 2, 1, 2, 5])[
            0
        ]:
            case "put":
                cluster.put(key, rng.choice([0, 0, 1, 2, 3]))
            case "step":
                cluster.step(rng.choice([0.01, 0.3]), busy=rng.random() < 0.2)
            case "die" if len(cluster.held) > 1:
                cluster.die(rng.choice(list(cluster.held)))
                cluster.tell()
            case "join":
                cluster.start(next(spare) if rng.random() < 0.5 else max(cluster.held), rng.choice([0.1, 1.0]))
                cluster.tell()
            case "ramp":
                cluster.weights[rng.choice(list(cluster.weights))] = rng.choice([0.2, 0.5, 1.0])
                cluster.tell()
            case "hang":
                cluster.hung ^= {rng.choice(list(cluster.held))}
            case "late":  # only some know of it yet
                cluster.tell([rank for rank in cluster.rules if rng.random() < 0.5])
            case "evict":
                rank = rng.choice(list(cluster.held))
                if blocks := cluster.held[rank].blocks:
                    evicted = rng.choice(list(blocks))
                    del blocks[evicted]
                    gone.add(evicted)
    cluster.hung.clear()
    cluster.tell()
    cluster.settle(1300.0)
    everywhere = {key for held in cluster.held.values() for key in held.blocks}
    cluster.check(everywhere - gone)  # who evicts a block no longer sees to its copies
    assert all(cluster.holders(key) for key in everywhere)
