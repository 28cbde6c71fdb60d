"""A client's link to one rank: many threads ask, one socket answers.

Whoever waits for an answer reads the socket, and hands out what is for others (leader and followers): an answer costs
no thread switch when one thread asks, and no thread of our own sits there when nobody does.

**Circuit breaker.** A rank that let a request time out is asked nothing more: calls fail at once, as a miss, until
anything at all comes back from it. The unanswered request is the probe: a rank that goes on (SIGCONT) answers it late,
and the next call finds that answer without a wait and without a background thread. Should that request be lost, a PING
that nobody waits for is sent after it, at intervals that double. A rank whose socket broke is dialled again at most
every half second, since it may be a restarted one.

An answer that comes too late is undone: a late lookup's lease is released, a late reservation aborted; nobody has
begun to write there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvtool.errors import ProtocolError, Refused, Unavailable
from kvtool.kv.layout import KVLayout
from kvtool.pool import wire
from kvtool.pool.handshake import Knock, Seal, Session, shake
from kvtool.pool.lane import Lane
from kvtool.pool.line import RankDown, RankSlow
from kvtool.pool.reach import LOOPBACK, reach
from kvtool.pool.requests import PROBES_S, Requests
from kvtool.pool.state import RankState
from kvtool.pool.wire import Op, Status

_T = TypeVar("_T")
RETRY_S = 0.5
LOOK_S = 0.01
DIAL_S = 0.1
"""A thread that comes while another one dials waits for that; after so long the rank counts as one that is down."""
_READ_SIZE = 256 * 1024


class Link(Requests):
    """One connection to a rank, made when first used. Thread-safe. Deadlines are points on `now_s`'s clock, which for
    a real socket must run as time.monotonic() does."""

    def __init__(
        self,
        state: RankState,
        key: bytes,
        layout: KVLayout,
        name: str,
        ucx: bool,
        on_epoch: Callable[[int], None],
        now_s: Callable[[], float] = time.monotonic,
        tenant: str = "",
    ) -> None:
        super().__init__(now_s, on_epoch)
        self.state, self.ucx = state, ucx
        self._key, self._layout, self._name, self._tenant = key, layout, name, tenant
        self._local = state.host == socket.gethostname() and os.access(state.unix, os.R_OK | os.W_OK)
        self._sock: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._arrived = threading.Condition(self._lock)
        self._sending = threading.Lock()
        self._dialling = threading.Lock()
        self._splitter = wire.Splitter()
        self._seal: Seal | None = None  # of what we send; under `_sending`
        self._session: Session | None = None
        self._owner = 0
        self._reading = False
        self._writers = 0  # threads that write into the rank's memory under a reservation of this socket
        self._doomed: list[socket.socket] = []  # to be closed when they are done
        self.losses = 0
        """How often a connection ended."""
        self._dialled_s = -RETRY_S
        self._looked_s = -1e9
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether a call is worth a try now: costs no wait."""
        if self._closed:
            return False
        now_s = self._now_s()
        if self._sock is not None and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s  # those who read its memory and send nothing would not notice its end
            self.look()
        if self._sock is None:
            since_s = now_s - self._dialled_s
            return since_s >= RETRY_S or (since_s < DIAL_S and self._dialling.locked())
        self._consider()
        return self._sock is not None and self._open_since_s is None

    @property
    def connected(self) -> bool:
        return self._sock is not None

    def start(self, op: Op, body: bytes, deadline_s: float, undo: int = 0) -> int:
        """Send a request; its number, for `finish`. `undo`: the number of the read that a late answer would lease.

        Raises:
            RankDown, RankSlow: it cannot be asked now.
        """
        sock = self._connected(deadline_s)
        self._consider()
        if self._open_since_s is not None:
            raise RankSlow(f"rank {self.state.rank} let a request time out and has not answered since")
        number = next(self._numbers)
        with self._lock:
            self._asked[number] = (op, undo)
        try:
            self._send(sock, op, number, body, deadline_s)
        except BaseException:
            with self._lock:
                self._asked.pop(number, None)
            raise
        return number

    def tell(self, op: Op, body: bytes) -> None:
        """Send what needs no answer; lost with the connection, as is what it is about."""
        try:
            self.say(op, body, self._now_s() + 0.1)
        except Unavailable:
            pass

    def say(self, op: Op, body: bytes, deadline_s: float) -> None:
        """Send what has no answer.

        Raises:
            RankDown, RankSlow: it did not go out.
        """
        sock = self._sock
        if sock is None:
            raise RankDown(f"rank {self.state.rank} closed the connection")
        self._send(sock, op, 0, body, deadline_s)

    def wait(self, number: int, until_s: float) -> bool:
        """Wait for the answer to a request, or for the link to break: whether `finish` would return or raise at once.
        Nothing is given up."""
        looked = False
        while True:
            with self._lock:
                if number in self._replies or number not in self._asked:
                    return True
                left_s = until_s - self._now_s()
                if left_s <= 0 and (looked or self._reading):
                    return False
                if self._reading:
                    self._arrived.wait(left_s)
                    continue
                self._reading, sock, splitter = True, self._sock, self._splitter
                looked = left_s <= 0  # another rank took all the time; this one's answer may be here already
            try:
                self._read(sock, splitter, left_s)
            finally:
                with self._lock:
                    self._reading = False
                    self._arrived.notify_all()

    def finish(self, number: int, deadline_s: float) -> bytes:
        """The answer to a request.

        Raises:
            RankDown, RankSlow: none came; a late one will be undone.
            Refused: the rank's own sentence.
        """
        self.wait(number, deadline_s)
        with self._lock:
            reply = self._replies.pop(number, None)
            self._kinds.pop(number, None)
            if reply is None:
                if number in self._asked:
                    self._give_up(number)
                    self._trip()
                    raise RankSlow(f"rank {self.state.rank} gave no answer in time")
                raise RankDown(f"rank {self.state.rank} closed the connection")
        if reply.status is not Status.OK:
            raise Refused(reply.body.decode(errors="replace"))
        return reply.body

    def connect(self, deadline_s: float) -> None:
        """Make the connection now.

        Raises:
            RankDown, RankSlow: it cannot be made.
        """
        self._connected(deadline_s)

    def call(self, op: Op, body: bytes, deadline_s: float) -> bytes:
        return self.finish(self.start(op, body, deadline_s), deadline_s)

    def lane(self, deadline_s: float) -> Lane:
        """A new data connection of this client, for one transfer at a time.

        Raises:
            RankDown, RankSlow: it cannot be made. Refused: the rank's own sentence.
        """
        self._connected(deadline_s)
        with self._lock:
            session, owner = self._session, self._owner
        if session is None:
            raise RankDown(f"rank {self.state.rank} closed the connection")
        seal = not self._local and self.state.tcp[0] not in LOOPBACK
        claims = {"data": owner, "seal": seal}
        knock = Knock(session.data, claims, self.state.identity, self.state.incarnation)
        sock, (said, its, _) = self._reach(deadline_s, lambda sock: shake(sock, knock, deadline_s), bulk=True)
        return Lane(sock, said["you"], self._now_s, its if seal else None)

    def begin_writing(self) -> bool:
        """Before bytes are written under a reservation of this link; False when it is lost already."""
        with self._lock:
            if self._sock is None:
                return False
            self._writers += 1
            return True

    def end_writing(self) -> None:
        """The rank frees what we reserved when the socket closes, so that must not happen while we write."""
        with self._lock:
            self._writers -= 1
            doomed: list[socket.socket] = []
            if not self._writers:
                doomed, self._doomed = self._doomed, []
        for sock in doomed:
            sock.close()

    def close(self) -> None:
        self._closed = True
        self._lost(self._sock)

    def abandon(self) -> None:
        """In a child process: the connection is the parent's. Takes no lock: who held one is not here."""
        self._closed = True
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()  # and no shutdown, which the parent would notice

    # Connecting

    def _connected(self, deadline_s: float) -> socket.socket:
        sock = self._sock
        if sock is not None:
            return sock
        if not self._dialling.acquire(timeout=max(0.0, deadline_s - self._now_s())):
            raise RankSlow(f"rank {self.state.rank} is being dialled and does not answer")
        try:
            if self._sock is not None:
                return self._sock
            if self._closed or self._now_s() - self._dialled_s < RETRY_S:
                raise RankDown(f"rank {self.state.rank} could not be reached a moment ago")
            self._dialled_s = self._now_s()
            return self._dial(deadline_s)
        finally:
            self._dialling.release()

    def _dial(self, deadline_s: float) -> socket.socket:
        sock, (welcome, session) = self._reach(deadline_s, lambda sock: self._shake_hands(sock, deadline_s))
        sock.setblocking(False)
        splitter, seal = wire.Splitter(), None
        if not self._local:
            seal, splitter.seal = Seal(session.up), Seal(session.down)
        with self._sending, self._lock:
            self._sock, self._splitter, self._seal, self._open_since_s = sock, splitter, seal, None
            self._session, self._owner = session, welcome["you"]
            self._doubt_s = None
            self.heard_s = self._now_s()
        return sock

    def _reach(
        self, deadline_s: float, shake_hands: Callable[[socket.socket], _T], bulk: bool = False
    ) -> tuple[socket.socket, _T]:
        return reach(self.state, self._local, deadline_s - self._now_s(), shake_hands, bulk)

    def _shake_hands(self, sock: socket.socket, deadline_s: float) -> tuple[dict[str, Any], Session]:
        claims = {
            "fingerprint": self._layout.fingerprint,
            "layout": str(self._layout),
            "name": f"{self._name} pid {os.getpid()}",
            "ucx": self.ucx,
            **({"tenant": self._tenant} if self._tenant else {}),
            "host": socket.gethostname(),
        }
        knock = Knock(self._key, claims, self.state.identity, self.state.incarnation)
        welcome, session, epoch = shake(sock, knock, deadline_s)
        self._on_epoch(epoch)
        return welcome, session

    # Sending and receiving

    def _send(self, sock: socket.socket, op: Op, number: int, body: bytes, deadline_s: float) -> None:
        """One frame, whole; waits for the threads before us, and for room, until the deadline."""
        if not self._sending.acquire(timeout=max(0.0, deadline_s - self._now_s())):
            raise RankSlow(f"rank {self.state.rank} takes no requests: others wait to be sent before this one")
        try:
            if sock is not self._sock:
                raise RankDown(f"rank {self.state.rank} closed the connection")
            data = wire.frame(op, number, 0, body, seal=self._seal)  # seals count frames in the order of sending
            view = memoryview(data)
            while view:
                try:
                    view = view[sock.send(view) :]
                except BlockingIOError:
                    if not _wait(sock, select.POLLOUT, deadline_s - self._now_s()):
                        if len(view) < len(data):
                            self._lost(sock)  # half a frame: the stream is of no use any more
                        else:
                            self._open()
                            if self._seal is not None:
                                self._seal.unsent()
                        raise RankSlow(f"rank {self.state.rank} takes no requests") from None
                except OSError:
                    self._lost(sock)
                    raise RankDown(f"rank {self.state.rank} closed the connection") from None
        finally:
            self._sending.release()

    def _read(self, sock: socket.socket | None, splitter: wire.Splitter, wait_s: float) -> None:
        """Take in what there is, after waiting for it for `wait_s` at most. One thread at a time; `splitter` is that
        of `sock`, which another thread may have replaced since."""
        if sock is None:
            return
        try:
            if wait_s > 0 and not _wait(sock, select.POLLIN, wait_s):
                return
            data = sock.recv(_READ_SIZE)
            if data:
                self._take(splitter.feed(data))
            else:
                self._lost(sock)
        except BlockingIOError:
            return
        except (OSError, ProtocolError, ValueError):
            self._lost(sock)

    def _consider(self) -> None:
        """Whether the breaker should open by now, or may close; a probe if one is due. Costs no wait."""
        if self._open_since_s is None and not self._doubtful():
            return
        self.look()
        if self._doubtful():
            self._open()
        now_s = self._now_s()
        with self._lock:
            sock = self._sock
            if sock is None or self._open_since_s is None or now_s < self._probe_at_s:
                return
            self._probe_every_s = min(2 * self._probe_every_s, PROBES_S[1])
            self._probe_at_s = now_s + self._probe_every_s
            number = next(self._numbers)
            self._given_up[number] = (Op.PING, 0)
        try:
            self._send(sock, Op.PING, number, b"", now_s)
        except Unavailable:
            pass

    def look(self) -> None:
        """Take in what came since, without waiting."""
        with self._lock:
            if self._reading or self._sock is None:
                return
            self._reading, sock, splitter = True, self._sock, self._splitter
        try:
            self._read(sock, splitter, 0.0)
        finally:
            with self._lock:
                self._reading = False
                self._arrived.notify_all()

    def _lost(self, sock: socket.socket | None) -> None:
        with self._lock:
            if sock is None or self._sock is not sock:
                return
            self._sock = None
            self.losses += 1
            self._asked.clear()
            self._given_up.clear()
            self._open_since_s = self._doubt_s = None
            if self._writers:
                self._doomed.append(sock)
            else:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it, which close does not
                sock.close()
            self._arrived.notify_all()


def _wait(sock: socket.socket, events: int, wait_s: float) -> bool:
    if wait_s <= 0:
        return False
    poll = select.poll()
    poll.register(sock, events)
    return bool(poll.poll(max(1, int(wait_s * 1000))))
