"""The address file: where the prefill and decode servers are now, and whether the pool answers.

The supervisor writes it whole (a rename), the front reads it again whenever it changed. A restarted instance keeps its
name and gets a new epoch, so the front knows a new server from the one that just failed it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import Unavailable
from kvtool.pool.state import write_private

FILE = "peers.json"


@dataclass(frozen=True)
class Peer:
    """One instance: `role` is "prefill" or "decode", `address` its gRPC host:port."""

    name: str
    role: str
    address: str
    epoch: int

    @property
    def identity(self) -> tuple[str, int]:
        return self.name, self.epoch


@dataclass(frozen=True)
class Peers:
    instances: tuple[Peer, ...] = ()
    pool_up: bool = False

    def of(self, role: str) -> list[Peer]:
        return [peer for peer in self.instances if peer.role == role]

    def write(self, path: Path) -> None:
        """Replace the file; readers see the old or the new one, never a part. Readable by the user alone."""
        write_whole(path, {"instances": [asdict(peer) for peer in self.instances], "pool_up": self.pool_up})


class PeersFile:
    """Reads the file again when its stat changed; a few microseconds when it did not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._peers = Peers()

    def read(self) -> Peers:
        """Raises Unavailable: there is no such file, or it is not one."""
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if seen != self._seen:
                raw = json.loads(self._path.read_text(encoding="utf-8"))
                instances = tuple(Peer(**peer) for peer in raw["instances"])
                self._peers, self._seen = Peers(instances, bool(raw["pool_up"])), seen
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Unavailable(f"the addresses of this deployment cannot be read from {self._path}: {error}") from None
        return self._peers


def write_whole(path: Path, value: Any) -> None:
    """Write JSON by rename, mode 0600."""
    write_private(path, json.dumps(value, indent=1, sort_keys=True))
