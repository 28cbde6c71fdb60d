"""One rank's event loop: sockets, timers and events from other threads, in one thread.

Everything a rank decides happens here, so nothing is locked; whatever blocks (file I/O, checks of promoted blocks)
runs in other threads and comes back through `post`. Idle, it wakes a few times a second and costs next to nothing.
A peer that does not read its answers, or speaks nonsense, loses its connection. So does one that is not through with
the handshake in time, counted from when it connected; of those there are only so many, and the oldest makes room.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.errors import ProtocolError
from kvtool.kv.copying import Why
from kvtool.pool.handshake import HELLO_MAX_S, HELLO_SIZE_MAX, Door, Seal, Session
from kvtool.pool.wire import FRAME_MAX, Message, Op, Splitter, Status, frame

if TYPE_CHECKING:
    from kvtool.pool.tenants import Tenant

log = logging.getLogger("kvtool.pool")

UNSENT_MAX = 16 * 2**20
UNADMITTED_MAX = 64
"""Connections that have not shaken hands yet."""
_FILES_SPARE = 64
"""Descriptors that connections leave to everything else."""
PASS_S = 0.001
_READ_SIZE = 256 * 1024
_UNIX_PATH_MAX = 100


class Connection:
    """One peer of this rank: a client, or another rank. `owner` names it in the rules."""

    def __init__(self, loop: Loop, sock: socket.socket, owner: int) -> None:
        self.loop, self.sock, self.owner = loop, sock, owner
        self.name = f"client {owner}"
        self.admitted = False
        self.peer_rank: int | None = None
        self.ucx = False
        self.host = ""
        """Where the peer runs, if it says so."""
        self.copies_for: tuple[int, Why] | None = None
        """What it puts are copies of this rank's, for this reason."""
        self.door: Door | None = None
        self.tenant: Tenant | None = None
        """Whose client it is; None: the pool's own operator's."""
        self.session: Session | None = None
        self.closed = self.draining = False
        self.opened_s = self.heard_s = time.monotonic()
        self._splitter = Splitter(HELLO_SIZE_MAX)
        self._seal: Seal | None = None
        self._unsent: deque[memoryview] = deque()
        self._unsent_size = 0

    @property
    def party(self) -> str:
        """Who it is, for the audit log."""
        return f"tenant {self.tenant.name}" if self.tenant is not None else self.name

    @property
    def peer(self) -> str:
        """Where it comes from, for the audit log."""
        if self.sock.family == socket.AF_UNIX:
            return "this host"
        try:
            return str(self.sock.getpeername()[0])
        except OSError:
            return "gone"

    def send(self, op: Op, request: int, body: bytes = b"", status: Status = Status.OK) -> None:
        if self.closed or self.draining:
            return
        data = memoryview(frame(op, request, self.loop.epoch(), body, status, self._seal))
        if not self._unsent:
            try:
                data = data[self.sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self.loop.close(self, "sending failed")
                return
        if data:
            self._unsent.append(data)
            self._unsent_size += len(data)
            self.loop.watch(self, True)
            if self._unsent_size > UNSENT_MAX:
                self.loop.refuse(self, "it does not read its answers")

    def admit(self, session: Session, client: bool = False) -> None:
        """Both sides have shown that they know the key; `client`: it was us who called. From the next frame on."""
        self.admitted, self.session, self._splitter.limit = True, session, FRAME_MAX
        if self.sock.family != socket.AF_UNIX:
            ours, theirs = (session.up, session.down) if client else (session.down, session.up)
            self._seal, self._splitter.seal = Seal(ours), Seal(theirs)

    def refuse(self, request: int, op: Op, sentence: str) -> None:
        self.send(op, request, sentence.encode(), Status.REFUSED)

    def flush(self) -> None:
        while self._unsent:
            data = self._unsent.popleft()
            try:
                sent = self.sock.send(data)
            except BlockingIOError:
                sent = 0
            self._unsent_size -= sent
            if sent < len(data):
                self._unsent.appendleft(data[sent:])
                return
        self.loop.watch(self, False)

    def receive(self) -> list[Message] | None:
        """What came in; None when the peer is gone."""
        try:
            data = self.sock.recv(_READ_SIZE if self.admitted else HELLO_SIZE_MAX)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            return None
        self.heard_s = time.monotonic()
        if self.draining:
            return []
        messages = self._splitter.feed(data)
        if messages and not self.admitted and (len(messages) > 1 or self._splitter.unread):
            raise ProtocolError("the peer went on before it was let in")
        return messages


class Loop:
    """`on_message`, `on_open` and `on_close` are called for connections; `on_pass` with the time after a pass, at most
    once in `PASS_S`, and says how many seconds the loop may sleep."""

    def __init__(
        self,
        epoch: Callable[[], int],
        on_open: Callable[[Connection], None],
        on_message: Callable[[Connection, Message], None],
        on_close: Callable[[Connection], None],
        on_pass: Callable[[float], float],
    ) -> None:
        self.epoch = epoch
        self._on_open, self._on_message, self._on_close, self._on_pass = on_open, on_message, on_close, on_pass
        self.connections: dict[int, Connection] = {}
        self.running = True
        self.slowest_pass_s = 0.0
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._posted: deque[Callable[[], None]] = deque()
        self._owners = 0
        self._listeners: list[socket.socket] = []
        self._attended: set[socket.socket] = set()
        self._strangers: dict[int, Connection] = {}  # not admitted yet, the oldest first
        self._connections_max = max(16, os.sysconf("SC_OPEN_MAX") - _FILES_SPARE)

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run on the loop; from any thread."""
        self._posted.append(call)
        os.eventfd_write(self._wake, 1)

    def listen_unix(self, path: Path) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path.unlink(missing_ok=True)
        old = os.umask(0o177)
        try:
            with short_path(path) as name:
                sock.bind(name)
        finally:
            os.umask(old)
        self._listen(sock)

    def listen_tcp(self, host: str) -> tuple[str, int]:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        sock.bind((host, 0))
        self._listen(sock)
        return host, sock.getsockname()[1]

    def _listen(self, sock: socket.socket) -> None:
        sock.listen(256)
        sock.setblocking(False)
        self._listeners.append(sock)
        self._selector.register(sock, selectors.EVENT_READ, sock)

    def adopt(self, sock: socket.socket) -> Connection:
        """Serve a connected socket."""
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3)):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._owners += 1
        connection = Connection(self, sock, self._owners)
        self.connections[connection.owner] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def detach(self, connection: Connection) -> socket.socket:
        """The socket, for somebody else to serve; as a connection it is closed."""
        connection.closed = True
        self._selector.unregister(connection.sock)
        del self.connections[connection.owner]
        self._strangers.pop(connection.owner, None)
        return connection.sock

    def attend(self, sock: socket.socket, call: Callable[[], None], writing: bool = False) -> None:
        """Call `call` when there is something to read from `sock`, or room to write to it; sockets of others."""
        events = selectors.EVENT_WRITE if writing else selectors.EVENT_READ
        if sock in self._attended:
            self._selector.modify(sock, events, call)
        else:
            self._attended.add(sock)
            self._selector.register(sock, events, call)

    def leave(self, sock: socket.socket) -> None:
        self._attended.discard(sock)
        self._selector.unregister(sock)

    def watch(self, connection: Connection, writing: bool) -> None:
        if not connection.closed:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._selector.modify(connection.sock, events, connection)

    def refuse(self, connection: Connection, why: str) -> None:
        """Stop serving a peer that is still there. It may be writing into our memory under a reservation, so nothing
        of it is freed before it hangs up too: say so, throw away what it still sends, and wait for that."""
        if not connection.admitted:
            self.close(connection, why)
        elif not connection.draining:
            connection.draining = True
            log.warning("connection refused name=%r owner=%d why=%r", connection.name, connection.owner, why)
            try:
                connection.sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.close(connection, why)

    def close(self, connection: Connection, why: str) -> None:
        """The peer is gone."""
        if connection.closed:
            return
        connection.closed = True
        self._selector.unregister(connection.sock)
        connection.sock.close()
        del self.connections[connection.owner]
        self._strangers.pop(connection.owner, None)
        log.debug("connection closed name=%r owner=%d why=%r", connection.name, connection.owner, why)
        self._on_close(connection)

    def run(self) -> None:
        sleep_s = passed_s = 0.0
        while self.running:
            ready = self._selector.select(sleep_s)
            began_s = time.monotonic()
            for key, events in ready:
                if isinstance(key.data, Connection):
                    self._serve(key.data, events)
                elif isinstance(key.data, socket.socket):
                    self._accept(key.data)
                elif key.data is not None:
                    key.data()
                else:
                    os.eventfd_read(self._wake)
            while self._posted:
                self._posted.popleft()()
            now_s = time.monotonic()
            if now_s - passed_s < PASS_S:  # a busy rank looks at the clock's business now and then, not each message
                sleep_s = PASS_S
            else:
                passed_s = now_s
                self._turn_away(now_s)
                sleep_s = max(0.0, self._on_pass(now_s))
            if self._posted:
                sleep_s = 0.0
            self.slowest_pass_s = max(self.slowest_pass_s, time.monotonic() - began_s)

    def stop_listening(self) -> None:
        for sock in self._listeners:
            self._selector.unregister(sock)
            sock.close()
        self._listeners = []

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if len(self.connections) >= self._connections_max:
            sock.close()
            log.warning("connection refused, this rank has %d of them already", len(self.connections))
            return
        connection = self.adopt(sock)
        self._strangers[connection.owner] = connection
        if len(self._strangers) > UNADMITTED_MAX:
            self._turn_away(connection.opened_s)
        if len(self._strangers) > UNADMITTED_MAX:
            self.close(next(iter(self._strangers.values())), "others wait to introduce themselves")
        self._on_open(connection)

    def _turn_away(self, now_s: float) -> None:
        """Hang up on those who connected and did not say who they are, whatever else they said."""
        for connection in list(self._strangers.values()):
            if connection.admitted:
                del self._strangers[connection.owner]
            elif now_s - connection.opened_s > HELLO_MAX_S:
                self.close(connection, "it did not introduce itself")

    def _serve(self, connection: Connection, events: int) -> None:
        if connection.closed:
            return
        try:
            if events & selectors.EVENT_WRITE:
                connection.flush()
            if events & selectors.EVENT_READ:
                messages = connection.receive()
                if messages is None:
                    self.close(connection, "the peer left")
                    return
                for message in messages:
                    if not (connection.closed or connection.draining):
                        self._on_message(connection, message)
        except ProtocolError as error:
            connection.refuse(0, Op.HELLO, str(error))
            self.refuse(connection, str(error))
        except OSError as error:
            self.close(connection, f"its socket failed: {error}")


class short_path:
    """A name for the socket at `path` that fits into sockaddr_un, valid inside the `with`."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, -1

    def __enter__(self) -> str:
        if len(os.fsencode(self._path)) <= _UNIX_PATH_MAX:
            return str(self._path)
        self._fd = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._fd}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
