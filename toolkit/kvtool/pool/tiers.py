"""Tiers: one rank's rules on real memory and files.

Carries out what `kv.store.Store` decides. Stamps are written at once. Moves between DRAM and files run in the file
tier's threads, and what came of them is handed to `post`, which calls it back where the rules live: on a rank's event
loop, or under the embedded pool's lock. A promoted block is checked in those threads, before anybody sees it.

Not thread-safe: every method runs where the rules live.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from typing import TYPE_CHECKING, Any

from kvtool.errors import BlockCorrupt
from kvtool.kv.block import BlockKey
from kvtool.kv.record import NOWHERE, Demote, Erase, Filed, Promote, Reading, Stamp, Whereabouts
from kvtool.kv.retention import DEFAULT, Pin, Retention
from kvtool.kv.store import Store
from kvtool.pool.below import Below
from kvtool.pool.directory import Directory
from kvtool.pool.memory import SlotMemory
from kvtool.transfer.filehead import Kept

if TYPE_CHECKING:
    from kvtool.transfer.filehead import SlotHeader
    from kvtool.transfer.files import BlockFile
    from kvtool.transfer.remote import ObjectStore

log = logging.getLogger("kvtool.pool")

Event = Callable[[float], "list[Reading]"]
"""What came of a move; takes the time, gives the reads that waited for it."""


class Tiers:
    """`post` must be callable from any thread, and must call what it is given once, where the rules live."""

    def __init__(
        self,
        store: Store,
        memory: SlotMemory,
        files: BlockFile | None,
        post: Callable[[Event], None],
        directory: Directory | None = None,
    ) -> None:
        self.store, self.memory, self.files, self.post = store, memory, files, post
        self.directory = directory
        self.wall_s: Callable[[], float] = time.time
        """The wall clock, for what is written into files."""
        self.below: Below | None = None
        self.bytes_moved = {"demoted": 0, "promoted": 0}
        self._ended: deque[Event] = deque()
        self._lock, self._told = threading.Lock(), False
        self.arrivals: list[BlockKey] | None = None
        """Blocks that came to stay since somebody emptied this; None: nobody asks."""

    def carry_out(self) -> None:
        """Do what the rules want done by now. Call after every call into `store`, before anyone is answered."""
        for action in self.store.take_actions():
            if isinstance(action, Stamp):
                self.memory.stamp(action)
            elif isinstance(action, Demote):
                self._demote(action)
            elif isinstance(action, Promote):
                self._promote(action)
            elif isinstance(action, Erase):
                self._erase(action)
            elif self.below is not None:
                self.below.carry_out(action)
        for block in self.store.take_whereabouts():
            if self.directory is not None:
                self.directory.place(block)
            if self.arrivals is not None and not block.transient and _came_to_stay(block):
                self.arrivals.append(block.key)

    def _demote(self, move: Demote) -> None:
        def done(future: Future[None]) -> None:
            error = _error(future)

            def event(now_s: float) -> list[Reading]:
                self.bytes_moved["demoted"] += 0 if error else move.length
                self.store.demoted(move.move, error is None, now_s, str(error or ""))
                return []

            self._end(event)

        assert self.files is not None
        data = self.memory.slot(move.slot, move.length)
        self.files.write(
            move.file_slot,
            data,
            move.key,
            sum=move.checksum,
            generation=move.record,
            parent=move.parent,
            kept=self._kept(move),
            durable=move.durable,
        ).add_done_callback(done)

    def _kept(self, move: Demote) -> Kept:
        """Times that outlive this process are on the wall clock."""
        wanted, until_s = move.retention, None if move.wanted_s is None else self.wall_s() + move.wanted_s
        return Kept(wanted.priority, until_s, wanted.pin, wanted.copies)

    def _promote(self, move: Promote) -> None:
        def done(future: Future[SlotHeader]) -> None:
            error = _error(future)
            ok = error is None and future.result().checksum == move.checksum
            corrupt = isinstance(error, BlockCorrupt) or (error is None and not ok)

            def event(now_s: float) -> list[Reading]:
                self.bytes_moved["promoted"] += move.length if ok else 0
                return self.store.promoted(move.move, ok, now_s, corrupt)

            self._end(event)

        assert self.files is not None
        out = self.memory.slot(move.slot, move.length)
        self.files.read(move.file_slot, out, move.key, generation=move.record).add_done_callback(done)

    def _erase(self, action: Erase) -> None:
        def done(future: Future[None]) -> None:
            ok = _error(future) is None
            self._end(lambda now_s: self.store.erased(action.file_slot, ok, now_s))

        assert self.files is not None
        self.files.erase(action.file_slot).add_done_callback(done)

    def _end(self, event: Event) -> None:
        """A move ended, in some thread. Those that end before the rules hear of it are told together: what is waiting
        is looked at once for all of them."""
        self._ended.append(event)
        with self._lock:
            if self._told:
                return
            self._told = True
        self.post(self._tell)

    def _tell(self, now_s: float) -> list[Reading]:
        with self._lock:
            self._told = False
        readings: list[Reading] = []
        while self._ended:
            readings += self._ended.popleft()(now_s)
        return readings

    def open_below(self, objects: ObjectStore, size: int, executor: Executor | None = None) -> None:
        """Begin to use `size` bytes of a store below the files."""
        assert self.files is not None

        def describe(header: SlotHeader) -> Filed:
            return _filed(-1, header, self.wall_s())

        self.below = Below(self.store, self.memory, self.files, objects, self._end, describe, executor)
        self.below.open(size)

    def report(self) -> dict[str, object]:
        """How the file tier does, for a status."""
        store = self.store
        return {
            "how": "none" if self.files is None else self.files.how,
            "write": "through" if store.through else "back",
            "moving": store.demoting + store.filing,
            "failures": store.backoff.failures,
            "why": store.backoff.why,
            "below": None if self.below is None else self.below.report(),
        }

    def recover(self, now_s: float) -> int:
        """Register what the file holds from before; how many blocks. Before the first client."""
        if self.files is None:
            return 0
        wall_s = self.wall_s()
        return self.store.recover((_filed(slot, header, wall_s) for slot, header in self.files.headers()), now_s)


def _came_to_stay(block: Whereabouts) -> bool:
    """It was not here, or it was here for a while only: then it is listed anew where it was."""
    return block.slot != NOWHERE and (block.was == NOWHERE or 0 <= block.was == block.slot)


def _filed(slot: int, header: SlotHeader, wall_s: float) -> Filed:
    kept, left_s = header.kept, None if header.kept.until_s is None else header.kept.until_s - wall_s
    try:
        if left_s is None or left_s > 0:
            retention = Retention(kept.priority, left_s, Pin(kept.pin), kept.copies)
        else:
            left_s, retention = None, Retention(copies=kept.copies)
    except ValueError:  # written by a kvtool that knows more than this one
        left_s, retention = None, DEFAULT
    key, size, sum_, record, parent = header[:5]
    return Filed(slot, key, size, sum_, record, parent, retention, left_s)


def _error(future: Future[Any]) -> BaseException | None:
    """Why a move failed; a move that was never begun, as the file is being closed, failed too."""
    if future.cancelled():
        return CancelledError()
    error = future.exception()
    if error is not None:
        log.warning("move between tiers failed why=%r", str(error))
    return error
