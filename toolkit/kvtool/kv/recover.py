"""Filing: what is written to files besides what must leave DRAM, and what a restart takes over from them.

Blocks go to their file as they are committed (write-through), when the rank stops, or before their children do. After a
restart every record that is whole in its header is registered again, as far as there are slots; whether its payload is
whole is found out when it is read, as always.

Pure rules, part of `Store`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable

from kvtool.kv.block import BlockKey
from kvtool.kv.record import NOWHERE, Entry, Filed, State
from kvtool.kv.room import Room

DIRTY_SHARE = 2
"""One slot of so many may hold a block that no file holds."""
AHEAD_MAX = 32
"""Writes ahead of need under way at most: others may need the disk."""


class Filing(Room):
    """The file tier's rules."""

    through = False

    def __init__(self, slots: int, slot_size: int, file_slots: int, lease_term_s: float, evict: str) -> None:
        super().__init__(slots, slot_size, file_slots, lease_term_s, evict)
        self._dirty: deque[BlockKey] = deque()
        self.dirty_max = slots // DIRTY_SHARE if file_slots >= slots else sys.maxsize
        """Blocks that are in no file, at most; more are written ahead of need, oldest first."""

    def _came(self, entry: Entry) -> None:
        """A block is in DRAM, and may have to be written some day."""
        if entry.transient_s is not None or self.dirty_max == sys.maxsize:
            return
        self._dirty.append(entry.key)
        if len(self._dirty) > 4 * self.dram.count:  # the disk has been failing for long
            found = [(key, self._index.get(key)) for key in self._dirty]
            self._dirty = deque(key for key, entry in found if entry is not None and self._could_file(entry))

    def _keep_ahead(self, now_s: float) -> None:
        super()._keep_ahead(now_s)
        self._clean(now_s)

    def demoted(self, move: int, ok: bool, now_s: float, why: str = "") -> None:
        super().demoted(move, ok, now_s, why)
        self._clean(now_s)

    def _clean(self, now_s: float) -> None:
        """Write the oldest blocks to files while the disk has nothing else to do with them: when their memory is
        wanted it is free at once, and puts go as fast as the disk writes."""
        while len(self._dirty) > self.dirty_max and self.filing + self.demoting < AHEAD_MAX:
            entry = self._index.get(self._dirty[0])
            if entry is not None and self._could_file(entry):
                if not self._may_file(entry, now_s) or not self._file_ancestors(entry, now_s):
                    return
                if self._could_file(entry) and not self._file(entry, now_s, stays=True):
                    return
            self._dirty.popleft()

    def recover(self, found: Iterable[Filed], now_s: float) -> int:
        """Register the blocks of files that an earlier process wrote; how many. Before anything else is asked.

        Of two records of one key the newer counts; blocks that were written later count as used later.
        """
        assert not self._index, "recovery comes first"
        newest: dict[BlockKey, Filed] = {}
        for block in found:
            self._record = max(self._record, block.record)
            self._erasing.written(block.file_slot, block.key, True)
            known = newest.get(block.key)
            if 1 <= block.length <= self.slot_size and (known is None or block.record > known.record):
                newest[block.key] = block
        kept = sorted(newest.values(), key=lambda block: (block.record, block.file_slot))
        self.files.claim({block.file_slot for block in kept}, "block")
        for block in kept:
            entry = Entry(block.key, block.parent, block.length, State.FILED, 0, now_s)
            entry.file_slot, entry.checksum, entry.record = block.file_slot, block.checksum, block.record
            entry.retention, entry.durable = block.retention, self.through
            entry.wanted_until_s = None if block.wanted_s is None else now_s + block.wanted_s
            self._index[entry.key] = entry
            self._list_anew(entry, NOWHERE)
            self._children.add(entry.parent)
            self._uses += 1
            entry.touched, entry.uses, entry.used_at_s = self._uses, 1, now_s
            self._keeping.begin(entry)
            self._file_order.enter(entry)
        for entry in self._index.values():
            self._offer(entry)
        self.counts.recovered += len(kept)
        return len(kept)

    def _write_through(self, entry: Entry, now_s: float) -> bool:
        """Begin to make a block durable that was just committed."""
        if not self._may_file(entry, now_s):
            return False
        self._file_ancestors(entry, now_s)
        return self._file(entry, now_s, stays=True, durable=True)

    def unfiled(self) -> list[BlockKey]:
        """Blocks that would be lost if this process ended now, the most recently used first."""
        lost = [e for e in self._index.values() if self._could_file(e)]
        return [entry.key for entry in sorted(lost, key=lambda entry: -entry.touched)]

    def file(self, key: BlockKey, now_s: float) -> bool:
        """Begin to write a block to its file, ancestors first; it stays in DRAM. False: later, too many moves are
        under way. True also when it need not be or cannot be."""
        entry = self._index.get(key)
        if entry is None or not self._could_file(entry) or not self._may_file(entry, now_s):
            return True
        if not self._file_ancestors(entry, now_s):
            return False
        if self._could_file(entry):
            self._file(entry, now_s, stays=True)
        return True

    def _could_file(self, entry: Entry) -> bool:
        return entry.state is State.COMMITTED and entry.file_slot < 0 and entry.transient_until_s is None

    def file_damaged(self, key: BlockKey, file_slot: int, record: int, now_s: float) -> bool:
        """A block's file copy was read and is not whole: it is never served again; a copy in DRAM stays. Whether it
        was still that block's."""
        entry = self._index.get(key)
        if entry is None or (entry.file_slot, entry.record) != (file_slot, record):
            return False
        if entry.state is State.FILED:
            self._forget(entry, "corrupt", now_s)
        elif entry.state is State.COMMITTED:
            self._give_file_slot(entry)
            entry.durable = False
            self._offer(entry)
        else:
            return False  # it is being read or written now, and is checked there
        self.counts.corrupt += 1
        return True
