"""Tiers: one rank's rules on real memory and files.

Carries out what `kv.store.Store` decides. Stamps are written at once. Moves between DRAM and files run in the file
tier's threads, and what came of them is handed to `post`, which calls it back where the rules live: on a rank's event
loop, or under the embedded pool's lock. A promoted block is checked in those threads, before anybody sees it.

Not thread-safe: every method runs where the rules live.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kvtool.kv.record import Demote, Promote, Reading, Stamp
from kvtool.kv.store import Store
from kvtool.pool.memory import SlotMemory
from kvtool.transfer.checksum import checksum

if TYPE_CHECKING:
    from kvtool.transfer.files import BlockFile

Event = Callable[[float], "list[Reading]"]
"""What came of a move; takes the time, gives the reads that waited for it."""


class Tiers:
    """`post` must be callable from any thread, and must call what it is given once, where the rules live."""

    def __init__(
        self, store: Store, memory: SlotMemory, files: BlockFile | None, post: Callable[[Event], None]
    ) -> None:
        self.store, self.memory, self.files, self.post = store, memory, files, post
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

    def _demote(self, move: Demote) -> None:
        def done(future: Future[int]) -> None:
            ok = future.exception() is None

            def event(now_s: float) -> list[Reading]:
                self.bytes_moved["demoted"] += move.length if ok else 0
                self.store.demoted(move.move, ok, now_s)
                return []

            self.post(event)

        assert self.files is not None
        self.files.write(move.file_slot, self.memory.slot(move.slot, move.length)).add_done_callback(done)

    def _promote(self, move: Promote) -> None:
        out = self.memory.slot(move.slot, move.length)

        def done(future: Future[int]) -> None:
            read = future.exception() is None
            ok = read and checksum(out, move.key) == move.checksum

            def event(now_s: float) -> list[Reading]:
                self.bytes_moved["promoted"] += move.length if ok else 0
                return self.store.promoted(move.move, ok, now_s, corrupt=read and not ok)

            self.post(event)

        assert self.files is not None
        self.files.read(move.file_slot, out).add_done_callback(done)
