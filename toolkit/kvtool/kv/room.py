"""Room: which block is in which slot of which tier, and how room is made when there is none.

Two tiers, each with a hard count of slots: DRAM, where blocks are written and read, and files below it. A block leaves
DRAM for a file when its slot is wanted (at once, if the file tier holds a copy already) and comes back when it is
asked for; it keeps its file copy then, so that leaving again costs nothing. A slot that anybody may still read or
write is quarantined, never reused.

Which goes first is for the eviction policy to say, in each tier by itself. Only a block without resident children is
ever forgotten; to a file any block may go, as a parent there is still a hit (leaf-first there would let a chain longer
than DRAM fight for its last slot). Parents on other ranks are not known here, so leaf-first holds among the blocks of
one rank; across ranks the order of touching (last block of a prefix first) has the same effect.

Pure rules: events in, actions out (`take_actions`).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvtool.kv.block import BlockKey
from kvtool.kv.erasing import Erasing
from kvtool.kv.evict import Children, LeafLRU
from kvtool.kv.health import Backoff
from kvtool.kv.keep import HARD_SHARE, Keeping
from kvtool.kv.lease import LeaseTable
from kvtool.kv.order import Order
from kvtool.kv.policy import AUTO
from kvtool.kv.quota import Account, Quotas
from kvtool.kv.record import (
    IN_FILE,
    NOWHERE,
    Action,
    Commit,
    Demote,
    Entry,
    Erase,
    Promote,
    Quarantined,
    Reading,
    Stamp,
    State,
    StoreCounts,
    Whereabouts,
)
from kvtool.kv.shadow import CONTEST, Shadows
from kvtool.kv.slots import SlotAllocator

MOVES_MAX = 64
"""Demotions in flight at most: what is being written to files is DRAM that cannot be given out yet."""
STUCK_S = 3.0
"""A disk that has not ended a request for so long is left alone until it has."""
SAME_REQUEST_S = 10.0
"""Uses of a block within so long of one that counted are taken for the same request's."""


