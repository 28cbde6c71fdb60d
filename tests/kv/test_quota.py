"""Quotas: a tenant costs nobody else a block, and never has more than its own, whatever it does."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvtool.kv.quota import Quota
from kvtool.kv.record import Commit, Demote, Grant, Promote, State, Want
from kvtool.kv.store import Store

SIZE = 100


def key_of(tenant: str, number: int) -> bytes:
    return f"{tenant:8}".encode() + number.to_bytes(24, "little")


class Bench:
    """A store whose moves end when told to."""

    def __init__(self, slots: int = 16, file_slots: int = 0, **quotas: Quota) -> None:
        self.store, self.now_s = Store(slots, SIZE, file_slots, 10.0, 10.0), 0.0
        self.store.quotas.set(dict(quotas))
        self.moves: list[Demote | Promote] = []

    def carry_out(self) -> None:
        self.moves += [action for action in self.store.take_actions() if isinstance(action, Demote | Promote)]

    def end_moves(self) -> None:
        while self.moves:
            move = self.moves.pop(0)
            if isinstance(move, Demote):
                self.store.demoted(move.move, True, self.now_s)
            else:
                self.store.promoted(move.move, True, self.now_s)
            self.carry_out()

    def reserve(self, tenant: str, *numbers: int, owner: int = 1):
        wants = [Want(key_of(tenant, number), SIZE, tenant="" if tenant == "op" else tenant) for number in numbers]
        answers = self.store.reserve(owner, wants, self.now_s)
        self.carry_out()
        return answers

    def put(self, tenant: str, *numbers: int) -> list[Grant]:
        grants = []
        for number in numbers:
            (answer,) = self.reserve(tenant, number)
            if answer.grant is Grant.WAIT:
                self.end_moves()
                (answer,) = self.reserve(tenant, number)
            grants.append(answer.grant)
            if answer.grant is Grant.GRANTED:
                assert self.store.commit(1, answer.slot, answer.generation, 7, self.now_s) is Commit.STORED
                self.carry_out()
        return grants

    def has(self, tenant: str) -> list[int]:
        return sorted(
            int.from_bytes(key[8:], "little") for key in self.store.resident() if key[:8] == f"{tenant:8}".encode()
        )

    def account(self, tenant: str):
        return self.store.quotas.accounts[tenant]


def test_a_tenant_at_its_quota_loses_its_own_oldest_block_and_nobody_elses():
    bench = Bench(a=Quota(dram=3), b=Quota(dram=5))
    bench.put("b", *range(5))
    bench.put("op", *range(4))
    assert bench.put("a", *range(10)) == [Grant.GRANTED] * 10
    assert bench.has("a") == [7, 8, 9] and bench.has("b") == list(range(5)) and bench.has("op") == list(range(4))
    assert bench.account("a").evicted == 7 and bench.store.dram.free == 4


def test_a_tenant_whose_blocks_are_all_in_use_is_refused_with_the_reason():
    bench = Bench(a=Quota(dram=2))
    bench.put("a", 1, 2)
    bench.store.begin_read((9, 1), [key_of("a", 1), key_of("a", 2)], 0.0)
    assert bench.put("a", 3) == [Grant.FULL]
    assert "tenant a is at its quota on this rank (2 blocks of 2 in memory" in bench.account("a").why()
    bench.store.release((9, 1), 1.0)
    assert bench.put("a", 3) == [Grant.GRANTED] and bench.has("a") == [2, 3]


def test_slots_that_a_tenant_holds_by_leases_or_late_writers_are_charged_until_they_come_back():
    bench = Bench(a=Quota(dram=2))
    bench.put("a", 1)
    bench.store.begin_read((9, 1), [key_of("a", 1)], 0.0)
    bench.store.delete([key_of("a", 1)], 0.0)
    (late,) = bench.reserve("a", 2)
    bench.now_s = 10.0
    bench.store.tick(10.0)  # the lease ends, the reservation is quarantined
    assert (bench.account("a").dram, bench.account("a").aside) == (0, 1)
    assert bench.put("a", 3, 4) == [Grant.GRANTED, Grant.GRANTED] and bench.has("a") == [4]
    bench.store.abort(1, late.slot, late.generation, 10.0)
    assert bench.account("a").aside == 0 and bench.put("a", 5) == [Grant.GRANTED] and bench.has("a") == [4, 5]


def test_blocks_go_to_files_as_far_as_the_quota_there_goes_and_are_bounded_in_all():
    bench = Bench(16, 16, a=Quota(dram=2, files=3))
    bench.put("op", 1, 2)
    bench.put("a", *range(10))
    bench.end_moves()
    a = bench.account("a")
    assert a.dram <= 2 and a.files <= 3 and set(bench.has("a")) >= {8, 9} and bench.has("op") == [1, 2]
    both = Bench(16, 16, a=Quota(dram=2, blocks=4))
    both.put("a", *range(10))
    both.end_moves()
    assert both.account("a").blocks <= 4 and both.account("a").dram <= 2


def test_reading_brings_no_more_into_memory_than_the_quota():
    bench = Bench(16, 16, a=Quota(dram=2))
    bench.put("a", *range(4))
    bench.end_moves()
    assert bench.store.resident()[key_of("a", 0)] is State.FILED
    reading = bench.store.begin_read((9, 1), [key_of("a", 0), key_of("a", 1), key_of("b", 1)], 0.0, 1.0)
    bench.carry_out()
    for _ in range(5):
        bench.end_moves()
        bench.store.advance(reading, 0.0)
        bench.carry_out()
    assert len(bench.store.finish_read(reading, 0.0)) == 2 and bench.account("a").dram <= 2


@pytest.mark.parametrize("seed", range(60))
def test_whatever_tenants_do_costs_no_other_a_block_and_no_quota_is_passed(seed):
    rng = Random(seed)
    file_slots = rng.choice([0, 40])
    quotas = {
        "a": Quota(rng.randrange(1, 6), rng.choice([None, 3, 9]) if file_slots else None, rng.choice([None, 7])),
        "b": Quota(rng.randrange(1, 6), rng.choice([None, 4]) if file_slots else None),
    }
    bench = Bench(16, file_slots, **quotas)
    held: list = []
    reads = Counter()
    for _ in range(250):
        tenant = rng.choice("ab")
        other = "b" if tenant == "a" else "a"
        before = bench.has(other)
        match rng.choice(["put", "reserve", "end", "read", "release", "moves", "delete", "tick"]):
            case "put":
                bench.put(tenant, *(rng.randrange(30) for _ in range(rng.randrange(1, 4))))
            case "reserve":
                owner = rng.randrange(2, 5)
                answers = bench.reserve(tenant, rng.randrange(100, 130), owner=owner)
                held += [(owner, a.slot, a.generation) for a in answers if a.grant is Grant.GRANTED]
            case "end" if held:
                owner, slot, generation = held.pop(rng.randrange(len(held)))
                if rng.random() < 0.5:
                    bench.store.commit(owner, slot, generation, 7, bench.now_s)
                else:
                    bench.store.abort(owner, slot, generation, bench.now_s)
            case "read":
                reads[tenant] += 1
                keys = [key_of(tenant, rng.randrange(30)) for _ in range(3)]
                reading = bench.store.begin_read((ord(tenant), reads[tenant]), keys, bench.now_s)
                bench.store.quotas.adopt([hit.entry for hit in bench.store.finish_read(reading, bench.now_s)], tenant)
            case "release":
                bench.store.release((ord(tenant), reads[tenant]), bench.now_s)
            case "moves":
                bench.end_moves()
            case "delete":
                bench.store.delete([key_of(tenant, rng.randrange(30))], bench.now_s)
            case "tick":
                bench.now_s += rng.choice([0.5, 6.0])
                bench.store.tick(bench.now_s)
        bench.carry_out()
        if file_slots == 0:
            assert set(bench.has(other)) >= set(before), f"{tenant} cost {other} a block"
        check(bench, quotas)
    assert bench.store.lost_slots() == 0


def check(bench: Bench, quotas: dict[str, Quota]) -> None:
    entries = [*bench.store._index.values(), *(e for e in bench.store._moves.values() if e.doomed)]
    for name, quota in quotas.items():
        account = bench.account(name)
        mine = [entry for entry in entries if entry.tenant == name]
        aside = sum(aside.tenant == name for aside in bench.store._quarantine.values())
        assert (account.dram, account.files) == (
            sum(entry.slot >= 0 for entry in mine), sum(entry.file_slot >= 0 for entry in mine),
        )  # fmt: skip
        assert account.aside == aside
        assert quota.dram is None or account.taken <= quota.dram, "in memory"
        assert quota.files is None or account.files <= quota.files, "in files"
        assert quota.blocks is None or account.blocks <= quota.blocks, "in all"
