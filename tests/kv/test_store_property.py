"""Random puts, reads, moves, deaths and clock jumps against a plain model of the bytes.

The model keeps what was written: `memory[slot]` and `files[slot]` hold the (key, generation) last written there. It
checks on every step that a hit shows the bytes of its key, that nobody writes where a live lease or another writer is,
that caps hold, that no slot is lost and that what is pinned hard stays; and at the end that everything comes back once
everybody is gone, and that every block can be evicted: none is forgotten by the order of eviction.
"""

from __future__ import annotations

from random import Random

import pytest

from kvtool.kv.erasing import Deleting
from kvtool.kv.policy import POLICIES
from kvtool.kv.record import (
    IN_FILE,
    NOWHERE,
    Commit,
    Committing,
    Demote,
    Erase,
    Filed,
    Grant,
    Promote,
    Stamp,
    State,
    Want,
)
from kvtool.kv.retention import DEFAULT, Pin, Retention
from kvtool.kv.store import Store

KEYS = [bytes([n]) * 32 for n in range(40)]
TERM_S, RESERVE_S = 1.0, 2.0
RETENTIONS = [
    *[DEFAULT] * 5,
    Retention(80),
    Retention(10, 3.0),
    Retention(60, 2.0, Pin.SOFT),
    Retention(35, 1.0, Pin.HARD),
    Retention(50, 5.0, Pin.HARD),
]


