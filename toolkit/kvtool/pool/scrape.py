"""`/metrics` of one rank: an HTTP server of one page, on the rank's event loop.

No thread and no library: a request line is read, one answer sent, the connection closed. Loopback only, like the rank;
what it shows are counts, never keys or blocks. A peer that dawdles, sends much or connects often is hung up on.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from kvtool.pool.loop import Loop

log = logging.getLogger("kvtool.pool")

OPEN_MAX = 16
REQUEST_MAX = 8192
TERM_S = 5.0


class _Visit:
    """One connection."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self.sock, self.until_s = sock, until_s
        self.said = b""
        self.answer = memoryview(b"")


class Scrape:
    """Serves what `page` gives, at `address`, "host:port"."""

    def __init__(self, loop: Loop, host: str, page: Callable[[], str], now_s: Callable[[], float]) -> None:
        self._loop, self._page, self._now_s = loop, page, now_s
        self._visits: dict[int, _Visit] = {}
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind((host, 0))
        self._listener.listen(OPEN_MAX)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        loop.attend(self._listener, self._accept)

    def tick(self, now_s: float) -> None:
        """Hang up on those who dawdle."""
        for visit in [visit for visit in self._visits.values() if visit.until_s <= now_s]:
            self._end(visit)

    def close(self) -> None:
        for visit in list(self._visits.values()):
            self._end(visit)
        self._loop.leave(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._visits) >= OPEN_MAX:
            sock.close()
            return
        sock.setblocking(False)
        visit = _Visit(sock, self._now_s() + TERM_S)
        self._visits[sock.fileno()] = visit
        self._loop.attend(sock, lambda: self._serve(visit))

    def _serve(self, visit: _Visit) -> None:
        try:
            if not visit.answer:
                data = visit.sock.recv(REQUEST_MAX)
                visit.said += data
                if not data or len(visit.said) > REQUEST_MAX:
                    self._end(visit)
                    return
                if b"\r\n\r\n" not in visit.said:
                    return
                visit.answer = memoryview(self._answer(visit.said))
                self._loop.attend(visit.sock, lambda: self._serve(visit), writing=True)
            visit.answer = visit.answer[visit.sock.send(visit.answer) :]
            if not visit.answer:
                self._end(visit)
        except BlockingIOError:
            return
        except OSError:
            self._end(visit)

    def _answer(self, said: bytes) -> bytes:
        method, _, rest = said.partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "only GET\n")
        if target != b"/metrics":
            return _response("404 Not Found", "the page is /metrics\n")
        return _response("200 OK", self._page(), head=method == b"HEAD")

    def _end(self, visit: _Visit) -> None:
        if self._visits.pop(visit.sock.fileno(), None) is not None:
            self._loop.leave(visit.sock)
            visit.sock.close()


def _response(status: str, text: str, head: bool = False) -> bytes:
    body = text.encode()
    lines = [
        f"HTTP/1.1 {status}",
        "Content-Type: text/plain; version=0.0.4; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head else body)
