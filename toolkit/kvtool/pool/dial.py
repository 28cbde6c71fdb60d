"""Dialling: links from one rank to another, made beside the event loop.

A peer that accepts and then says nothing would hold up everybody whom the loop serves, for as long as one cares to
wait for it. So each try runs in a short-lived thread of its own, a few at a time, and is posted back when it ended.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtool.errors import KvtoolError, ProtocolError
from kvtool.pool import wire
from kvtool.pool.loop import short_path
from kvtool.pool.state import RankState
from kvtool.pool.wire import Message, Op

TIMEOUT_S = 5.0
AT_ONCE_MAX = 8

Ended = Callable[["socket.socket | None", "Exception | None"], None]
"""What came of a try: a connected socket, which is the callee's from here on, or why there is none."""


class Dialler:
    """`post` has a call run where the rules live; `hello` is what this rank says of itself, besides the proof."""

    def __init__(self, post: Callable[[Callable[[], None]], None], key: bytes, hello: dict[str, object]) -> None:
        self._post, self._key, self._hello = post, key, hello
        self._running = 0

    def dial(self, peer: RankState, local: bool, introduce: bool, ended: Ended) -> bool:
        """Begin a try, by its Unix socket if `local`; False when too many run already. `introduce`: send HELLO as soon
        as it greets; else only find out whether anybody listens there."""
        if self._running >= AT_ONCE_MAX:
            return False
        self._running += 1
        threading.Thread(
            target=self._try, args=(peer, local, introduce, ended), name="kvtool-dial", daemon=True
        ).start()
        return True

    def _try(self, peer: RankState, local: bool, introduce: bool, ended: Ended) -> None:
        sock: socket.socket | None = None
        error: Exception | None = None
        try:
            sock = self._connect(peer, local, introduce)
        except (OSError, KvtoolError) as why:
            error = why

        def back() -> None:
            self._running -= 1
            ended(sock, error)

        self._post(back)

    def _connect(self, peer: RankState, local: bool, introduce: bool) -> socket.socket:
        deadline_s = time.monotonic() + TIMEOUT_S
        family = socket.AF_UNIX if local else socket.AF_INET6 if ":" in peer.tcp[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(TIMEOUT_S)
            if local:
                with short_path(Path(peer.unix)) as name:
                    sock.connect(name)
            else:
                sock.connect(peer.tcp)
            if introduce:
                nonce = wire.unpack_nonce(_greeting(sock, deadline_s).body)
                hello = {**self._hello, "proof": wire.proof(self._key, nonce)}
                sock.sendall(wire.frame(Op.HELLO, 1, 0, wire.pack_map(hello)))
        except BaseException:
            sock.close()
            raise
        return sock


def _greeting(sock: socket.socket, deadline_s: float) -> Message:
    """What a listening rank says as soon as its loop runs."""
    splitter = wire.Splitter()
    while True:
        sock.settimeout(max(0.01, deadline_s - time.monotonic()))
        data = sock.recv(4096)
        if not data:
            raise ProtocolError("it closed the link before greeting")
        messages = splitter.feed(data)
        if messages:
            return messages[0]
