"""Ports: chosen free ones, and who holds one that was asked for."""

from __future__ import annotations

import contextlib
import errno
import socket
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import Unavailable

_LISTEN = "0A"


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int
    metrics: int


def choose(host: str, http: int = 0, grpc: int = 0, metrics: int = 0) -> Ports:
    """Each port as given, and a free one for each 0.

    Free means free now: another process may take it before the server binds, and the server's start says so then.

    Raises:
        Unavailable: a given port is taken; names it, and its holder where /proc says.
    """
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(_bind(host, port)) for port in (http, grpc, metrics)]
        return Ports(*(sock.getsockname()[1] for sock in taken))


def _bind(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(1)  # a reusable address binds beside another binder, but not beside a listener
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"port {port} on {host} is in use{_by(port)}; give another port, or 0 to have one chosen"
            ) from None
        raise Unavailable(f"port {port} on {host} cannot be used: {error.strerror}") from None
    return sock


def _by(port: int) -> str:
    found = holder(port)
    return f" by process {found[0]} ({found[1]})" if found else ""


def holder(port: int) -> tuple[int, str] | None:
    """(pid, name) of the process that listens on `port`; None when it cannot be told (another user's, gone)."""
    inodes = _listening(port)
    if not inodes:
        return None
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if any(_inode(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                return int(process.name), (process / "comm").read_text().strip()
    return None


def _inode(descriptor: Path) -> str:
    try:
        target = str(descriptor.readlink())
    except OSError:
        return ""
    return target.removeprefix("socket:[").removesuffix("]") if target.startswith("socket:[") else ""


def _listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on `port`, from the kernel's tables."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    return inodes
