"""Tiers: one rank's rules on real memory and files.

Carries out what `kv.store.Store` decides. Stamps are written at once. Moves between DRAM and files run in the file
tier's threads, and what came of them is handed to `post`, which calls it back where the rules live: on a rank's event
loop, or under the embedded pool's lock. A promoted block is checked in those threads, before anybody sees it.

Not thread-safe: every method runs where the rules live.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

from kvtool.errors import BlockCorrupt
from kvtool.kv.record import Demote, Promote, Reading, Stamp
from kvtool.kv.store import Store
from kvtool.pool.directory import Directory
from kvtool.pool.memory import SlotMemory

if TYPE_CHECKING:
    from kvtool.transfer.filehead import SlotHeader
    from kvtool.transfer.files import BlockFile

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
        self.bytes_moved = {"demoted": 0, "promoted": 0}

    def carry_out(self) -> None:
        """Do what the rules want done by now. Call after every call into `store`, before anyone is answered."""
        for action in self.store.take_actions():
            if isinstance(action, Stamp):
                self.memory.stamp(action)
            elif isinstance(action, Demote):
                self._demote(action)
            else:
                self._promote(action)
        for block in self.store.take_whereabouts():
            if self.directory is not None:
                self.directory.place(block)

    def _demote(self, move: Demote) -> None:
        def done(future: Future[None]) -> None:
            ok = _error(future) is None

            def event(now_s: float) -> list[Reading]:
                self.bytes_moved["demoted"] += move.length if ok else 0
                self.store.demoted(move.move, ok, now_s)
                return []

            self.post(event)

        assert self.files is not None
        data = self.memory.slot(move.slot, move.length)
        self.files.write(move.file_slot, data, move.key, sum=move.checksum).add_done_callback(done)

    def _promote(self, move: Promote) -> None:
        def done(future: Future[SlotHeader]) -> None:
            error = _error(future)
            ok = error is None and future.result().checksum == move.checksum
            corrupt = isinstance(error, BlockCorrupt) or (error is None and not ok)

            def event(now_s: float) -> list[Reading]:
                self.bytes_moved["promoted"] += move.length if ok else 0
                return self.store.promoted(move.move, ok, now_s, corrupt)

            self.post(event)

        assert self.files is not None
        out = self.memory.slot(move.slot, move.length)
        self.files.read(move.file_slot, out, move.key).add_done_callback(done)


def _error(future: Future[Any]) -> BaseException | None:
    """Why a move failed; a move that was never begun, as the file is being closed, failed too."""
    if future.cancelled():
        return CancelledError()
    error = future.exception()
    if error is not None:
        log.warning("move between tiers failed why=%r", str(error))
    return error
