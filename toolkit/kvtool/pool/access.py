"""How a client reaches one rank's memory: mapped (same node), or by one-sided UCX transfers.

Mapped, a read is a view in place and a put is written straight into the slot. Reads have a mapping of their own, which
the kernel keeps read-only: a reader with a bug faults, instead of damaging blocks or headers of others; the writable
mapping is made with the first put. By UCX, both go through the client's registered staging memory, one transfer for all
blocks of a rank. By socket, bytes follow the requests on connections of their own: for whoever has neither.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from kvtool.errors import KvtoolError, PoolUnavailable, Unavailable
from kvtool.kv.layout import KVLayout
from kvtool.pool.base import Path
from kvtool.pool.breaker import Breaker
from kvtool.pool.buffers import HostRoom, Room
from kvtool.pool.lane import Lanes
from kvtool.pool.line import Line
from kvtool.pool.memory import SlotMemory, slot_offset
from kvtool.pool.nearby import Nearby, nearby
from kvtool.pool.pace import Answers
from kvtool.pool.spare import Spares
from kvtool.pool.state import RankState
from kvtool.pool.wire import Op, pack_aborts, pack_touches
from kvtool.transfer import nixl
from kvtool.transfer.landing import Landing
from kvtool.transfer.segment import Segment
from kvtool.transfer.staging import Staging

if TYPE_CHECKING:
    from kvtool.transfer.ucx import UcxReader

log = logging.getLogger("kvtool.pool")

UCX_SETTLE_S = 2.0
"""What was sent before a UCX transfer failed may still be in the rank's sockets for so long."""
STAGING_SIZE = 128 * 2**20
STAGING_BLOCKS_MIN = 16
AT_ONCE_SIZE = 8 * 2**20
PREFAULT_MAX = 64 * 2**20
"""Larger segments are faulted in aside: the first call has a budget too."""


class UcxDoor:
    """The client's staging memory: its one UCX reader, and its inbox; each made when first needed. Thread-safe."""

    def __init__(self, name: str, layout: KVLayout, staging_size: int = STAGING_SIZE) -> None:
        self._name, self._layout = name, layout
        self._size = max(staging_size, STAGING_BLOCKS_MIN * layout.block_size)
        self._lock = threading.Lock()
        self._reader: UcxReader | None = None
        self._inbox: Staging | None = None
        self._closed = False
        self._abandoned: list[tuple[Line, list[tuple[int, int]]]] = []
        self._landings: list[Landing] = []

    def register(self, view: memoryview, owner: object) -> Landing:
        """Memory that transfers by UCX may write to directly."""
        landing = Landing(view, owner, self._landings.remove)
        self._landings.append(landing)
        return landing

    def landing(self, address: int, size: int) -> Landing | None:
        """The registered memory that a place lies in."""
        return next((one for one in self._landings if one.holds(address, size)), None)

    def held(self, rooms: Sequence[Room]) -> list[int]:
        """Positions of those that a transfer which was given up may still write to."""
        if not self._landings:
            return []
        mine = [self.landing(r.address, r.size) if isinstance(r, HostRoom) else None for r in rooms]
        return [position for position, landing in enumerate(mine) if landing is not None and not landing.free]

    @property
    def lands(self) -> bool:
        """Whether any memory is registered."""
        return bool(self._landings)

    @property
    def reader(self) -> UcxReader:
        """
        Raises:
            Missing: NIXL is not installed.
            PoolUnavailable: the client is closed.
        """
        with self._lock:
            if self._closed:
                raise PoolUnavailable("this client of the pool is closed")
            if self._reader is None:
                from kvtool.transfer.ucx import UcxReader

                self._reader = UcxReader(self._name, self._size, self._layout.block_size)
            return self._reader

    @property
    def inbox(self) -> Staging:
        """Where blocks that come by socket are received.

        Raises:
            PoolUnavailable: the client is closed.
        """
        with self._lock:
            if self._closed:
                raise PoolUnavailable("this client of the pool is closed")
            if self._inbox is None:
                self._inbox = Staging(self._size, self._layout.block_size, prefault=False)
            return self._inbox

    @property
    def blocks(self) -> int:
        """How many blocks one transfer may have."""
        return self.reader.staging.slots

    def blocks_by(self, path: Path | None) -> int:
        """As `blocks`, of a transfer by `path`."""
        return self.inbox.slots if path is Path.SOCKET else self.blocks

    def abandon(self, link: Line, reserved: list[tuple[int, int]]) -> None:
        """A write into the slots `reserved` (slot, generation) of the rank behind `link` may still be under way: the
        connection must outlive it, and the slots are given back when it is over."""
        with self._lock:
            self._abandoned.append((link, reserved))

    def look_after(self) -> None:
        """Let go of links and slots whose abandoned writes are over."""
        with self._lock:
            waiting, self._abandoned = self._abandoned, []
            reader = self._reader
        if not waiting:
            return
        if reader is not None and reader.progress():
            with self._lock:
                self._abandoned += waiting
            return
        for link, reserved in waiting:
            link.tell(Op.ABORT, pack_aborts(UCX_SETTLE_S, reserved))
            link.end_writing()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            reader, self._reader = self._reader, None
            abandoned, self._abandoned = self._abandoned, []
        if reader is not None:
            reader.close()
        for link, _ in abandoned:  # as if we had died: what is on its way arrives within the rank's settling time
            link.end_writing()


