"""Store: what one rank decides about puts, reads and time.

**Put** is two-phase: a reservation hands out a slot with a deadline, a commit with the checksum makes the block
visible, whole. A put of a key that is there, or that another client is writing, is a duplicate and costs no copy. A
reservation that is not committed in time is quarantined, not freed: its writer may merely be slow, and would write
into somebody else's block. The slot is free again when the writer says that he is done, or is gone.

**Read** leases the leading run of keys in one go; blocks in the file tier are promoted first, and the caller asks
`advance` again when something came of that, within its own time limit. `match` grants and renews nothing.

Everything ends by the clock in `tick`, which must be called when `next_due_s` says so, work or no work.

Pure rules: callers pass the time in and carry out `take_actions()` after every call.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from kvtool.errors import LeaseLapsed
from kvtool.kv.block import BlockKey
from kvtool.kv.erasing import Deleting
from kvtool.kv.lease import ReadId
from kvtool.kv.order import FRESH_S
from kvtool.kv.record import (
    Commit,
    Committing,
    Entry,
    Erase,
    Grant,
    Granted,
    Hit,
    Holding,
    Quarantined,
    Reading,
    State,
    Want,
)
from kvtool.kv.retention import Retention
from kvtool.kv.room import SAME_REQUEST_S
from kvtool.kv.source import Sources


class Store(Sources):
    """All rules of one rank. `owner` everywhere is the client connection that asks."""

    def __init__(
        self,
        slots: int,
        slot_size: int,
        file_slots: int = 0,
        lease_term_s: float = 10.0,
        reserve_term_s: float = 10.0,
        through: bool = False,
        evict: str = "lru",
    ) -> None:
        """`through`: every block is written to its file as soon as it is committed, and durable then. `evict`: the
        policy by which blocks go."""
        super().__init__(slots, slot_size, file_slots, lease_term_s, evict)
        self.through = through and file_slots > 0
        if reserve_term_s <= 0:
            raise ValueError(f"reservation term must be positive, got {reserve_term_s} s")
        self.reserve_term_s = reserve_term_s
        self._reserved: dict[int, Entry] = {}  # slot -> entry
        self._reserved_due: list[tuple[float, int, int]] = []  # (deadline, slot, generation)
        self._transient_due: list[tuple[float, BlockKey]] = []
        self._turns: dict[int, int] = {}  # owner -> turn of the conversation that he read last

    # Put

    def reserve(self, owner: int, wants: Sequence[Want], now_s: float) -> list[Granted]:
        """One answer for each of `wants`."""
        new = sum(want.key not in self._index for want in wants)
        account = self.quotas.of(wants[0].tenant) if wants else None
        if account is not None:
            self._room_of(account, new, 0, now_s)
            new = account.room(new)
        self._free_up(new, now_s)
        answers = [self._reserve_one(owner, want, now_s) for want in wants]
        self._keep_ahead(now_s)
        return answers

    def reserve_copies(self, owner: int, wants: Sequence[Want], now_s: float, evict: bool) -> list[Granted]:
        """As `reserve`, for another rank's copies. Without `evict` they take free room only; they wait for another
        writer of the same block, since whoever copies it may be about to leave."""
        answers = []
        for want in wants:
            entry = self._index.get(want.key)
            if entry is not None and entry.state is State.RESERVED:
                answers.append(Granted(Grant.WAIT))
            elif entry is not None and entry.transient_s is None:
                answers.append(Granted(Grant.DUPLICATE))
            elif entry is None and not evict and not self._has_room(now_s):
                self.counts.refused += 1
                answers.append(Granted(Grant.FULL))
            else:
                self._free_up(1, now_s)
                answers.append(self._reserve_one(owner, want, now_s))
        self._keep_ahead(now_s)
        return answers

    def _has_room(self, now_s: float) -> bool:
        """Whether one block more can be kept and none be forgotten for it: a block in both tiers could be in one."""
        files = 0 if self._stuck(now_s) else self.files.count
        return len(self._index) < (files if self.through else self.dram.count - self.ahead + files)

    def _reserve_one(self, owner: int, want: Want, now_s: float) -> Granted:
        if want.size > self.slot_size or want.size < 1:
            self.counts.refused += 1
            return Granted(Grant.TOO_LARGE)
        entry = self._index.get(want.key)
        if entry is not None:
            self._again(entry, want, now_s)
            return Granted(Grant.DUPLICATE)
        account = self.quotas.of(want.tenant)
        slot = self._take_slot("reserved") if account is None or account.room(1) else None
        if slot is not None:
            return self._reserve(owner, want, slot, now_s)
        if self._room_is_coming(now_s) or any(e.owner == owner and not e.unnamed for e in self._reserved.values()):
            return Granted(Grant.WAIT)  # a batch larger than the pool waits for its own first blocks
        self.counts.refused += 1
        if account is not None:
            account.refused += 1
        return Granted(Grant.FULL)

    def _reserve(self, owner: int, want: Want, slot: int, now_s: float) -> Granted:
        parent = None if want.parent == want.key else want.parent
        generation = self.dram.generation(slot)
        entry = Entry(want.key, parent, want.size, State.RESERVED, owner, now_s, slot, generation)
        entry.deadline_s = now_s + self.reserve_term_s
        entry.transient_s = want.transient_s
        entry.retention, entry.tenant = want.retention, want.tenant
        self.quotas.moved(entry)
        self._index[want.key] = self._reserved[slot] = entry
        heapq.heappush(self._reserved_due, (entry.deadline_s, slot, generation))
        return Granted(Grant.GRANTED, slot, generation)

    def reserve_unnamed(self, owner: int, key: BlockKey, now_s: float) -> Granted | None:
        """A slot for the next block of a writer who puts one after the other, reserved under `key`, a random one, until
        he names his block. One for each, and a sixteenth of all slots; None: there is none to spare."""
        unnamed = [entry for entry in self._reserved.values() if entry.unnamed]
        if self.through or key in self._index or 16 * len(unnamed) >= self.dram.count - 15:
            return None
        self._free_up(1, now_s)
        slot = None if any(entry.owner == owner for entry in unnamed) else self._take_slot("reserved")
        if slot is None:
            return None
        granted = self._reserve(owner, Want(key, self.slot_size), slot, now_s)
        self._reserved[slot].unnamed = True
        return granted

    def name(self, owner: int, slot: int, generation: int, want: Want, now_s: float) -> Grant:
        """What a reserved slot holds: GRANTED, it is to be committed now. DUPLICATE: that is there already, and the
        slot is as it was. WAIT: the reservation is over."""
        entry = self._reserved.get(slot)
        if entry is None or (entry.owner, entry.generation) != (owner, generation) or now_s >= entry.deadline_s:
            return Grant.WAIT
        if want.key != entry.key:
            other = self._index.get(want.key)
            if other is not None:
                self._again(other, want, now_s)
                return Grant.DUPLICATE
            del self._index[entry.key]
            entry.key = want.key
            self._index[want.key] = entry
        entry.parent, entry.length = None if want.parent == want.key else want.parent, want.size
        entry.transient_s, entry.retention, entry.unnamed = want.transient_s, want.retention, False
        return Grant.GRANTED

    def _again(self, entry: Entry, want: Want, now_s: float) -> None:
        """A put of what is there is a use. A transient block lives on for its longest holder; a durable put makes it
        stay; and what is wanted of a block is never lowered."""
        self.counts.duplicates += 1
        entry.holders += 1
        stored = entry.state is not State.RESERVED
        self._keeping.put_again(entry, want.retention, now_s, stored)
        if want.transient_s is None:
            if entry.transient_s is not None and stored:
                self._list_anew(entry, entry.slot)  # only what is in DRAM is transient
            entry.transient_s = entry.transient_until_s = None
        elif entry.transient_s is not None:
            entry.transient_s = max(entry.transient_s, want.transient_s)
            until_s = now_s + want.transient_s
            if entry.transient_until_s is not None and until_s > entry.transient_until_s:
                self._keep_until(entry, until_s)

        if stored:
            self._touch(entry, now_s)
            self._offer(entry)

    def _keep_until(self, entry: Entry, until_s: float) -> None:
        entry.transient_until_s = until_s
        heapq.heappush(self._transient_due, (until_s, entry.key))

    def commit(self, owner: int, slot: int, generation: int, checksum: int, now_s: float) -> Commit:
        """Make a written block visible. `checksum` covers the bytes and the key."""
        entry = self._reserved.get(slot)
        if entry is None or (entry.owner, entry.generation) != (owner, generation):
            self._writer_done(owner, slot, generation, now_s)
            return Commit.LAPSED
        if now_s >= entry.deadline_s:
            self.counts.timed_out += 1
            self._writer_done(owner, slot, generation, now_s)
            return Commit.LAPSED
        del self._reserved[slot]
        entry.checksum, entry.since_s = checksum, now_s
        self._at[slot] = entry
        self.dram.retag(slot, "block")
        self._children.add(entry.parent)
        if entry.retention.duration_s is not None:
            entry.wanted_until_s = now_s + entry.retention.duration_s
        self._stored(entry, now_s)
        if entry.transient_s is not None:
            self._keep_until(entry, now_s + entry.transient_s)
        self.counts.stored += 1
        self._came(entry)
        if not (self.through and self._write_through(entry, now_s)):
            self._offer(entry)
        return Commit.STORED

    def commit_all(self, owner: int, commits: Sequence[tuple[int, int, int]], now_s: float) -> Committing:
        """Commit (slot, generation, checksum) each; until `done`, some of them are on their way to the disk."""
        committing = Committing()
        for at, (slot, generation, checksum) in enumerate(commits):
            committing.results.append(self.commit(owner, slot, generation, checksum, now_s))
            entry = self._at[slot]
            if committing.results[at] is Commit.STORED and entry is not None and entry.state is State.DEMOTING:
                entry.filed_for.append((committing, at))
                committing.waiting += 1
        return committing

    def _stored(self, entry: Entry, now_s: float) -> None:
        """`entry` is a block of this rank from now on."""
        parent = self._index.get(entry.parent or b"")
        known = self._turns.get(entry.owner, 1) if parent is None else parent.turn
        entry.born = entry.turn = known if entry.parent is not None else 1
        self._uses += 1
        entry.touched, entry.uses, entry.used_at_s = self._uses, 1, now_s
        self._keeping.begin(entry)
        self._shadow(entry)
        self._enter_dram(entry, now_s + FRESH_S)

    def abort(self, owner: int, slot: int, generation: int, now_s: float, settle_s: float = 0.0) -> None:
        """The writer gives up a reservation and will not write any more, after `settle_s` at the latest."""
        self.counts.aborted += 1
        self._writer_done(owner, slot, generation, now_s, settle_s)

    def _writer_done(self, owner: int, slot: int, generation: int, now_s: float, settle_s: float = 0.0) -> None:
        entry, aside = self._reserved.get(slot), self._quarantine.get(slot)
        if entry is not None and (entry.owner, entry.generation) == (owner, generation):
            aside = self._quarantine_reserved(entry, "aborted", now_s)
        elif aside is None or not aside.writer or (aside.owner, aside.generation) != (owner, generation):
            return
        self._writer_gone(aside, now_s, settle_s)

    def _quarantine_reserved(self, entry: Entry, why: str, now_s: float) -> Quarantined:
        del self._reserved[entry.slot], self._index[entry.key]
        self.quotas.gone(entry)
        aside = Quarantined(
            entry.slot, entry.generation, entry.key, why, entry.owner, now_s, writer=True, tenant=entry.tenant
        )
        self._put_aside(aside)
        return aside

    def _writer_gone(self, aside: Quarantined, now_s: float, settle_s: float) -> None:
        if settle_s > 0:
            aside.safe_at_s = now_s + settle_s
        else:
            self._set_free(aside.slot)

    # Read

    def match(self, keys: Iterable[BlockKey]) -> int:
        """How many leading `keys` are resident. Leaves no trace: nothing is granted, renewed or counted as a use."""
        count, find, reserved = 0, self._index.get, State.RESERVED
        for key in keys:
            entry = find(key)
            if (entry is None and key not in self.below) or (entry is not None and entry.state is reserved):
                break
            count += 1
        return count

    def has(self, keys: Iterable[BlockKey]) -> bytes:
        """1 for each of `keys` that is resident, else 0. Leaves no trace, as `match`."""
        find, reserved, below = self._index.get, State.RESERVED, self.below
        return bytes(key in below if (entry := find(key)) is None else entry.state is not reserved for key in keys)

    def filed(self, key: BlockKey) -> bool:
        """Whether a resident block would have to come from its file."""
        entry = self._index.get(key)
        return entry is not None and entry.state in (State.FILED, State.PROMOTING)

    def begin_read(self, read: ReadId, keys: list[BlockKey], now_s: float, wait_s: float = 0.0) -> Reading:
        """Lease the leading run of `keys`. Until `done`, call `advance` when anything moved, for `wait_s` at most."""
        reading = Reading(self.leases.grant(read, now_s, wait_s), keys)
        self.advance(reading, now_s)
        return reading

    def advance(self, reading: Reading, now_s: float) -> None:
        """Go on with a read as far as possible."""
        reading.stalled = False
        rest = self._resident_run(reading.keys[len(reading.hits) :], now_s)
        for entry in rest:
            if entry.slot >= 0:  # before anything is evicted for the others
                self.leases.cover(reading.lease, entry.slot)
        self._free_up_sparing(rest, now_s)
        for entry in rest:
            if entry.state is State.REMOTE:
                if not self._fetch(entry, now_s):
                    reading.stalled = self._room_is_coming(now_s) or self.fetching > 0
                    break
            elif self._index.get(entry.key) is not entry:
                break  # it went for room
            filed = entry.state in (State.FILED, State.PROMOTING)
            if entry.state is State.FILED and self._stuck(now_s):
                break  # a miss at once, and not at the end of the reader's patience
            if entry.state is State.FILED and not self._promote(entry, now_s):
                reading.stalled = self._room_is_coming(now_s)
                reading.full = not reading.stalled
                break
            self.leases.cover(reading.lease, entry.slot)
            moving = entry.state is State.PROMOTING
            if moving:
                entry.awaited_by.append(reading)
                reading.waiting += 1
            reading.hits.append(
                Hit(entry.key, entry.slot, entry.generation, entry.length, entry.checksum, filed, not moving, entry)
            )

    def _free_up_sparing(self, rest: Sequence[Entry], now_s: float) -> None:
        """Make room in DRAM for a read, and not out of the file slots of the very blocks that it wants."""
        filed = [entry for entry in rest if entry.state is State.FILED]
        remote = sum(entry.state is State.REMOTE for entry in rest)
        account = self.quotas.of(filed[0].tenant) if filed else None
        if account is None and len(filed) + remote <= self.dram.free:
            return
        self._spared = {entry.key for entry in filed}
        if account is not None:
            self._room_of(account, 0, len(filed), now_s)
        self._free_up(remote + (len(filed) if account is None else account.brings(len(filed))), now_s)
        self._spared = set()
        for entry in filed:
            self._offer(entry)

    def _resident_run(self, keys: Sequence[BlockKey], now_s: float) -> list[Entry]:
        run = []
        for key in keys:
            entry = self._index.get(key) or self._below(key, now_s)
            if entry is None or entry.state is State.RESERVED:
                break
            run.append(entry)
        return run

    def finish_read(self, reading: Reading, now_s: float) -> list[Hit]:
        """The leading run of a read, now that it is answered, whole or cut short by its time limit."""
        for hit in reading.hits:
            if not hit.ready and reading in hit.entry.awaited_by:
                hit.entry.awaited_by.remove(reading)
        reading.waiting, reading.stalled = 0, False
        self.leases.answered(reading.lease, now_s)
        run = reading.run
        reading.lease.told = {hit.slot: hit.length for hit in run}
        turn = self._turn_of_read(reading.lease.read[0], run, now_s)
        for hit in reversed(run):  # the first block of a prefix is the last to go
            hit.entry.turn = turn
            self._touch(hit.entry, now_s)
        return run

    def _turn_of_read(self, owner: int, run: list[Hit], now_s: float) -> int:
        """The turn of its conversation that a read belongs to: one more than the turn that made its last block, unless
        that was moments ago. It is kept for the puts that follow it, whose parents may be on other ranks."""
        if not run:
            self._turns.pop(owner, None)
            return 1
        last = run[-1].entry
        same_request = now_s - last.used_at_s < SAME_REQUEST_S
        turn = self._turns[owner] = last.turn if same_request else last.born + 1
        return turn

    def release(self, read: ReadId, now_s: float) -> bool:
        """End a read. False: it had outlived its lease, and what it read must be thrown away."""
        try:
            self._unheld(self.leases.release(read, now_s))
        except LeaseLapsed:
            self.counts.leases_lapsed += 1
            return False
        return True

    def lease_found(self, read: ReadId, uses: Sequence[tuple[int, int]], now_s: float) -> None:
        """A reader found blocks by (slot, generation) himself and reads them in place: lease those that are still
        there. He looks at their generations when he is done, so one that went before is seen."""
        lease = self.leases.grant(read, now_s)
        for slot, generation in uses:
            entry = self._at[slot]
            readable = entry is not None and entry.state in (State.COMMITTED, State.DEMOTING)
            if readable and entry is not None and entry.generation == generation:
                self.leases.cover(lease, slot)
        self.touch(reversed(uses), now_s)

    def touch(self, uses: Iterable[tuple[int, int]], now_s: float) -> int:
        """Blocks were read in place or found by their (slot, generation), without a message: each is a use, in this
        order. How many of them are still there."""
        count = 0
        for slot, generation in uses:
            entry = self._at[slot]
            if entry is not None and entry.generation == generation and entry.state is State.COMMITTED:
                self._touch(entry, now_s)
                self._offer(entry)
                count += 1
        return count

    def pin(self, slots: Sequence[int]) -> None:
        """This rank sends `slots` itself, under a lease that may end before the send does: they stay as they are."""
        self.leases.pin(slots)

    def unpin(self, slots: Sequence[int]) -> None:
        """The send is over, one way or the other."""
        self._unheld(self.leases.unpin(slots))

    def reserved(self, owner: int, slot: int, generation: int, now_s: float) -> int | None:
        """How many bytes `owner` may write into `slot`; None when it has no reservation there (any more)."""
        entry = self._reserved.get(slot)
        if entry is None or (entry.owner, entry.generation) != (owner, generation) or now_s >= entry.deadline_s:
            return None
        return entry.length

    def retain(self, keys: Iterable[BlockKey], wanted: Retention, now_s: float) -> int:
        """Want blocks more that are here, as a put of them would; how many there are. A pin is one of these."""
        entries = self._resident(keys)
        for entry in entries:
            self._keeping.put_again(entry, wanted, now_s, stored=True)
            self._offer(entry)
        return len(entries)

    def unretain(self, keys: Iterable[BlockKey]) -> int:
        """Take pins off, whoever set them; how many blocks had one."""
        unpinned = [entry for entry in self._resident(keys) if self._keeping.unpin(entry)]
        for entry in unpinned:
            self._offer(entry)
        return len(unpinned)

    def _resident(self, keys: Iterable[BlockKey]) -> list[Entry]:
        entries = (self._index.get(key) for key in keys)
        return [entry for entry in entries if entry is not None and entry.state is not State.RESERVED]

    def drop(self, keys: Iterable[BlockKey], now_s: float) -> int:
        """Forget transient blocks early; one that was put n times goes with the n-th drop."""
        count = 0
        for key in keys:
            entry = self._index.get(key)
            if entry is None or entry.transient_until_s is None:
                continue
            entry.holders -= 1
            if entry.holders <= 0:
                self._forget(entry, "dropped", now_s)
                count += 1
        self.counts.dropped += count
        return count

    def delete(self, keys: Iterable[BlockKey], now_s: float) -> Deleting:
        """Forget blocks of any kind, in both tiers, and have their records cleared. Who holds a lease reads on to its
        end. What is being written is not there yet, and stays."""
        deleting = Deleting()
        slots: set[int] = set()
        for key in keys:
            entry = self._index.get(key)
            there = self.discard(key) or (entry is not None and entry.state is not State.RESERVED)
            deleting.there.append(there)
            slots.update(self._erasing.slots_of(key))
            if entry is not None and entry.state is not State.RESERVED:
                slots.update((entry.file_slot,) if entry.file_slot >= 0 else ())
                self._forget(entry, "deleted", now_s)
        self.counts.deleted += deleting.count
        self._actions += map(Erase, self._erasing.want(slots, deleting))
        return deleting

    def corrupt(self, key: BlockKey, slot: int, generation: int, now_s: float) -> bool:
        """A reader found bytes that are not the block's. Its DRAM copy is never served again; a file copy may be."""
        entry = self._index.get(key)
        if entry is None or (entry.slot, entry.generation) != (slot, generation) or self._at[slot] is not entry:
            return False
        self.counts.corrupt += 1
        if entry.state is State.COMMITTED and entry.file_slot >= 0:
            self._leave_dram(entry, "corrupt", now_s)
            entry.state = State.FILED
            self._offer(entry)
        else:
            self._forget(entry, "corrupt", now_s)
        return True

    # Time, and clients that go away

    def owner_gone(self, owner: int, now_s: float, settle_s: float = 0.0) -> None:
        """A client's connection closed: he reads no more, and writes no more after `settle_s`."""
        self._unheld(self.leases.end_owner(owner))
        self._turns.pop(owner, None)
        for entry in [entry for entry in self._reserved.values() if entry.owner == owner]:
            self._quarantine_reserved(entry, "writer gone", now_s)
        for aside in [aside for aside in self._quarantine.values() if aside.writer and aside.owner == owner]:
            if aside.safe_at_s is None:
                self._writer_gone(aside, now_s, settle_s)

    def tick(self, now_s: float) -> None:
        """End what is due: leases, reservations, transient blocks, quarantines."""
        self._unheld(self.leases.expire(now_s))
        for ended in self._keeping.end_due(now_s):
            self._offer(ended)
        while self._reserved_due and self._reserved_due[0][0] <= now_s:
            _, slot, generation = heapq.heappop(self._reserved_due)
            entry = self._reserved.get(slot)
            if entry is not None and entry.generation == generation:
                self.counts.timed_out += 1
                self._quarantine_reserved(entry, "timed out", now_s)
        while self._transient_due and self._transient_due[0][0] <= now_s:
            _, key = heapq.heappop(self._transient_due)
            entry = self._index.get(key)
            if entry is not None and entry.transient_until_s is not None and entry.transient_until_s <= now_s:
                self.counts.expired += 1
                self._forget(entry, "expired", now_s)
        for aside in [aside for aside in self._quarantine.values() if aside.safe_at_s is not None]:
            if aside.safe_at_s is not None and aside.safe_at_s <= now_s:
                self._set_free(aside.slot)
        self._keep_ahead(now_s)

    def next_due_s(self) -> float | None:
        """When `tick` has something to do next, as far as is known now."""
        due = [aside.safe_at_s for aside in self._quarantine.values() if aside.safe_at_s is not None]
        lease_due_s = self.leases.next_due_s()
        if lease_due_s is not None:
            due.append(lease_due_s)
        due += [self._reserved_due[0][0]] if self._reserved_due else []
        due += [self._transient_due[0][0]] if self._transient_due else []
        kept_until_s = self._keeping.next_due_s()
        due += [] if kept_until_s is None else [kept_until_s]
        return min(due, default=None)

    # What there is

    def resident(self) -> dict[BlockKey, State]:
        """Every readable block; for tests and status, O(n)."""
        return {key: entry.state for key, entry in self._index.items() if entry.state is not State.RESERVED}

    def audit(self, now_s: float) -> list[Holding]:
        """Everything that somebody holds, one line a kind; empty when nobody holds anything."""
        transients = [e for e in self._index.values() if e.transient_until_s is not None]
        moves, pinned = list(self._moves.values()), self._keeping.pinned()
        found: list[tuple[str, list[tuple[float, int, float | None]]]] = [
            ("lease", [(lease.granted_at_s, lease.read[0], lease.lapses_at_s) for lease in self.leases]),
            ("reservation", [(e.since_s, e.owner, e.deadline_s) for e in self._reserved.values()]),
            ("quarantine", [(q.since_s, q.owner, q.safe_at_s) for q in self._quarantine.values()]),
            ("demotion", [(e.since_s, e.owner, None) for e in moves if e.state is State.DEMOTING]),
            ("promotion", [(e.since_s, e.owner, None) for e in moves if e.state is State.PROMOTING]),
            ("archive", [(since_s, 0, None) for _, since_s in self._archives.values()]),
            ("fetch", [(e.since_s, e.owner, None) for e in self._fetches.values()]),
            ("soft pin", [(e.since_s, e.owner, until_s) for e, until_s, hard in pinned if not hard]),
            ("hard pin", [(e.since_s, e.owner, until_s) for e, until_s, hard in pinned if hard]),
            ("transient", [(e.since_s, e.owner, e.transient_until_s) for e in transients]),
        ]
        lines = []
        for kind, held in found:
            if held:
                since_s, owner, until_s = min(held, key=lambda item: item[0])
                deadline_s = None if until_s is None else until_s - now_s
                lines.append(Holding(kind, len(held), owner, now_s - since_s, deadline_s))
        lost = self.lost_slots()
        if lost:
            lines.append(Holding("lost slot", lost))
        return lines

    @property
    def held_share(self) -> float:
        """Share of DRAM slots that nothing can evict now: leased, reserved, quarantined or pinned. A slot may be two
        of these."""
        held = self.leases.held_slots + len(self._reserved) + len(self._quarantine) + self._keeping.hard_count
        return min(1.0, held / self.dram.count)

    def lost_slots(self) -> int:
        """Slots of either tier in use that nothing accounts for. Anything but 0 is a bug."""
        moving = [entry for entry in [*self._moves.values(), *self._fetches.values()] if entry.doomed]
        dram = sum(entry.slot >= 0 for entry in self._index.values()) + len(self._quarantine)
        filed = sum(entry.file_slot >= 0 for entry in self._index.values())
        dram += sum(entry.slot >= 0 for entry in moving)
        filed += sum(entry.file_slot >= 0 for entry in moving)
        return (self.dram.used - dram) + (self.files.used - filed - self._erasing.running)