class Machine:
    def __init__(self, rng: Random, slots: int, file_slots: int, through: bool = False, evict: str = "lru") -> None:
        self.rng, self.now_s = rng, 0.0
        self.store = Store(slots, 100, file_slots, TERM_S, RESERVE_S, through, evict)
        self.committing: list[Committing] = []
        self.records: dict[int, Filed] = {}  # what a restart would find
        self.memory: dict[int, tuple[bytes, int]] = {}
        self.files: dict[int, bytes] = {}
        self.headers: dict[int, Stamp] = {}
        self.moves: list[Demote | Promote | Erase] = []
        self.deleted: dict[bytes, Deleting] = {}  # and not put again since
        self.leased: dict[tuple[int, int], tuple[float, list[tuple[int, int]]]] = {}
        self.writers: list[tuple[int, int, int, bytes, float]] = []  # owner, slot, generation, key, deadline
        self.spares: list[tuple[int, int, int, float]] = []  # owner, slot, generation, deadline
        self.readings: list[tuple[float, object]] = []
        self.number = 0
        self.hits = self.promoted_hits = self.evictions = self.named = 0
        self.before: tuple[set[bytes], int, int] = (set(), 0, 0)
        self.hard_before: dict[bytes, float] = {}
        self.pinned = 0
        self.listed: dict[bytes, int] = {}

    def act(self) -> None:
        for action in self.store.take_actions():
            if isinstance(action, Stamp):
                if not action.key:  # the slot is handed to somebody new
                    for lapses_at_s, held in self.leased.values():
                        assert self.now_s >= lapses_at_s or action.slot not in [slot for slot, _ in held]
                    writers = [*self.writers, *self.spares]
                    assert action.slot not in [slot for _, slot, *_ in writers], "two writers in one slot"
                    assert action.generation > self.headers.get(action.slot, Stamp(0, 0)).generation
                    self.memory[action.slot] = (b"torn", action.generation)
                self.headers[action.slot] = action
            else:
                self.moves.append(action)
                if isinstance(action, Demote):
                    self.check_ancestors_first(action)
        for block in self.store.take_whereabouts():
            assert block.was == self.listed.pop(block.key, NOWHERE)
            if block.slot != NOWHERE:
                self.listed[block.key] = block.slot

    def check_ancestors_first(self, move: Demote) -> None:
        store, parent = self.store, self.store._index.get(move.parent)
        if parent is None or parent.state is not State.COMMITTED or parent.transient_until_s is not None:
            return
        tried = store.backoff.failures or store.files.free == 0
        assert parent.file_slot >= 0 or tried, "a block goes to a file before its parent"

    def finish_move(self, ok: bool) -> None:
        move = self.moves.pop(self.rng.randrange(len(self.moves)))
        if isinstance(move, Erase):
            if ok:
                self.records.pop(move.file_slot, None)
            self.store.erased(move.file_slot, ok, self.now_s)
        elif isinstance(move, Demote):
            written = ok or self.rng.random() < 0.3  # a write that is said to have failed may have happened
            if written:
                self.files[move.file_slot] = self.memory[move.slot][0]
                self.records[move.file_slot] = Filed(
                    move.file_slot, move.key, move.length, move.checksum, move.record, move.parent
                )
            elif self.rng.random() < 0.5:  # half of it was written
                self.records.pop(move.file_slot, None)
            self.store.demoted(move.move, ok, self.now_s)
        else:
            if ok:
                assert self.files[move.file_slot] == move.key, "promotes another block's bytes"
                self.memory[move.slot] = (move.key, self.store.dram.generation(move.slot))
            self.store.promoted(move.move, ok, self.now_s, corrupt=not ok)
        self.act()
        for _, reading in self.readings:
            self.store.advance(reading, self.now_s)
            self.act()

    def put(self, owner: int) -> None:
        start = self.rng.randrange(len(KEYS) - 4)
        transient = self.rng.choice([None, None, None, 1.5])
        wants = [
            Want(
                key,
                self.rng.choice([50, 100]),
                KEYS[start + at - 1] if start + at else None,
                transient,
                self.rng.choice(RETENTIONS),
            )
            for at, key in enumerate(KEYS[start : start + self.rng.randrange(1, 4)], 0)
        ]
        for want, answer in zip(wants, self.store.reserve(owner, wants, self.now_s), strict=True):
            if answer.grant is Grant.GRANTED:
                self.writers_before_act(owner, answer.slot, answer.generation, want.key)

    def writers_before_act(self, owner: int, slot: int, generation: int, key: bytes) -> None:
        self.act()
        self.writers.append((owner, slot, generation, key, self.now_s + RESERVE_S))

    def end_put(self, commit: bool) -> None:
        owner, slot, generation, key, deadline_s = self.writers.pop(self.rng.randrange(len(self.writers)))
        self.memory[slot] = (key, generation)  # even the late write: nobody else may be in there
        if not commit:
            self.store.abort(owner, slot, generation, self.now_s)
            return
        committing = self.store.commit_all(owner, [(slot, generation, hash(key))], self.now_s)
        assert (committing.results[0] is Commit.STORED) == (self.now_s < deadline_s)
        self.deleted.pop(key, None)
        assert committing.done or self.store.through
        self.committing.append(committing)

    def take_spare(self, owner: int) -> None:
        granted = self.store.reserve_unnamed(owner, self.rng.randbytes(32), self.now_s)
        if granted is not None:
            self.act()
            self.spares.append((owner, granted.slot, granted.generation, self.now_s + RESERVE_S))

    def use_spare(self) -> None:
        owner, slot, generation, deadline_s = self.spares.pop()
        key = self.rng.choice(KEYS)
        self.memory[slot] = (key, generation)
        there = key in self.store._index
        match self.store.name(owner, slot, generation, Want(key, 60), self.now_s):
            case Grant.GRANTED:
                assert self.now_s < deadline_s and not there
                assert self.store.commit(owner, slot, generation, hash(key), self.now_s) is Commit.STORED
                self.deleted.pop(key, None)
                self.named += 1
            case Grant.DUPLICATE:
                assert there
                self.spares.append((owner, slot, generation, deadline_s))
            case Grant.WAIT:
                assert self.now_s >= deadline_s
                assert self.store.commit(owner, slot, generation, 1, self.now_s) is Commit.LAPSED

    def delete(self) -> None:
        key = self.rng.choice(KEYS)
        there = key in self.store.resident()
        deleting = self.store.delete([key], self.now_s)
        assert deleting.there == [there] and key not in self.store.resident()
        self.deleted[key] = deleting

    def check_deleted(self) -> int:
        """No restart would find what was deleted and not put again."""
        gone = [key for key, deleting in self.deleted.items() if deleting.done and not deleting.failed]
        assert not set(gone) & {record.key for record in self.records.values()}, "a deleted block would come back"
        return len(gone)

    def read(self, owner: int) -> None:
        start, self.number = self.rng.randrange(len(KEYS)), self.number + 1
        keys = KEYS[start : start + self.rng.randrange(1, 6)]
        reading = self.store.begin_read((owner, self.number), keys, self.now_s, wait_s=0.5)
        self.act()
        self.readings.append((self.now_s + 0.5, reading))

    def answer_reads(self) -> None:
        for until_s, reading in list(self.readings):
            if reading.done or self.now_s >= until_s:
                self.readings.remove((until_s, reading))
                hits = self.store.finish_read(reading, self.now_s)
                self.leased[reading.lease.read] = (until_s - 0.5 + TERM_S, [(h.slot, h.generation) for h in hits])
                assert [hit.key for hit in hits] == reading.keys[: len(hits)]
                for hit in hits:
                    stamp = self.headers[hit.slot]
                    assert (stamp.key, stamp.generation) == (hit.key, hit.generation)
                    self.promoted_hits += hit.filed
                self.hits += len(hits)

    def check(self) -> None:
        store = self.store
        assert store.lost_slots() == 0
        assert store.dram.used <= store.dram.count and store.files.used <= store.files.count
        for lapses_at_s, held in self.leased.values():
            for slot, generation in held:
                if self.now_s < lapses_at_s:
                    assert store.dram.generation(slot) == generation, "a leased slot was given away"
                    assert self.memory[slot][0] == self.headers[slot].key != b""
        at = {key: store._index[key].slot for key in store.resident()}
        promoting = [key for key, state in store.resident().items() if state is State.PROMOTING]
        assert self.listed == {**at, **dict.fromkeys(promoting, IN_FILE)}, "the directory is not true"
        for key, state in store.resident().items():
            entry = store._index[key]
            assert not entry.durable or self.records[entry.file_slot].key == key
            if state in (State.COMMITTED, State.DEMOTING):
                assert self.memory[entry.slot] == (key, entry.generation)

    def check_leaf_first(self) -> None:
        """What was evicted, and not dropped, expired or found corrupt, had no resident child."""
        counts, resident = self.store.counts, set(self.store.resident())
        others = counts.dropped + counts.expired + counts.corrupt + counts.promote_failed + counts.deleted
        before, others_before, evicted_before = self.before
        if counts.evicted > evicted_before and others == others_before:
            gone = before - resident
            parents = {self.store._index[key].parent for key in resident & before}
            assert not gone & parents, "a block went before its child"
            pinned = {key for key, until_s in self.hard_before.items() if until_s > self.now_s}
            assert not gone & pinned, "a block went that was pinned hard"
            self.evictions += len(gone)
        self.before = resident, others, counts.evicted
        store = self.store
        entries = [store._index[key] for key in resident]
        self.hard_before = {entry.key: entry.kept.hard_until_s for entry in entries if store._keeping.hard(entry)}
        self.pinned += len(self.hard_before)
        assert len(self.hard_before) <= store.dram.count // 4, "more are pinned hard than may be"

    def check_orders(self) -> None:
        """Each order knows the blocks that are in its tier, and remembers a bounded number of others."""
        store = self.store
        entries = [entry for entry in store._index.values() if entry.state is not State.RESERVED]
        in_dram = [entry for entry in entries if entry.state in (State.COMMITTED, State.DEMOTING)]
        in_file = [entry for entry in entries if entry.file_slot >= 0 and entry.state is not State.DEMOTING]
        for order, there in ((store._dram_order, in_dram), (store._file_order, in_file)):
            assert all(entry in order for entry in there) and len(order) == len(there)
            assert order.ghosts <= 2 * (len(order) + 8 * len(order._levels)), "too much memory of what left"

    def step(self) -> None:
        rng = self.rng
        match rng.choice(
            [
                "put",
                "put",
                "spare",
                "name",
                "end",
                "end",
                "read",
                "read",
                "release",
                "move",
                "move",
                "time",
                "drop",
                "delete",
                "die",
                "corrupt",
            ]
        ):
            case "put":
                self.put(rng.randrange(3))
            case "spare":
                self.take_spare(rng.randrange(3))
            case "name" if self.spares:
                self.use_spare()
            case "end" if self.writers:
                self.end_put(commit=rng.random() < 0.85)
            case "read":
                self.read(rng.randrange(3))
            case "release" if self.leased:
                read = rng.choice(list(self.leased))
                lapses_at_s, _ = self.leased.pop(read)
                on_time = self.store.release(read, self.now_s)
                assert on_time or self.now_s >= lapses_at_s
            case "move" if self.moves:
                self.finish_move(ok=rng.random() < 0.9)
            case "time":
                self.now_s += rng.choice([0.0, 0.1, 0.4, 2.5])
                self.store.tick(self.now_s)
            case "drop":
                self.store.drop([rng.choice(KEYS)], self.now_s)
            case "delete" if rng.random() < 0.2:
                self.delete()
            case "corrupt" if self.leased and rng.random() < 0.3:
                _, held = self.leased[rng.choice(list(self.leased))]
                for slot, generation in held[:1]:
                    self.store.corrupt(self.headers[slot].key, slot, generation, self.now_s)
            case "die" if rng.random() < 0.2:
                self.leave(rng.randrange(3))
        self.act()
        self.answer_reads()
        self.check()
        self.check_leaf_first()
        self.check_orders()
        self.check_deleted()

    def check_restart(self) -> int:
        """A new process finds every block that is durable or whole in its file, and nothing twice."""
        after = Store(self.store.dram.count, 100, self.store.files.count, TERM_S, RESERVE_S)
        after.recover(self.records.values(), 0.0)
        found = after.resident()
        assert after.lost_slots() == 0 and set(found.values()) <= {State.FILED}
        for key, entry in self.store._index.items():
            if entry.durable or entry.state is State.FILED:
                assert found[key] is State.FILED and after._index[key].record >= entry.record
        return sum(entry.durable for entry in self.store._index.values())

    def leave(self, owner: int) -> None:
        self.writers = [writer for writer in self.writers if writer[0] != owner]
        self.spares = [spare for spare in self.spares if spare[0] != owner]
        self.leased = {read: held for read, held in self.leased.items() if read[0] != owner}
        self.readings = [(until, reading) for until, reading in self.readings if reading.lease.read[0] != owner]
        self.store.owner_gone(owner, self.now_s)

    def evict_everything(self) -> None:
        """Nobody is there: puts of other blocks make every block go."""
        old, number = set(self.store.resident()), 0
        while old & set(self.store.resident()):
            number += 1
            assert number < 1000, "a block is never offered as a victim"
            want = Want(number.to_bytes(32, "big"), 100, retention=Retention(100))
            (answer,) = self.store.reserve(9, [want], self.now_s)
            assert answer.grant is not Grant.FULL, "nobody holds anything"
            self.act()
            if answer.grant is Grant.GRANTED:
                self.memory[answer.slot] = (want.key, answer.generation)
                self.store.commit(9, answer.slot, answer.generation, 0, self.now_s)
            self.act()
            while self.moves:
                self.finish_move(ok=True)


