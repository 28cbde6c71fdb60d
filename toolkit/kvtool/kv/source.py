"""Sources: the blocks of this rank, as they are copied to other ranks.

A block in DRAM is copied from its slot, under a lease like any reader's; one that is in a file only is read from there,
and does not come back to DRAM for it. Being copied is no use of a block: it does not keep it from being evicted later.

Pure rules, part of `Store`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvtool.kv.block import BlockKey
from kvtool.kv.copying import Wanted
from kvtool.kv.lease import ReadId
from kvtool.kv.record import Entry, State
from kvtool.kv.remote import Remotes
from kvtool.kv.retention import Retention


@dataclass(frozen=True, slots=True)
class Source:
    """Where the bytes of a block are: in DRAM slot `slot` under a lease, or, when that is -1, in `file_slot`."""

    key: BlockKey
    length: int
    checksum: int
    parent: BlockKey | None
    retention: Retention
    slot: int
    file_slot: int
    record: int
    generation: int = 0


class Sources(Remotes):
    """What the rules of copying ask of one rank's blocks: a `kv.copying.Catalog`."""

    def catalog(self) -> Sequence[BlockKey]:
        """Keys of all blocks that are here now, those first that came last. Takes a millisecond for 100,000."""
        return list(reversed(self._index))

    def wanted(self, keys: Iterable[BlockKey]) -> list[Wanted]:
        """Those of `keys` that are here still, and for good."""
        entries = [self._index.get(key) for key in keys]
        return [Wanted(e.key, e.length, e.retention.copies) for e in entries if e is not None and _stays(e)]

    def bytes_at(self, slots: Iterable[tuple[int, int]]) -> int:
        """Payload of the blocks that are in these (slot, generation) still."""
        entries = ((self._at[slot], generation) for slot, generation in slots)
        return sum(e.length for e, generation in entries if e is not None and e.generation == generation)

    def writer(self, key: BlockKey) -> int:
        """The client that put a block here; 0: an earlier process did, or it is gone."""
        entry = self._index.get(key)
        return 0 if entry is None else entry.owner

    def lend(self, read: ReadId, keys: Sequence[BlockKey], now_s: float) -> list[Source | None]:
        """Where each of `keys` is, until `release(read, ...)`; None for those that are gone."""
        lease, found = None, list[Source | None]()
        for key in keys:
            entry = self._index.get(key)
            if entry is None or not _stays(entry):
                found.append(None)
                continue
            slot = entry.slot if entry.state in (State.COMMITTED, State.DEMOTING) else -1
            if slot >= 0:
                lease = lease or self.leases.grant(read, now_s)
                self.leases.cover(lease, slot)
            kept = _left(entry, now_s)
            where = slot, entry.file_slot, entry.record, entry.generation
            found.append(Source(key, entry.length, entry.checksum, entry.parent, kept, *where))
        return found


def _stays(entry: Entry) -> bool:
    arriving = entry.state is State.PROMOTING and entry.file_slot < 0  # from below the files
    return entry.state is not State.RESERVED and entry.transient_s is None and not arriving


def _left(entry: Entry, now_s: float) -> Retention:
    """How firmly it is wanted from now on."""
    if entry.wanted_until_s is None:
        return entry.retention
    left_s = entry.wanted_until_s - now_s
    return replace(entry.retention, duration_s=left_s) if left_s > 0 else Retention(copies=entry.retention.copies)
