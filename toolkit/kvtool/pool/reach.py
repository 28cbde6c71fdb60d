"""Making a connection to a rank: by its Unix socket on the same host, else by TCP."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtool.pool.data import tune
from kvtool.pool.line import RankDown, RankSlow
from kvtool.pool.loop import short_path
from kvtool.pool.state import RankState

_T = TypeVar("_T")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def reach(
    state: RankState, local: bool, wait_s: float, shake_hands: Callable[[socket.socket], _T], bulk: bool = False
) -> tuple[socket.socket, _T]:
    """A socket to a rank, and what `shake_hands` made of it; `bulk`: for large transfers.

    Raises:
        RankDown, RankSlow: nobody is there, or it does not answer in time.
    """
    family = socket.AF_UNIX if local else socket.AF_INET6 if ":" in state.tcp[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.01, wait_s))
        if local:
            with short_path(Path(state.unix)) as path:
                sock.connect(path)
        else:
            if bulk and state.tcp[0] in LOOPBACK:
                tune(sock)
            sock.connect(state.tcp)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, shake_hands(sock)
    except TimeoutError:
        sock.close()
        raise RankSlow(f"rank {state.rank} does not answer the handshake in time") from None
    except OSError as error:
        sock.close()
        raise RankDown(f"rank {state.rank} cannot be reached: {error.strerror or error}") from None
    except BaseException:
        sock.close()
        raise
