"""KV from a context server to a generation server, over a Unix socket that `opaque_state` names.

The context side keeps a request's bytes until they are pulled or its time is over; the generation side refuses a
partner of another layout, block size, dtype or backend, which the real ones would meet as wrong bytes or a hang.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


class Offers:
    """What this server has computed for others, by context request id."""

    def __init__(self, facts: dict[str, Any], term_s: float) -> None:
        self.facts, self.term_s = facts, term_s
        self._held: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._dir = tempfile.mkdtemp(prefix="fake-kv-")
        self.path = f"{self._dir}/kv"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def offer(self, request_id: int, raw: bytes) -> bytes:
        """Keep `raw`; returns the opaque state that finds it."""
        ticket = f"{request_id}-{secrets.token_hex(8)}"
        now_s = time.monotonic()
        with self._lock:
            self._held = {name: item for name, item in self._held.items() if item[1] > now_s}
            self._held[ticket] = raw, now_s + self.term_s
        return json.dumps({"socket": self.path, "ticket": ticket, **self.facts}).encode()

    @property
    def waiting(self) -> int:
        return len(self._held)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                with caller, contextlib.suppress(OSError):
                    caller.settimeout(10)
                    ticket = caller.recv(256).decode()
                    with self._lock:
                        raw, until_s = self._held.pop(ticket, (b"", 0.0))
                    late = time.monotonic() > until_s
                    caller.sendall(struct.pack("<Q", 0 if late else len(raw)) + (b"" if late else raw))

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            Path(self.path).unlink()
            Path(self._dir).rmdir()


def pull(opaque: bytes, facts: dict[str, Any], timeout_s: float) -> bytes:
    """The bytes behind `opaque`. Raises RuntimeError with what differs, or where nothing is to be had."""
    try:
        said = json.loads(opaque)
        path, ticket = said.pop("socket"), said.pop("ticket")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise RuntimeError("opaque_state is not what a context server gave") from None
    for name, own in facts.items():
        if said.get(name) != own:
            raise RuntimeError(f"KV transfer: the context server's {name} is {said.get(name)!r}, ours is {own!r}")
    try:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(timeout_s)
            caller.connect(path)
            caller.sendall(ticket.encode())
            size = struct.unpack("<Q", _exactly(caller, 8))[0]
            if not size:
                raise RuntimeError(f"KV transfer: the context server holds nothing for {ticket} any more")
            return _exactly(caller, size)
    except OSError as error:
        raise RuntimeError(f"KV transfer failed: {error}") from None


def _exactly(caller: socket.socket, size: int) -> bytes:
    out = bytearray()
    while len(out) < size:
        part = caller.recv(min(size - len(out), 1 << 20))
        if not part:
            raise OSError("the context server closed the connection")
        out += part
    return bytes(out)
