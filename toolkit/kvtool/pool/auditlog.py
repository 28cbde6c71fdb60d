"""The audit log of a rank: who came in, who was refused, what was done that concerns others. One JSON object a line.

Mode 0600. When it has grown to `size_max` bytes it is renamed to NAME.1, over the last one, so it never takes more than
twice that. It has names, addresses and reasons; no keys of any kind. A disk that is full costs lines and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("kvtool.pool")

SIZE_MAX = 8 * 2**20
EVERY_S = 1.0
"""The same kind of event of the same party is written once in so long, with a count of those left out."""
_PARTIES_MAX = 1024


class AuditLog:
    """`path` None: nothing is written. `wall_s`: seconds since the epoch."""

    def __init__(self, path: Path | None, size_max: int = SIZE_MAX, wall_s: Callable[[], float] = time.time) -> None:
        self._path, self._size_max, self._wall_s = path, size_max, wall_s
        self._fd = -1
        self._size = 0
        self._failed = False
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def write(self, event: str, party: str, **facts: str | int | float) -> None:
        """`party`: the tenant or client that it is about."""
        if self._path is None:
            return
        now_s = self._wall_s()
        last_s, left_out = self._last.get((event, party), (0.0, 0))
        if 0 <= now_s - last_s < EVERY_S:
            self._last[event, party] = last_s, left_out + 1
            return
        if len(self._last) >= _PARTIES_MAX:
            self._last.clear()
        self._last[event, party] = now_s, 0
        line = {"at": round(now_s, 3), "event": event, "party": party, **facts}
        if left_out:
            line["left_out"] = left_out
        try:
            self._append((json.dumps(line) + "\n").encode())
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("audit log not written path=%r why=%r", str(self._path), str(error))

    def _append(self, line: bytes) -> None:
        assert self._path is not None
        if self._fd >= 0 and self._size + len(line) > self._size_max:
            self.close()
            self._path.replace(f"{self._path}.1")
        if self._fd < 0:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._path, flags, 0o600)
            self._size = os.fstat(self._fd).st_size
        self._size += os.write(self._fd, line)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