class Access:
    """One rank as a client uses it: `link` for requests and, once `open` succeeded, `path` for bytes."""

    def __init__(
        self,
        state: RankState,
        link: Line,
        layout: KVLayout,
        path: str,
        door: UcxDoor,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state, self.link = state, link
        self._now_s = now_s
        self.path: Path | None = None
        self.answers = Answers()
        self.transfers, self.files = Breaker(), Breaker()
        """Of the UCX path to the rank, and of its file tier."""
        self.memory: SlotMemory | None = None
        """Mapped for reading."""
        self.nearby: Nearby | None = None
        """The rank's directory, where its memory is mapped."""
        self.spares: Spares | None = None
        """For puts of one block, where they can be so simple."""
        self.peer = f"{state.identity}:{state.pid}:{state.started}"
        self._layout, self._wanted, self._door = layout, path, door
        self.lanes = Lanes(lambda deadline_s: link.lane(deadline_s))
        self.at_once = max(1, AT_ONCE_SIZE // layout.block_size)
        """Blocks that are sent by socket with the answer to a lookup; more are asked for when it is here."""
        self._segments: list[Segment] = []
        self._writable: SlotMemory | None = None
        self._lock = threading.Lock()

    @staticmethod
    def wants_ucx(state: RankState, path: str) -> bool:
        if path == "auto":
            here = bool(state.segment) and state.host == socket.gethostname()
            mapped = here and FilePath("/dev/shm", state.segment).exists()
            return not mapped and bool(state.ucx_metadata) and nixl.installed()
        return path == "ucx"

    def open(self, deadline_s: float, introduced: bool = False) -> Path | None:
        """Map or connect, once; None when there is no way to the rank's memory. `introduced`: the rank was called just
        now, over our link.

        Raises:
            Unavailable: the rank does not answer.
        """
        if self.path in (Path.SHM, Path.SOCKET):
            return self.path
        if self.link.ucx and not self.transfers.allows(self._now_s()):
            return None
        if self.path is Path.UCX and self._door.reader.connected(self.peer):
            return self.path
        if not self._lock.acquire(timeout=max(0.0, deadline_s - self._now_s())):
            raise Unavailable(f"rank {self.state.rank} is being connected to and does not answer")
        try:
            if self.link.ucx:
                return self._open_ucx(deadline_s, introduced)
            if self.path is None and self._wanted in ("auto", "shm") and self.state.segment:
                self._open_shm()
            if self.path is None and self._wanted in ("auto", "socket"):
                self.link.connect(deadline_s)
                self.path = Path.SOCKET
            return self.path
        finally:
            self._lock.release()

    def prepare(self) -> None:
        """What takes time and needs nobody, before the rank is called for `open`.

        Raises:
            Missing, PoolUnavailable: as `UcxDoor.reader`.
        """
        if self.link.ucx and self.state.ucx_metadata:
            _ = self._door.reader

    @property
    def mapped(self) -> SlotMemory | None:
        """The rank's memory for a put, if `writable` has mapped it."""
        return self._writable

    def writable(self, deadline_s: float) -> SlotMemory | None:
        """The rank's memory for a put, mapped the first time; None when it is not, or not any more.

        Raises:
            Unavailable: the rank is being connected to and does not answer.
        """
        if self._writable is not None:
            return self._writable
        if not self._lock.acquire(timeout=max(0.0, deadline_s - self._now_s())):
            raise Unavailable(f"rank {self.state.rank} is being connected to and does not answer")
        try:
            if self._writable is None and self.path is Path.SHM and self.memory is not None:
                self._writable = self.map_memory(writable=True)
            return self._writable
        finally:
            self._lock.release()

    @property
    def mapped_for_writing(self) -> SlotMemory | None:
        """What `writable` gave before."""
        return self._writable

    def _open_shm(self) -> None:
        self.memory = self.map_memory(writable=False)
        if self.memory is not None:
            region = self.memory.view[SlotMemory.size(self.state.slots, self._layout.block_size) :]
            self.nearby = nearby(self.memory, region, self.state.incarnation, self._now_s, self._tell_uses)
            if self.nearby is not None and not self.nearby.ask:
                self.spares = Spares(self.link, self._now_s)
            self.path = Path.SHM

    def _tell_uses(self, uses: Sequence[tuple[int, int]]) -> None:
        self.link.tell(Op.TOUCH, pack_touches(uses))

    def map_memory(self, writable: bool) -> SlotMemory | None:
        """The rank's slots as memory of this process; None when it cannot be had."""
        size = self.state.segment_size
        try:
            segment = Segment.attach(self.state.segment, writable, size=size, prefault=size <= PREFAULT_MAX)
        except KvtoolError as error:
            log.warning("no shared memory of rank %d writable=%s why=%r", self.state.rank, writable, str(error))
            return None
        self._segments.append(segment)
        if size > PREFAULT_MAX:
            segment.prefault_aside()
        return SlotMemory(segment.view, self.state.slots, self._layout.block_size)

    def _open_ucx(self, deadline_s: float, introduced: bool) -> Path | None:
        if not self.state.ucx_metadata:
            return None
        reader = self._door.reader  # takes its time when it is made
        if not introduced:
            self.link.call(Op.PING, b"", deadline_s)  # the rank makes progress for those whom it heard of lately
        try:
            reader.connect(self.peer, bytes.fromhex(self.state.ucx_metadata), deadline_s)
        except Unavailable:
            self.transfers.bad(self._now_s())
            raise
        self.path = Path.UCX
        return self.path

    def offset(self, slot: int) -> int:
        return slot_offset(slot, self.state.slots, self._layout.block_size)

    def close(self) -> None:
        if self.nearby is not None:
            self.nearby.flush()
        if self.spares is not None:
            self.spares.close()
        self.link.close()
        self.lanes.close()
        self.memory = self._writable = self.nearby = self.spares = None
        for segment in self._segments:
            segment.close()
        if self.path is Path.UCX:
            with contextlib.suppress(KvtoolError):
                self._door.reader.disconnect(self.peer)
