"""Erasing: which records of the file are whose, so that a deleted block does not come back with a restart.

A restart registers every record that is whole, also one in a slot that was free: its block may still be of use. So to
delete a block for good, every record of its key has to be cleared on the disk: the one in use, and older ones in slots
that were given back and not written again since. A slot is cleared while nobody else has it; one that is being written
or read just now, as soon as that is over, unless the write put another block there, which does as well.

Pure rules, part of `Room`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvtool.kv.block import BlockKey
from kvtool.kv.slots import SlotAllocator


@dataclass(eq=False)
class Deleting:
    """A deletion in progress: `there` says for each key whether it was, `waiting` how many records are to be cleared
    yet, `failed` how many could not be."""

    there: list[bool] = field(default_factory=list)
    waiting: int = 0
    failed: int = 0

    @property
    def done(self) -> bool:
        return self.waiting == 0

    @property
    def results(self) -> list[bool]:
        return self.there

    @property
    def count(self) -> int:
        return sum(self.there)


class Erasing:
    """The records of one file tier, as far as they are known, and those that are being cleared."""

    def __init__(self, files: SlotAllocator) -> None:
        self._files = files
        self._keys: dict[int, tuple[BlockKey, ...]] = {}  # slot -> whose record may be there
        self._slots: dict[BlockKey, tuple[int, ...]] = {}
        self._wanted: dict[int, list[Deleting]] = {}
        self._running: set[int] = set()

    @property
    def running(self) -> int:
        """Slots that are in use for being cleared."""
        return len(self._running)

    def written(self, slot: int, key: BlockKey, whole: bool) -> None:
        """A record was written; if not `whole`, the slot may still hold what it held before."""
        if whole:
            self._clear(slot)
        if key not in self._keys.get(slot, ()):
            self._keys[slot] = (*self._keys.get(slot, ()), key)
            self._slots[key] = (*self._slots.get(key, ()), slot)

    def slots_of(self, key: BlockKey) -> tuple[int, ...]:
        return self._slots.get(key, ())

    def want(self, slots: Iterable[int], deleting: Deleting) -> list[int]:
        """Have `slots` cleared; those where that can begin now."""
        begin = set()
        for slot in slots:
            deleting.waiting += 1
            self._wanted.setdefault(slot, []).append(deleting)
            if self._files.use(slot) is None:
                begin.add(slot)
        if begin:
            self._files.claim(begin, "erasing")
            self._running |= begin
        return sorted(begin)

    def settled(self, slot: int) -> bool:
        """A write or read of `slot` is over, or the slot was given back; whether to clear it now."""
        if slot not in self._wanted or slot in self._running:
            return False
        if self._files.use(slot) is None:
            self._files.claim({slot}, "erasing")
            self._running.add(slot)
            return True
        self._over(slot, True)  # another block's record is there
        return False

    def erased(self, slot: int, ok: bool) -> None:
        self._running.discard(slot)
        if ok:
            self._clear(slot)
        self._files.give(slot)
        self._over(slot, ok)

    def _over(self, slot: int, ok: bool) -> None:
        for deleting in self._wanted.pop(slot, ()):
            deleting.waiting -= 1
            deleting.failed += not ok

    def _clear(self, slot: int) -> None:
        for key in self._keys.pop(slot, ()):
            left = tuple(other for other in self._slots[key] if other != slot)
            if left:
                self._slots[key] = left
            else:
                del self._slots[key]
