"""The state file as the ranks keep it: written by one of them, read by all, replaced whole.

Two may take turns to be the one that writes (each hears nothing of the other), so whoever writes reads first, and
whoever finds another's words there takes them in: the file says ever more, as views do.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from kvtool.errors import KvtoolError
from kvtool.kv.view import Entry
from kvtool.pool.roster import entry_of
from kvtool.pool.state import PoolState, read_state, write_state
from kvtool.pool.tenants import Tenant, write_tenant_states

log = logging.getLogger("kvtool.pool")


class Published:
    """The file at `path`, and beside it those of `tenants`."""

    tenants: Sequence[Tenant] = ()

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None

    def changed(self) -> bool:
        """Whether it is another than when it was last looked at or written. So is one that was removed, but not from a
        directory that is gone."""
        try:
            stamp = self._look()
        except FileNotFoundError:
            return self._path.parent.is_dir()
        except OSError:
            return False
        same, self._stamp = stamp == self._stamp, stamp
        return not same

    def entries(self, key: str) -> list[Entry] | None:
        """What it says of the ranks, nothing when it cannot be read; None when another pool, not that of `key`, has
        it by now."""
        try:
            state = read_state(self._path)
            return [entry_of(rank) for rank in state.ranks] if state.key == key else None
        except (KvtoolError, KeyError):
            return []

    def write(self, state: PoolState) -> None:
        try:
            write_state(self._path, state)
            write_tenant_states(self._path, state, self.tenants)
            self._stamp = self._look()
        except OSError as error:
            self._stamp = None  # looked at again, found wanting and written again
            log.warning("state file not written why=%r", str(error))

    def _look(self) -> tuple[int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ino