class Room:
    """The slots and blocks of one rank, both tiers."""

    def __init__(self, slots: int, slot_size: int, file_slots: int, lease_term_s: float, evict: str) -> None:
        if slots < 1:
            raise ValueError(f"a pool rank needs room for at least one block of {slot_size} bytes")
        self.slot_size = slot_size
        self.dram = SlotAllocator(slots)
        self.files = SlotAllocator(file_slots)
        self._erasing = Erasing(self.files)
        self.leases = LeaseTable(lease_term_s)
        self.counts = StoreCounts()
        self.demoting = self.filing = 0
        self.backoff = Backoff()
        self.ahead = min(64, slots // 16) if file_slots else 0
        """Slots to keep free or on the way to be: puts should not wait for a file write."""
        self._index: dict[BlockKey, Entry] = {}
        self._at: list[Entry | None] = [None] * slots  # DRAM slot -> entry
        self._children = Children()
        policy, contest = (CONTEST[0], CONTEST) if evict == AUTO else (evict, ())
        self._dram_order = Order(policy, self._may_leave_dram)
        self._file_order = Order(policy, self._may_leave_file)
        self._shadows = [(Shadows(slots, policy, contest), self._dram_order)]
        if file_slots:
            self._shadows.append((Shadows(file_slots, policy, contest), self._file_order))
        self._leaf_order = LeafLRU(self._leaf_rank)
        self._keeping = Keeping(slots // HARD_SHARE)
        self.quotas = Quotas(self._leave_rank, self._go_rank)
        self._quarantine: dict[int, Quarantined] = {}
        self._moves: dict[int, Entry] = {}
        self._move = self._record = 0
        self._uses = 0
        self._spared: set[BlockKey] = set()  # wanted in DRAM right now
        self._actions: list[Action] = []
        self._moved_from: dict[BlockKey, int] = {}  # blocks to list anew -> where they are listed

    def take_actions(self) -> list[Action]:
        """What is to be done now, in order; stamps before their slot is mentioned to anyone."""
        actions, self._actions = self._actions, []
        return actions

    def take_whereabouts(self) -> list[Whereabouts]:
        """Where the blocks are now that came, moved or went since the last time, for a directory of them; to be
        listed after the actions are carried out."""
        moved, self._moved_from = self._moved_from, {}
        return [self._whereabouts(key, was) for key, was in moved.items()]

    def _whereabouts(self, key: BlockKey, was: int) -> Whereabouts:
        entry = self._index.get(key)
        if entry is None or entry.state is State.RESERVED:
            return Whereabouts(key, was)
        return Whereabouts(key, was, _readable_at(entry), entry.transient_s is not None)

    def _list_anew(self, entry: Entry, was: int) -> None:
        """What is listed of `entry` is not true any more: that it can be read at `was`."""
        if not entry.doomed:  # else its key may be another entry's by now
            self._moved_from.setdefault(entry.key, was)

    # Which blocks may leave

    def _may_leave_dram(self, key: BlockKey) -> bool:
        """Whether a block may leave DRAM: for a file if there is one, else for good."""
        entry = self._index[key]
        if entry.state is not State.COMMITTED or self.leases.held(entry.slot) or self._keeping.hard(entry):
            return False
        if self.files.count and entry.transient_until_s is None:
            return True
        return not self._children.any(key)

    def _leaf_rank(self, key: BlockKey) -> int | None:
        """For a block in DRAM that may be forgotten: by level, then by last use."""
        entry = self._index.get(key)
        if entry is None or self._children.any(key) or not self._may_leave_dram(key):
            return None
        return entry.level << 48 | entry.touched

    def _leave_rank(self, key: BlockKey) -> int | None:
        """For a block that may leave DRAM for its tenant's next."""
        entry = self._index.get(key)
        if entry is None or entry.slot < 0 or not self._may_leave_dram(key):
            return None
        return entry.level << 48 | entry.touched

    def _go_rank(self, key: BlockKey) -> int | None:
        """For a block, in either tier, that may be forgotten for its tenant's next."""
        entry = self._index.get(key)
        if entry is None or self._children.any(key):
            return None
        may = self._may_leave_dram(key) if entry.slot >= 0 else self._may_leave_file(key)
        return entry.level << 48 | entry.touched if may else None

    def _may_leave_file(self, key: BlockKey) -> bool:
        entry = self._index[key]
        if key in self._spared:
            return False
        if entry.state is State.COMMITTED and not entry.durable:  # a second copy
            return True
        if entry.state is State.COMMITTED and self.leases.held(entry.slot):
            return False
        if entry.state not in (State.FILED, State.COMMITTED) or self._keeping.hard(entry):
            return False
        return not self._children.any(key)

    def _touch(self, entry: Entry, now_s: float) -> None:
        """A use. Uses within moments are one request's, whose prefill and decode both read it: they count once."""
        self._uses += 1
        entry.touched = self._uses
        same_request = now_s - entry.used_at_s < SAME_REQUEST_S
        if not same_request:
            entry.uses += 1
            entry.used_at_s = now_s
            self._shadow(entry)
        self._dram_order.use(entry, same_request)
        if entry.file_slot >= 0:
            self._file_order.use(entry, same_request)

    def _shadow(self, entry: Entry) -> None:
        """Show a use to the shadows, and change the policy where they say so."""
        if entry.transient_s is None:
            for shadows, order in self._shadows:
                policy = shadows.use(entry.key, entry.turn)
                if policy is not None and order.change(policy):
                    shadows.changed(policy)

    def eviction(self) -> dict[str, Any]:
        """For status: what the shadows of each tier show, and how many blocks are pinned hard."""
        tiers = [asdict(shadows.judgement()) for shadows, _ in self._shadows]
        pins = {"hard": self._keeping.hard_count, "hard_max": self._keeping.hard_max}
        return {
            **dict(zip(("dram", "files"), tiers, strict=False)),
            "pins": {**pins, "softened": self._keeping.softened},
        }

    def _offer(self, entry: Entry) -> None:
        """`entry` may leave now, perhaps, or stands on another level."""
        if entry.slot >= 0:
            self._dram_order.offer(entry)
            if self.files.count:
                self._leaf_order.offer(entry.key)
        if entry.file_slot >= 0:
            self._file_order.offer(entry)
        self.quotas.offer(entry)

    def _compact(self) -> None:
        """Reads offer blocks again and again, also while nothing is ever evicted."""
        self._leaf_order.rebuild(self._index, self.dram.count)
        self.quotas.compact()

    # Making room

    def _take_slot(self, use: str) -> int | None:
        """A free DRAM slot under a new generation.

        Its header says at once that the slot is nobody's: a reader in place sees that before a writer touches it.
        """
        slot = self.dram.take(use)
        if slot is not None:
            self._actions.append(Stamp(slot, self.dram.generation(slot)))
        return slot

    def _free_up(self, wanted: int, now_s: float) -> None:
        """Evict until `wanted` slots are free or on the way to be, or nothing more can go."""
        wanted = min(wanted, self.dram.count)
        coming = 0 if self._stuck(now_s) else self.demoting
        while self.dram.free + coming < wanted and self._evict_one(now_s):
            coming = 0 if self._stuck(now_s) else self.demoting

    @property
    def moving(self) -> int:
        """Moves between memory and files that are under way."""
        return len(self._moves)

    def _stuck(self, now_s: float) -> bool:
        """Whether the disk has not answered for too long: until it does, it is as if there were no files."""
        oldest = next(iter(self._moves.values()), None)
        return oldest is not None and now_s - oldest.since_s > STUCK_S

    def _room_is_coming(self, now_s: float) -> bool:
        """Whether a move that is under way may free a slot soon."""
        return self.demoting + self.filing > 0 and not self._stuck(now_s)

    def _evict_one(self, now_s: float) -> bool:
        """Let the next victim go; False when there is none, or too many are going already."""
        if self.demoting >= MOVES_MAX and not self._stuck(now_s):
            return False
        key = self._dram_order.next(now_s)
        if key is None:
            return False
        entry = self._index[key]
        if entry.file_slot >= 0:
            self._to_file_copy(entry)
            return True
        if not self._may_file(entry, now_s):
            return self._forget_leaf(entry, now_s)
        if not self._file_ancestors(entry, now_s):
            return False
        if not self._file(entry, now_s):
            return self._forget_leaf(entry, now_s)
        return True

    def _may_file(self, entry: Entry, now_s: float) -> bool:
        usable = self.files.count > 0 and self.backoff.over(now_s) and not self._stuck(now_s)
        return usable and entry.transient_until_s is None

    def _file_ancestors(self, entry: Entry, now_s: float) -> bool:
        """Begin to write the blocks before `entry` that are here and in no file, first block first: a block whose head
        is lost in a crash is lost too (sglang #26886). False when not all could be begun now."""
        chain: list[Entry] = []
        up = self._index.get(entry.parent or b"")
        while up is not None and up.state is State.COMMITTED and up.file_slot < 0 and len(chain) < self.dram.count:
            chain.append(up)
            up = self._index.get(up.parent or b"")
        for ancestor in reversed(chain):
            if self.filing + self.demoting >= MOVES_MAX:
                return False
            if ancestor.state is State.COMMITTED and self._may_file(ancestor, now_s):
                self._file(ancestor, now_s, stays=True)
        return True

    def _file(self, entry: Entry, now_s: float, stays: bool = False, durable: bool = False) -> bool:
        """Begin to write a block in DRAM to a file; `stays`: and keep it in DRAM. False when no file slot is free."""
        file_slot = self._take_file_slot(now_s) if self._files_for(entry, now_s) else None
        if file_slot is None:
            return False
        entry.state, entry.file_slot, entry.since_s, entry.stays = State.DEMOTING, file_slot, now_s, stays
        self.quotas.moved(entry)
        self.quotas.leaving(entry, not stays)
        self._record += 1
        entry.record = self._record
        if stays:
            self.filing += 1
        else:
            self.demoting += 1
        wanted_s = None if entry.wanted_until_s is None else max(0.0, entry.wanted_until_s - now_s)
        move, slot, parent = self._begin_move(entry), entry.slot, entry.parent
        written = (move, entry.key, slot, file_slot, entry.length, entry.checksum, entry.record, parent)
        self._actions.append(Demote(*written, entry.retention, wanted_s, durable))
        return True

    def _forget_leaf(self, victim: Entry, now_s: float) -> bool:
        """No file takes `victim`: forget it, or the oldest leaf in its stead when it has children."""
        if self._children.any(victim.key):
            key = self._leaf_order.next()
            if key is None:
                return False
            victim = self._index[key]
        if victim.file_slot >= 0:
            self._to_file_copy(victim)
        else:
            self.counts.evicted += 1
            self._forget(victim, "evicted", now_s)
        return True

    def _to_file_copy(self, entry: Entry) -> None:
        """Its file holds it already: leaving DRAM costs nothing."""
        self._leave_dram(entry)
        entry.state = State.FILED
        self._offer(entry)

    def _take_file_slot(self, now_s: float) -> int | None:
        slot = self.files.take("block")
        while slot is None:
            key = self._file_order.next(now_s)
            if key is None:
                return None
            entry = self._index[key]
            if entry.state is State.FILED or entry.durable:
                self.counts.evicted += 1
                self._forget(entry, "evicted", now_s)
            else:
                self._give_file_slot(entry, evicted=True)
            slot = self.files.take("block")
        return slot

    def _give_file_slot(self, entry: Entry, evicted: bool = False) -> None:
        self._file_order.leave(entry, evicted)
        slot, entry.file_slot = entry.file_slot, -1
        self.files.give(slot)
        self.quotas.moved(entry)
        self._file_slot_settled(slot)

    def _file_slot_settled(self, slot: int) -> None:
        """Nobody moves anything from or to `slot` now."""
        if self._erasing.settled(slot):
            self._actions.append(Erase(slot))

    def erased(self, slot: int, ok: bool, now_s: float) -> list[Reading]:
        """An `Erase` ended."""
        self._erasing.erased(slot, ok)
        self.counts.erase_failed += not ok
        self._keep_ahead(now_s)
        return []

    # Quotas

    def _files_for(self, entry: Entry, now_s: float) -> bool:
        """Whether its tenant's quota has a file slot for `entry`, if need be that of its oldest block there."""
        account = self.quotas.of(entry.tenant)
        if account is None or not account.files_full:
            return True
        passed: list[Entry] = []
        while account.files_full and (key := account.may_go.next()) is not None:
            if self._index[key].file_slot >= 0:
                self._forget_for(account, key, now_s)
            else:
                passed.append(self._index[key])
        for other in passed:
            self.quotas.offer(other)
        return not account.files_full

    def _room_of(self, account: Account, new: int, filed: int, now_s: float) -> None:
        """Have blocks of a tenant go until its quota has room for `new` ones and `filed` from files, if they can."""
        while account.too_many_for(new) and (key := account.may_go.next()) is not None:
            self._forget_for(account, key, now_s)
        while account.short_of(new + filed) and self._leave_for(account, now_s):
            pass

    def _leave_for(self, account: Account, now_s: float) -> bool:
        """Let the tenant's own next victim go from DRAM; False when there is none, or too many are going already."""
        if self.demoting >= MOVES_MAX and not self._stuck(now_s):
            return False
        key = account.may_leave.next()
        if key is None:
            return False
        entry = self._index[key]
        if entry.file_slot >= 0:
            self._to_file_copy(entry)
        elif not self._may_file(entry, now_s) or not self._file_ancestors(entry, now_s) or not self._file(entry, now_s):
            if self._children.any(key):
                self.quotas.offer(entry)
                key = account.may_go.next()
            if key is None:
                return False
            self._forget_for(account, key, now_s)
        return True

    def _forget_for(self, account: Account, key: BlockKey, now_s: float) -> None:
        account.evicted += 1
        self.counts.evicted += 1
        self._forget(self._index[key], "evicted", now_s)

    def _keep_ahead(self, now_s: float) -> None:
        self._free_up(self.ahead, now_s)
        self._compact()

    def why_full(self) -> str:
        """Who holds the slots that could not be freed, for a refusal."""
        pinned = self._keeping.hard_count
        reserved = sum(entry.state is State.RESERVED for entry in self._index.values())
        return (
            f"all {self.dram.count} slots are in use and none can be freed now: {self.leases.held_slots} under leases, "
            f"{reserved} reserved, {len(self._quarantine)} quarantined, {pinned} pinned, "
            f"{self.demoting + self.filing} on their way to files{self.backoff.clause}"
        )

    # Entering, moving, leaving

    def _enter_dram(self, entry: Entry, fresh_until_s: float | None = None) -> None:
        self._list_anew(entry, IN_FILE if entry.state is State.PROMOTING else NOWHERE)
        entry.state = State.COMMITTED
        if not entry.doomed:
            self._dram_order.enter(entry, fresh_until_s)
        self._actions.append(Stamp(entry.slot, entry.generation, entry.key, entry.length, entry.checksum))

    def _leave_dram(self, entry: Entry, quarantine: str = "", now_s: float = 0.0) -> None:
        """Give back the slot of a committed entry, or quarantine it while readers or doubts remain."""
        slot, entry.slot = entry.slot, -1
        self._list_anew(entry, slot)
        self._dram_order.leave(entry, evicted=quarantine in ("", "evicted"))
        self._at[slot] = None
        self.quotas.moved(entry)
        if self.leases.held(slot):
            why = quarantine or "readers"
            aside = Quarantined(slot, entry.generation, entry.key, why, entry.owner, now_s, tenant=entry.tenant)
            self._put_aside(aside)
        else:
            self.dram.give(slot)

    def _put_aside(self, aside: Quarantined) -> None:
        self._quarantine[aside.slot] = aside
        self.quotas.aside(aside.tenant, 1)
        self.dram.retag(aside.slot, "quarantined")

    def _unindex(self, entry: Entry) -> None:
        del self._index[entry.key]
        self._list_anew(entry, _readable_at(entry))
        self._keeping.gone(entry)
        if self._children.remove(entry.parent):
            parent = self._index.get(entry.parent or b"")
            if parent is not None:
                self._offer(parent)

    def _forget(self, entry: Entry, why: str, now_s: float) -> None:
        """Take a readable block out of the index; its slots come back when nobody uses them."""
        self._unindex(entry)
        if entry.state in (State.DEMOTING, State.PROMOTING):
            entry.doomed = True
            self._dram_order.leave(entry)
            self._file_order.leave(entry)
            return
        if entry.slot >= 0:
            self._leave_dram(entry, why, now_s)
        if entry.file_slot >= 0:
            self._give_file_slot(entry, why == "evicted")

    def _begin_move(self, entry: Entry) -> int:
        self._move += 1
        self._moves[self._move] = entry
        return self._move

    def demoted(self, move: int, ok: bool, now_s: float, why: str = "") -> None:
        """A `Demote` ended. If it failed the block stays in DRAM, as one that was just used."""
        entry = self._moves.pop(move)
        stays, entry.stays = entry.stays, False
        self.quotas.leaving(entry, False)
        if stays:
            self.filing -= 1
        else:
            self.demoting -= 1
        entry.state, slot = State.COMMITTED, entry.file_slot
        self._erasing.written(slot, entry.key, ok)
        if ok:
            self.backoff.worked()
            self.counts.demoted += not stays
            self.counts.filed += stays
            if not entry.doomed:
                self._file_order.enter(entry)
        else:
            self.backoff.failed(now_s, why)
            self.counts.demote_failed += 1
            self._give_file_slot(entry)
            self._touch(entry, now_s)
        self._tell_committed(entry, ok and not entry.doomed)
        if entry.doomed:
            if entry.file_slot >= 0:
                self._give_file_slot(entry)
            self._leave_dram(entry, "doomed", now_s)
        elif ok and not stays and not self.leases.held(entry.slot):
            self._to_file_copy(entry)
        else:
            self._offer(entry)
        self._file_slot_settled(slot)

    def _tell_committed(self, entry: Entry, ok: bool) -> None:
        """Those who wait to hear that the block is on the disk."""
        waiting, entry.filed_for = entry.filed_for, []
        for committing, at in waiting:
            committing.waiting -= 1
            if ok:
                committing.results[at] = Commit.DURABLE
                entry.durable = True

    def _promote(self, entry: Entry, now_s: float) -> bool:
        """Start to bring a filed block to DRAM; False when there is no slot for it now."""
        account = self.quotas.of(entry.tenant)
        slot = self._take_slot("block") if account is None or account.brings(1) else None
        if slot is None:
            return False
        entry.slot, entry.generation, entry.state = slot, self.dram.generation(slot), State.PROMOTING
        entry.since_s = now_s
        self._at[slot] = entry
        self.quotas.moved(entry)
        move = self._begin_move(entry)
        self._actions.append(
            Promote(move, entry.key, entry.file_slot, slot, entry.length, entry.checksum, entry.record)
        )
        return True

    def promoted(self, move: int, ok: bool, now_s: float, corrupt: bool = False) -> list[Reading]:
        """A `Promote` ended; the reads that waited for it. If it failed the block is forgotten: its file is bad."""
        entry = self._moves.pop(move)
        readings, entry.awaited_by = entry.awaited_by, []
        if ok:
            self.counts.promoted += 1
            self._enter_dram(entry)
            if entry.doomed:
                self._forget_moved(entry, "doomed", now_s)
            else:
                self._touch(entry, now_s)
                self._offer(entry)
        else:
            self.counts.promote_failed += 1
            self.counts.corrupt += corrupt
            if not entry.doomed:
                self._unindex(entry)
            self._forget_moved(entry, "corrupt" if corrupt else "unreadable", now_s)
        for reading in readings:
            reading.waiting -= 1
            for hit in reading.hits:
                if hit.entry is entry:
                    hit.ready = ok and not entry.doomed
        return readings

    def _forget_moved(self, entry: Entry, why: str, now_s: float) -> None:
        self._leave_dram(entry, why, now_s)
        self._give_file_slot(entry)

    def _unheld(self, slots: list[int]) -> None:
        """No lease is on `slots` any more."""
        for slot in slots:
            aside, entry = self._quarantine.get(slot), self._at[slot]
            if aside is not None:
                if not aside.writer:
                    self._set_free(slot)
            elif entry is not None and entry.state is State.COMMITTED:
                self._offer(entry)
        self._compact()

    def _set_free(self, slot: int) -> None:
        self.quotas.aside(self._quarantine.pop(slot).tenant, -1)
        self.dram.give(slot)


def _readable_at(entry: Entry) -> int:
    return entry.slot if entry.state in (State.COMMITTED, State.DEMOTING) else IN_FILE
