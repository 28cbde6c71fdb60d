"""Below the files: blocks that were copied to a store before their file slot was wanted.

A directory on a shared file system or an object store is slow, may be away, and belongs to nobody here; so nothing ever
waits for it but a read that finds its block nowhere else. Blocks are archived ahead of need, the oldest files first,
while the file tier is filling up, a few at a time. A block that is then evicted from its file is known by its key and
size only, and comes straight to DRAM when it is read. The store's share of this rank has a cap; for room the oldest
object goes. While the store fails it is left alone, and what is there is a miss.

Pure rules, part of `Store`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from kvtool.kv.block import BlockKey
from kvtool.kv.health import Backoff
from kvtool.kv.record import NOWHERE, Archive, Discard, Entry, Fetch, Filed, Reading, State
from kvtool.kv.recover import Filing

ARCHIVES_MAX, FETCHES_MAX = 2, 16
"""Under way at a time."""
AWAY_S = 10.0
"""A store that has not ended a request for so long is left alone until it has."""
FULL_SHARE = 4
"""Archiving begins when less than one file slot of so many is free."""
OBJECTS_MAX = 1_000_000
HEADER_SIZE = 4096


class Remotes(Filing):
    """The rules of the tier below. It is off until `open_below`."""

    def __init__(self, slots: int, slot_size: int, file_slots: int, lease_term_s: float, evict: str) -> None:
        super().__init__(slots, slot_size, file_slots, lease_term_s, evict)
        self.below_size = self.below_used = 0
        self.below_backoff = Backoff(1.0, 60.0)
        self._objects: dict[BlockKey, int] = {}  # key -> bytes of the object, oldest first
        self._unarchived: deque[BlockKey] = deque()
        self._archives: dict[int, tuple[Archive, float]] = {}
        self._unwanted: set[int] = set()  # archives under way of blocks that were deleted
        self._fetches: dict[int, Entry] = {}
        self._no_objects: dict[BlockKey, int] = {}

    @property
    def below(self) -> Collection[BlockKey]:
        """Keys that can be fetched; none while the store fails."""
        return self._no_objects if self.below_backoff.failures else self._objects

    @property
    def below_count(self) -> int:
        return len(self._objects)

    @property
    def fetching(self) -> int:
        return len(self._fetches)

    def open_below(self, size: int, found: Iterable[tuple[BlockKey, int]], now_s: float) -> None:
        """There is a store, `size` bytes of it are ours, and (key, bytes) are in it, oldest first."""
        self.below_size = size
        for key, bytes_ in found:
            if HEADER_SIZE < bytes_ <= HEADER_SIZE + self.slot_size and key not in self._objects:
                self._objects[key] = bytes_
                self.below_used += bytes_
        self._make_room_below(0)
        self._unarchived = deque(e.key for e in self._index.values() if e.file_slot >= 0 and e.key not in self._objects)
        self._archive_more(now_s)

    def _away(self, now_s: float) -> bool:
        """Whether the store should be left alone."""
        oldest = [entry.since_s for entry in self._fetches.values()] + [at for _, at in self._archives.values()]
        return not self.below_backoff.over(now_s) or (bool(oldest) and now_s - min(oldest) > AWAY_S)

    # Down

    def demoted(self, move: int, ok: bool, now_s: float, why: str = "") -> None:
        key = self._moves[move].key
        super().demoted(move, ok, now_s, why)
        if ok and self.below_size:
            if len(self._unarchived) < 2 * self.files.count:
                self._unarchived.append(key)
            self._archive_more(now_s)

    def _keep_ahead(self, now_s: float) -> None:
        super()._keep_ahead(now_s)
        self._archive_more(now_s)

    def _archive_more(self, now_s: float) -> None:
        while (
            self._unarchived and len(self._archives) < ARCHIVES_MAX and self.files.free * FULL_SHARE < self.files.count
        ):
            if self._away(now_s):
                return
            key = self._unarchived.popleft()
            entry = self._index.get(key)
            size = 0 if entry is None else HEADER_SIZE + entry.length
            if entry is None or entry.state not in (State.FILED, State.COMMITTED) or entry.file_slot < 0:
                continue
            if key in self._objects or not self._make_room_below(size):
                continue
            self._move += 1
            archive = Archive(self._move, key, entry.file_slot, entry.record, entry.length)
            self._archives[self._move] = archive, now_s
            self._actions.append(archive)

    def _make_room_below(self, size: int) -> bool:
        """Let the oldest objects go until `size` bytes more are within the cap."""
        coming = sum(HEADER_SIZE + archive.length for archive, _ in self._archives.values())
        if coming + size > self.below_size:
            return False
        while self._objects and (
            self.below_used + coming + size > self.below_size or len(self._objects) >= OBJECTS_MAX
        ):
            self.discard(next(iter(self._objects)))
        return True

    def archived(self, move: int, ok: bool, now_s: float, why: str = "") -> None:
        """An `Archive` ended. `why` it failed is the store's affair; empty: the record had gone from its file."""
        archive, _ = self._archives.pop(move)
        if move in self._unwanted:
            self._unwanted.remove(move)
            self._actions.append(Discard(archive.key))
        elif ok:
            self.below_backoff.worked()
            self.counts.archived += 1
            self._objects[archive.key] = HEADER_SIZE + archive.length
            self.below_used += HEADER_SIZE + archive.length
        elif why:
            self.below_backoff.failed(now_s, why)
            self._unarchived.append(archive.key)
        self._archive_more(now_s)

    def discard(self, key: BlockKey) -> bool:
        """Forget what the store has of a block, and have it removed there; whether it had."""
        self._unwanted.update(move for move, (archive, _) in self._archives.items() if archive.key == key)
        size = self._objects.pop(key, None)
        if size is None:
            return False
        self.below_used -= size
        self._actions.append(Discard(key))
        return True

    # Up

    def _below(self, key: BlockKey, now_s: float) -> Entry | None:
        """A block that only the store has, as something that can be fetched now."""
        size = self._objects.get(key)
        if size is None or self._away(now_s):
            return None
        return Entry(key, None, size - HEADER_SIZE, State.REMOTE, 0, now_s)

    def _fetch(self, entry: Entry, now_s: float) -> bool:
        """Begin to bring a block from the store to DRAM; False when there is no slot for it now."""
        if entry.key in self._index or len(self._fetches) >= FETCHES_MAX:
            return False
        slot = self._take_slot("block")
        if slot is None:
            return False
        entry.slot, entry.generation, entry.state = slot, self.dram.generation(slot), State.PROMOTING
        self._index[entry.key] = self._at[slot] = entry
        self._list_anew(entry, NOWHERE)
        self._move += 1
        self._fetches[self._move] = entry
        self._actions.append(Fetch(self._move, entry.key, slot, entry.length))
        return True

    def fetched(self, move: int, found: Filed | None, now_s: float, why: str = "", lost: bool = False) -> list[Reading]:
        """A `Fetch` ended; the reads that waited for it. `found`: what the block's record says, if it came whole.
        `lost`: it is not there, or damaged. Else it failed for the reason in `why`."""
        entry = self._fetches.pop(move)
        readings, entry.awaited_by = entry.awaited_by, []
        if found is not None:
            self.below_backoff.worked()
            self.counts.fetched += 1
            self._arrived(entry, found, now_s)
        else:
            self.counts.fetch_failed += 1
            if lost:
                self.discard(entry.key)
            else:
                self.below_backoff.failed(now_s, why)
            if not entry.doomed:
                self._unindex(entry)
            self._leave_dram(entry, "lost below", now_s)
        for reading in readings:
            reading.waiting -= 1
            for hit in reading.hits:
                if hit.entry is entry:
                    hit.ready = found is not None and not entry.doomed
                    hit.checksum = entry.checksum
        return readings

    def _arrived(self, entry: Entry, found: Filed, now_s: float) -> None:
        entry.checksum, entry.parent = found.checksum, found.parent
        entry.retention = found.retention
        entry.wanted_until_s = None if found.wanted_s is None else now_s + found.wanted_s
        if not entry.doomed:
            self._children.add(entry.parent)
        self._enter_dram(entry)
        if entry.doomed:
            self._leave_dram(entry, "doomed", now_s)
            return
        self._keeping.begin(entry)
        self._touch(entry, now_s)
        self._offer(entry)
        self._came(entry)