CASES = [(evict, seed) for evict in POLICIES for seed in range(60 if evict == "lru" else 15)]


@pytest.mark.parametrize(("evict", "seed"), CASES)
def test_no_block_is_lost_shown_wrong_or_overwritten_under_a_lease(evict, seed):
    rng = Random(seed)
    machine = Machine(rng, rng.choice([1, 3, 8, 20]), rng.choice([0, 2, 12, 60]), rng.random() < 0.5, evict)
    for _ in range(400):
        machine.step()
        machine.check_restart()
    for owner in range(3):
        machine.leave(owner)
    while machine.moves:
        machine.finish_move(ok=True)
    machine.now_s += 10.0
    machine.store.tick(machine.now_s)
    machine.act()
    while machine.moves:
        machine.finish_move(ok=True)
    assert all(committing.done for committing in machine.committing), "a commit was never answered"
    assert all(deleting.done for deleting in machine.deleted.values()), "a delete was never answered"
    assert machine.store.audit(machine.now_s) == [], "something is held though nobody is there"
    entries = machine.store._index.values()
    assert machine.store.dram.used == sum(entry.slot >= 0 for entry in entries)
    assert machine.store.leases.next_due_s() is None
    machine.evict_everything()


def test_the_random_machine_reaches_hits_in_both_tiers():
    machine = Machine(Random(5), slots=8, file_slots=60)
    for _ in range(4000):
        machine.step()
    assert machine.hits > 200 and machine.promoted_hits > 20
    assert machine.evictions > 0 and machine.pinned > 0
    counts = machine.store.counts
    assert min(counts.demoted, counts.evicted + counts.promote_failed, counts.timed_out, counts.leases_lapsed) > 0


