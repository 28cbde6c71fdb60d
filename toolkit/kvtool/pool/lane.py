"""The client's half of data connections (`pool.data`): one transfer at a time on each, a few of them to every rank.

A read is received straight into the caller's memory, and hashed piece by piece while those are in the cache; a put is
hashed and sent likewise. A lane on which anything went wrong is closed: what comes next on it could be the rest of
something else.
"""

from __future__ import annotations

import contextlib
import hmac
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from xxhash import xxh3_64

from kvtool.errors import ProtocolError, Unavailable
from kvtool.pool.data import PREFACE, TAG_SIZE, Tag, bound
from kvtool.pool.handshake import Session
from kvtool.pool.wire import Op, pack_read
from kvtool.transfer.checksum import seed_of

if TYPE_CHECKING:
    from kvtool.pool.line import Line

PIECE = 256 * 1024
"""Received before it is hashed: see `transfer.checksum.STEP`."""
Source = Callable[[], memoryview]
"""Gives a block's bytes, which stay as they are until the next one is asked for."""
SPARE_MAX = 4
"""Idle lanes that are kept for the next call."""


class LaneBroken(Unavailable):
    """The data connection failed, or was too slow; the rank itself may be well."""


class Lane:
    """One data connection. Not thread-safe: it belongs to whoever took it."""

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        now_s: Callable[[], float] = time.monotonic,
        seal: Session | None = None,
    ) -> None:
        self.number = number
        self.broken = False
        self.owed = False
        """Whether a transfer was asked for that is not in yet."""
        self._sock, self._now_s, self._seal = sock, now_s, seal
        self._transfers = 0

    def next_transfer(self) -> int:
        """The number of a transfer that is being asked for; the lane is of no use until it is over."""
        self.owed = True
        self._transfers += 1
        return self._transfers

    def receive(
        self, rooms: Sequence[memoryview], keys: Sequence[bytes], deadline_s: float, each: Callable[[int, int], None]
    ) -> None:
        """The transfer that was asked for, into `rooms`; `each` is called with the number of a block that has come, and
        its checksum under its key.

        Raises:
            LaneBroken: not all of it came by the deadline.
        """
        with self._care(deadline_s):
            preface = memoryview(bytearray(PREFACE.size))
            self._take(preface, deadline_s)
            if PREFACE.unpack(preface) != (self._transfers, sum(map(len, rooms))):
                raise ProtocolError("the rank sends something else than it was asked for")
            for at, (room, key) in enumerate(zip(rooms, keys, strict=True)):
                tag = None if self._seal is None else Tag(self._seal.down, bytes(preface), at)
                each(at, self._receive(room, key, tag, deadline_s))
        self.owed = False

    def _receive(self, room: memoryview, key: bytes, tag: Tag | None, deadline_s: float) -> int:
        hasher = xxh3_64(seed=seed_of(key))
        for at in range(0, len(room), PIECE):
            piece = room[at : at + PIECE]
            self._take(piece, deadline_s)
            hasher.update(piece)
            if tag is not None:
                tag.add(piece)
        if tag is not None:
            found = memoryview(bytearray(TAG_SIZE))
            self._take(found, deadline_s)
            if not hmac.compare_digest(found, tag.value()):
                raise ProtocolError("a block was changed on its way")
        return hasher.intdigest()

    def _take(self, room: memoryview, deadline_s: float) -> None:
        got, size = 0, len(room)
        while got < size:
            count = self._sock.recv_into(room[got:] if got else room, 0, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionResetError("the rank closed the data connection")
            got += count
            if got < size and self._now_s() >= deadline_s:
                raise TimeoutError("it did not come in time")

    def put(self, blocks: Sequence[tuple[int, bytes, Source]], deadline_s: float) -> list[int]:
        """Send the blocks that were announced, each (size, key, where it is); the checksum of each.

        What lies in memory is hashed and sent piece by piece, without a copy. Should somebody change it meanwhile, its
        checksum fails for whoever reads it.

        Raises:
            LaneBroken: not all of it went out by the deadline. Whatever a `Source` raises.
        """
        preface = PREFACE.pack(self._transfers, sum(size for size, _, _ in blocks))
        with self._care(deadline_s):
            pass  # from here on calls end by then
        self._send(memoryview(preface), deadline_s)
        sums = [
            self._put(source(), key, None if self._seal is None else Tag(self._seal.up, preface, at), deadline_s)
            for at, (_, key, source) in enumerate(blocks)
        ]
        self.owed = False
        return sums

    def _put(self, data: memoryview, key: bytes, tag: Tag | None, deadline_s: float) -> int:
        hasher = xxh3_64(seed=seed_of(key))
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            hasher.update(piece)
            if tag is not None:
                tag.add(piece)
            self._send(piece, deadline_s)
        if tag is not None:
            self._send(tag.value(), deadline_s)
        return hasher.intdigest()

    def _send(self, data: memoryview, deadline_s: float) -> None:
        try:
            sent = self._sock.send(data)
            while sent < len(data):
                if self._now_s() >= deadline_s:
                    raise TimeoutError("it did not go out in time")
                sent += self._sock.send(data[sent:])
        except OSError as error:
            self._broken(error)

    def _broken(self, error: Exception) -> NoReturn:
        self.close()
        raise LaneBroken(f"a transfer by socket was broken off: {error or type(error).__name__}") from None

    @contextlib.contextmanager
    def _care(self, deadline_s: float) -> Iterator[None]:
        try:
            bound(self._sock, max(0.001, deadline_s - self._now_s()))
            yield
        except (OSError, ProtocolError) as error:
            self.close()
            raise LaneBroken(f"a transfer by socket was broken off: {error or type(error).__name__}") from None

    def left(self) -> bool:
        """Whether the rank has hung up, or sends what nobody asked for."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.broken = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Lanes:
    """A client's lanes to one rank. Thread-safe. `dial` makes another."""

    def __init__(self, dial: Callable[[float], Lane]) -> None:
        self._dial = dial
        self._idle: list[Lane] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self, deadline_s: float) -> Lane:
        """A lane of one's own, until `give`.

        Raises:
            Unavailable, Refused: there is none, and none can be made.
        """
        return self.idle() or self._dial(deadline_s)

    def idle(self) -> Lane | None:
        """As `take`, when there is one already; costs no wait."""
        while True:
            with self._lock:
                lane = self._idle.pop() if self._idle else None
            if lane is None or not lane.left():
                return lane
            lane.close()

    def give(self, lane: Lane) -> None:
        """Back for the next call, or closed when something is still on its way."""
        if lane.broken:
            return
        with self._lock:
            if not self._closed and not lane.owed and len(self._idle) < SPARE_MAX:
                self._idle.append(lane)
                return
        lane.close()

    def ask(self, link: Line, read: int, slots: Sequence[int], deadline_s: float) -> Lane:
        """Have what is in `slots`, on which `read` has a lease, sent on the lane that is returned.

        Raises:
            Unavailable, Refused: it could not be asked for.
        """
        lane = self.take(deadline_s)
        try:
            link.say(Op.READ, pack_read(lane.number, lane.next_transfer(), read, slots), deadline_s)
        except BaseException:
            self.give(lane)
            raise
        return lane

    def close(self) -> None:
        """The rank is gone, or another process: every idle lane goes."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for lane in idle:
            lane.close()
