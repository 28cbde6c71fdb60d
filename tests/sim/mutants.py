"""Bugs to plant: each breaks one rule of production code, as a patch of it, and must be seen by an oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtool.kv.placement import Placement
from kvtool.kv.slots import SlotAllocator
from kvtool.kv.store import Store
from kvtool.kv.view import View
from kvtool.pool import filling, putting
from kvtool.pool.base import Outcome, PutResult
from kvtool.pool.reading import Placed
from kvtool.transfer import filehead, files
from kvtool.transfer.pages import Pages


@dataclass(frozen=True)
class Mutant:
    """`patches`: (holder, name, what to put there). `seed`: from where on to look; `says`: what an oracle must say,
    a pattern."""

    name: str
    patches: Callable[[], list[tuple[Any, str, Any]]]
    says: str
    seed: int = 0
    within: int = 120


def _lapsed_lease_accepted() -> list[tuple[Any, str, Any]]:
    """A reader in place believes in its blocks whatever their generation, and however late it is."""
    return [(Placed, "whole", lambda self: True)]


def _lookup_renews() -> list[tuple[Any, str, Any]]:
    """Looking blocks up again renews the leases on them (Mooncake #2187)."""
    begin_read = Store.begin_read

    def renewing(self: Store, read: Any, keys: Any, now_s: float, wait_s: float = 0.0) -> Any:
        reading = begin_read(self, read, keys, now_s, wait_s)
        for lease in self.leases:
            if lease.slots & reading.lease.slots:
                lease.lapses_at_s = max(lease.lapses_at_s, now_s + wait_s + 5 * self.leases.term_s)
        return reading

    return [(Store, "begin_read", renewing)]


def _visible_before_whole() -> list[tuple[Any, str, Any]]:
    """The checksum that is committed is that of the bytes to come: the last of them are written after the commit."""

    def early(block: Any, room: memoryview) -> int:
        whole = bytearray(block.size)
        block.fill(memoryview(whole))
        room[: block.size // 2] = whole[: block.size // 2]
        return filling.checksum(whole, block.key)

    return [(filling, "fill_room", early), (putting, "fill_room", early)]


def _torn_record_accepted() -> list[tuple[Any, str, Any]]:
    """Neither a record's own checksum nor that of its payload is looked at, at recovery and in a read."""
    return [*_unchecked_promotion(), (filehead, "_whole", lambda *_: True)]


def _unchecked_promotion() -> list[tuple[Any, str, Any]]:
    """What a file holds is taken for the block without a look at its checksum."""
    return [(files.BlockFile, "_same", lambda *_: None)]


def _double_release() -> list[tuple[Any, str, Any]]:
    """A slot that comes free is free twice."""

    def give(self: SlotAllocator, slot: int) -> None:
        self._use[slot] = None
        self._free += [slot, slot]

    def take(self: SlotAllocator, use: str) -> int | None:
        if not self._free:
            return None
        slot = self._free.pop()
        self._use[slot] = use
        self._generation[slot] += 1
        return slot

    return [(SlotAllocator, "give", give), (SlotAllocator, "take", take)]


def _cap_off_by_one() -> list[tuple[Any, str, Any]]:
    """A tier has one slot more than its cap."""
    take = SlotAllocator.take

    def one_more(self: SlotAllocator, use: str) -> int | None:
        if not self._free and len(self._use) == self.count > 0:
            self._use.append(None)
            self._generation.append(0)
            self._free.append(self.count)
        return take(self, use)

    return [(SlotAllocator, "take", one_more)]


def _older_incarnation_accepted() -> list[tuple[Any, str, Any]]:
    """Whatever is heard last of a rank counts, though it be about an earlier incarnation."""

    def merge(self: View, entries: Any) -> list[Any]:
        news = []
        for entry in entries:
            known = self._entries.get(entry.identity)
            if known is None or entry.order != known.order:
                self._entries[entry.identity] = entry
                news.append(entry)
        if news:
            self._epoch = -1
            self._sorted = sorted(self._entries.values(), key=lambda entry: entry.number)
        return news

    return [(View, "merge", merge)]


def _replica_counted_twice() -> list[tuple[Any, str, Any]]:
    """Two of the copies of a block are to be on the same rank."""
    owners_of_all = Placement.owners_of_all

    def same(self: Placement, keys: Any, copies: int) -> list[tuple[int, ...]]:
        return [(owners[0],) * len(owners) for owners in owners_of_all(self, keys, copies)]

    return [(Placement, "owners_of_all", same)]


def _no_quarantine() -> list[tuple[Any, str, Any]]:
    """The slot of a writer who was too slow is free at once."""
    quarantine = Store._quarantine_reserved

    def freed(self: Store, entry: Any, why: str, now_s: float) -> Any:
        aside = quarantine(self, entry, why, now_s)
        if why == "timed out":
            self._set_free(aside.slot)
        return aside

    return [(Store, "_quarantine_reserved", freed)]


def _lost_ack_is_stored() -> list[tuple[Any, str, Any]]:
    """A put whose commit was never answered counts as stored."""
    fail = putting.Putting._fail

    def stored(self: Any, positions: Any, reason: str) -> None:
        for position in positions:
            if self._results[position] is None and "no answer" in reason:
                self._results[position] = PutResult(Outcome.STORED)
        fail(self, positions, reason)

    return [(putting.Putting, "_fail", stored)]


def _lapsed_commit_is_stored() -> list[tuple[Any, str, Any]]:
    """A commit that came too late is answered as if it had counted."""
    return [(putting, "outcome_of", lambda commit, path: PutResult(Outcome.STORED, path))]


def _acked_before_synced() -> list[tuple[Any, str, Any]]:
    """A write is called durable as soon as the kernel has it."""
    return [(Pages, "sync", lambda self: None)]


MUTANTS = [
    Mutant("lapsed lease accepted", _lapsed_lease_accepted, "wrong block served", seed=167),
    Mutant("lookup renews a lease", _lookup_renews, "lease renewed"),
    Mutant("visible before its bytes are whole", _visible_before_whole, "foreign bytes in a block|no recovery"),
    Mutant("torn record accepted", _torn_record_accepted, "foreign bytes in a block|no recovery", seed=119),
    Mutant(
        "corrupt file copy promoted unchecked", _unchecked_promotion, "foreign bytes in a block|no recovery", seed=119
    ),
    Mutant("slot given twice", _double_release, "lost slots|slot given twice"),
    Mutant("cap off by one", _cap_off_by_one, "cap broken"),
    Mutant("older incarnation accepted", _older_incarnation_accepted, "view never settles", seed=4),
    Mutant("replica counted twice", _replica_counted_twice, "too few copies", seed=43),
    Mutant("no quarantine for a slow writer", _no_quarantine, "foreign bytes in a block", seed=23),
    Mutant("lost ack treated as stored", _lost_ack_is_stored, "lost ack"),
    Mutant("lapsed commit treated as stored", _lapsed_commit_is_stored, "lost ack", seed=5),
    Mutant("acknowledged before it is durable", _acked_before_synced, "durable block lost", seed=74),
]