def test_the_random_machine_deletes_what_files_hold():
    machine, most = Machine(Random(3), slots=8, file_slots=60), 0
    for _ in range(3000):
        machine.step()
        most = max(most, machine.check_deleted())
    assert most > 3 and machine.store.counts.deleted >= 15 and machine.store.counts.erase_failed > 0


def test_the_random_machine_names_spare_slots():
    machine = Machine(Random(6), slots=20, file_slots=12)
    for _ in range(1000):
        machine.step()
    assert machine.named > 5


def test_the_random_machine_reaches_durable_blocks():
    machine = Machine(Random(5), slots=8, file_slots=60, through=True)
    durable = 0
    for _ in range(1000):
        machine.step()
        durable = max(durable, machine.check_restart())
    assert durable >= 10 and Commit.DURABLE in {c.results[0] for c in machine.committing}


def test_blocks_are_written_ahead_of_need_and_free_their_memory_at_once():
    machine = Machine(Random(1), slots=16, file_slots=64)
    store, written = machine.store, 0
    for number, key in enumerate(KEYS):
        (answer,) = store.reserve(1, [Want(key, 100)], machine.now_s)
        assert answer.grant is Grant.GRANTED, f"put {number} had to wait for the disk"
        machine.writers_before_act(1, answer.slot, answer.generation, key)
        machine.end_put(commit=True)
        machine.act()
        while machine.moves:
            machine.finish_move(ok=True)
            written += 1
        dirty = sum(entry.slot >= 0 and entry.file_slot < 0 for entry in store._index.values())
        assert dirty <= 9 and number - 8 <= written <= max(0, number - 7)
    assert store.counts.filed >= len(KEYS) - 16 and store.counts.evicted == 0
