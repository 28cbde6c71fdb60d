"""Dialling: links from one rank to another, made beside the event loop.

A peer that accepts and then says nothing would hold up everybody whom the loop serves, for as long as one cares to
wait for it. So each try runs in a short-lived thread of its own, a few at a time, and is posted back when it ended.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import KvtoolError, Unavailable
from kvtool.pool.handshake import Knock, Session, shake
from kvtool.pool.loop import short_path
from kvtool.pool.state import RankState

TIMEOUT_S = 5.0
AT_ONCE_MAX = 8


@dataclass(frozen=True)
class Dialled:
    """A connected socket, the callee's from here on; `session` when both sides have shaken hands on it."""

    sock: socket.socket
    session: Session | None


Ended = Callable[["Dialled | None", "Exception | None"], None]
"""What came of a try, or why nothing did."""


class Dialler:
    """`post` has a call run where the rules live; `hello` gives what this rank says of itself, besides the proof. Whom
    it reaches is whoever has the peer's identity now: an incarnation that is not known here yet is welcome."""

    def __init__(
        self, post: Callable[[Callable[[], None]], None], key: bytes, hello: Callable[[], dict[str, object]]
    ) -> None:
        self._post, self._key, self._hello = post, key, hello
        self._running = 0

    def dial(self, peer: RankState, local: bool, introduce: bool, ended: Ended) -> bool:
        """Begin a try, by its Unix socket if `local`; False when too many run already. `introduce`: shake hands as
        well; else only find out whether anybody listens there."""
        if self._running >= AT_ONCE_MAX:
            return False
        self._running += 1
        threading.Thread(
            target=self._try, args=(peer, local, introduce, ended), name="kvtool-dial", daemon=True
        ).start()
        return True

    def _try(self, peer: RankState, local: bool, introduce: bool, ended: Ended) -> None:
        dialled: Dialled | None = None
        error: Exception | None = None
        try:
            dialled = self._connect(peer, local, introduce)
        except (OSError, KvtoolError) as why:
            error = why

        def back() -> None:
            self._running -= 1
            ended(dialled, error)

        self._post(back)

    def _connect(self, peer: RankState, local: bool, introduce: bool) -> Dialled:
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
            session = None
            if introduce:
                try:
                    _, session, _ = shake(sock, Knock(self._key, self._hello(), peer.identity), deadline_s)
                except OSError as error:  # its host answers, so it is not out of reach
                    raise Unavailable(f"it takes the call and does not shake hands: {error}") from None
        except BaseException:
            sock.close()
            raise
        return Dialled(sock, session)
