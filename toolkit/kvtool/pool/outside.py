"""The world outside a client: what time it is, where the ranks are, and how one of them is reached.

`PoolClient` and all beneath it ask for the time, look for the pool and open links through one of these and in no other
way. `Outside` is the real one. A simulation gives its own, and the production client runs in it unchanged:

* `now_s()`: its virtual clock, on which every deadline is a point;
* `look()`: its `PoolState` whenever that changed;
* `access(rank, ...)`: an `Access` over its own `Line` (see `link`), whose `finish` is the one place where a client
  waits, and with memory of its own (override `Access.map_memory`).

Nothing else in a client sleeps or waits, but for UCX transfers, which are real or not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvtool.errors import PoolUnavailable, Refused
from kvtool.kv.layout import KVLayout
from kvtool.pool.access import STAGING_SIZE, Access, UcxDoor
from kvtool.pool.link import Link
from kvtool.pool.state import PoolState, RankState, read_state


class Outside:
    """The pool of `state_file` on this machine's clock and network."""

    staging_size = STAGING_SIZE
    """Bytes of this process through which blocks go by UCX, once one does."""

    def __init__(self, state_file: Path, layout: KVLayout, path: str, name: str) -> None:
        self.where = str(state_file)
        self._file, self._layout, self._path, self._name = state_file, layout, path, name
        self._stamp: tuple[int, int] | None = None
        self._tenant = ""

    def now_s(self) -> float:
        return time.monotonic()

    def look(self) -> PoolState | None:
        """What the state file says, when it is another than at the last look; else None.

        Raises:
            PoolUnavailable, ProtocolError, OSError: there is none, or none that can be read.
            Refused: the pool that runs there holds another KV layout; both are in the sentence.
        """
        try:
            found = self._file.stat()
        except FileNotFoundError:
            raise PoolUnavailable(f"{self.where}: no pool runs there; start one with: kvtool pool up") from None
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._stamp:
            return None
        state = read_state(self._file)
        check_layout(self.where, state, self._layout)
        self._stamp, self._tenant = stamp, state.tenant
        return state

    def forget(self) -> None:
        """Have the next `look` say what there is, changed or not."""
        self._stamp = None

    def access(self, rank: RankState, key: bytes, door: UcxDoor, on_epoch: Callable[[int], None]) -> Access:
        """A way to `rank`, not opened yet. `key` is the pool's; `on_epoch` is told the epoch of each answer."""
        ucx = Access.wants_ucx(rank, self._path)
        link = Link(rank, key, self._layout, self._name, ucx, on_epoch, self.now_s, self._tenant)
        return Access(rank, link, self._layout, self._path, door, self.now_s)


def check_layout(where: str, state: PoolState, layout: KVLayout) -> None:
    """
    Raises:
        Refused: the pool holds another KV layout.
    """
    if state.kv_layout.fingerprint != layout.fingerprint:
        raise Refused(
            f"KV layouts differ: the pool of {where} holds {state.kv_layout} (fingerprint "
            f"{state.kv_layout.fingerprint}), this client has {layout} (fingerprint {layout.fingerprint}); "
            "start the pool with the layout of the engine"
        )
