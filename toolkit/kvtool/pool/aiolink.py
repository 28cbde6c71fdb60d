"""A link to one rank whose answers an event loop waits for.

The same requests, breaker and undoing as `Link`, which this is: only the waiting is other. The loop watches the socket
and says when it can be read, or written to again; nobody blocks on it. What a loop's own thread does needs no lock, and
takes Link's, which are free.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

from kvtool.errors import Unavailable
from kvtool.pool import wire
from kvtool.pool.line import RankDown, RankSlow
from kvtool.pool.link import Link
from kvtool.pool.wire import Op

UNSENT_MAX = 4 * 2**20


class AioLink(Link):
    """`connect` (in any thread), then `watch` (on the loop); from there on only `tell` and `say` in other threads."""

    _loop: asyncio.AbstractEventLoop | None = None
    _thread = 0
    _watched: socket.socket | None = None

    @property
    def connecting(self) -> asyncio.Lock:
        """Held by the task that makes the connection."""
        if not hasattr(self, "_connecting"):
            self._connecting = asyncio.Lock()
        return self._connecting

    @property
    def watched(self) -> bool:
        return self._watched is not None and self._watched is self._sock

    def watch(self) -> None:
        """Have the running loop read what comes."""
        sock = self._sock
        if sock is None or sock is self._watched:
            return
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._unsent: deque[memoryview] = deque()
        self._watched = sock
        self._loop.add_reader(sock, self._readable, sock)

    def answered(self, number: int) -> asyncio.Future[None]:
        """Done when the answer to a request is here, or will not come."""
        assert self._loop is not None
        future = self._answers.get(number)
        if future is None:
            future = self._loop.create_future()
            if number in self._asked:
                self._answers[number] = future
            else:
                future.set_result(None)
        return future

    def tell(self, op: Op, body: bytes) -> None:
        if self._loop is not None and threading.get_ident() != self._thread:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(super().tell, op, body)
            return
        super().tell(op, body)

    def wait(self, number: int, until_s: float) -> bool:
        found = super().wait(number, 0.0)
        self._wake()  # what was read may have been for others
        return found

    def forget(self, number: int, deadline_s: float) -> None:
        super().forget(number, deadline_s)
        if self._loop is not None:
            self._wake()

    def look(self) -> None:
        if self._watched is not None and threading.get_ident() == self._thread:
            super().look()
            self._wake()

    def _readable(self, sock: socket.socket) -> None:
        if sock is self._sock:
            self.look()

    def _wake(self) -> None:
        for number in [number for number in self._answers if number not in self._asked]:
            future = self._answers.pop(number)
            if not future.done():
                future.set_result(None)

    def _connected(self, deadline_s: float) -> socket.socket:
        if self._sock is None and threading.get_ident() == self._thread:
            raise RankDown(f"rank {self.state.rank} closed the connection")
        return super()._connected(deadline_s)

    def _send(self, sock: socket.socket, op: Op, number: int, body: bytes, deadline_s: float) -> None:
        """Whole or in the loop's hands when this returns. On the loop it never waits; a thread waits for the loop."""
        if threading.get_ident() != self._thread:
            self._on_loop(lambda: self._send(sock, op, number, body, deadline_s), deadline_s)
            return
        if sock is not self._sock or not self.watched:
            raise RankDown(f"rank {self.state.rank} closed the connection")
        if sum(map(len, self._unsent)) > UNSENT_MAX:
            self._open()
            raise RankSlow(f"rank {self.state.rank} takes no requests")
        data = memoryview(wire.frame(op, number, 0, body, seal=self._seal))
        self._unsent.append(data)
        if len(self._unsent) == 1:
            self._flush(sock)

    def _on_loop(self, call: Callable[[], None], deadline_s: float) -> None:
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            try:
                call()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        if self._loop is None or self._loop.is_closed():
            raise RankDown(f"rank {self.state.rank} closed the connection")
        self._loop.call_soon_threadsafe(run)
        try:
            done.result(max(0.0, deadline_s - self._now_s()))
        except concurrent.futures.TimeoutError:
            raise RankSlow(f"rank {self.state.rank} takes no requests: the event loop is busy") from None

    def _flush(self, sock: socket.socket) -> None:
        assert self._loop is not None
        while self._unsent:
            try:
                sent = sock.send(self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(sock, self._writable, sock)
                return
            except OSError:
                self._lost(sock)
                raise RankDown(f"rank {self.state.rank} closed the connection") from None
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()
        self._loop.remove_writer(sock)

    def _writable(self, sock: socket.socket) -> None:
        with contextlib.suppress(Unavailable):  # whoever waits for an answer is told
            self._flush(sock)

    def _lost(self, sock: socket.socket | None) -> None:
        if sock is not None and sock is self._watched and self._loop is not None:
            self._watched = None
            self._unsent.clear()
            if not self._loop.is_closed():
                self._loop.remove_reader(sock)
                self._loop.remove_writer(sock)
        super()._lost(sock)
        if self._loop is not None:
            self._wake()
