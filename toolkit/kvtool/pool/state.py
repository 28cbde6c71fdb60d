"""The state file: where a pool's ranks are, and what it takes to talk to them.

`run_dir/pool.json`, mode 0600, since it holds the pool's key. Always replaced whole, so a reader sees one state or
the next.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtool.errors import PoolUnavailable, ProtocolError
from kvtool.kv.layout import KVLayout
from kvtool.kv.placement import Member, Placement
from kvtool.pool.names import STATE
from kvtool.pool.process import runs as runs
from kvtool.pool.process import started_at as started_at

FILE = STATE
SCHEMA = 2


@dataclass
class RankState:
    """One rank as the pool announces it. `unix` is local to `host`; `tcp` is host and port."""

    rank: int
    identity: str
    host: str
    unix: str
    tcp: tuple[str, int]
    segment: str
    segment_size: int
    slots: int
    file_slots: int
    pid: int
    started: int
    """Start time of the process in clock ticks since boot, from /proc."""
    ucx_name: str = ""
    ucx_metadata: str = ""
    """Hex; empty when the rank has no UCX."""
    metrics: str = ""
    """Where it serves /metrics, as host:port; empty when it does not."""
    alive: bool = True
    weight: float = 1.0
    incarnation: int = 1
    """How often a process was this rank: an endpoint is an identity and an incarnation."""
    status: str = "live"
    """A `kv.view.Status` in small letters; `alive` and `weight` follow from it and from `step`."""
    step: int = 0


@dataclass
class PoolState:
    """`epoch` grows with every change of a rank's standing, and from one start of a pool to the next: its count starts
    at `base` (see `kv.view`). `ranks` ascend, and include the dead and those that left."""

    epoch: int
    key: str
    prefix: str
    layout: dict[str, Any]
    slot_size: int
    lease_term_s: float
    ranks: list[RankState] = field(default_factory=list)
    base: int = 0
    copies: int = 1
    """How many ranks hold each block at most, and may be asked for it."""
    namespaces: dict[str, int] = field(default_factory=dict)
    """How many hold the blocks of a client that names its namespace; the others have the pool's own number."""
    tenant: str = ""
    """Whose state file this is, and whose the key; empty: the operator's."""

    def placement(self) -> Placement:
        """Who owns which key: the ranks that serve, by their weights now and before they began to come or leave."""
        elder = {"joining": 0.0, "draining": 1.0}
        members = [Member(r.rank, r.identity, r.weight, elder.get(r.status)) for r in self.ranks if r.alive]
        return Placement(self.epoch, members)

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout(**self.layout)


def write_private(path: Path, text: str) -> None:
    """Replace `path` whole, mode 0600; from any thread. A failure leaves what was there, and no draft."""
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600, and nobody else's
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def write_state(path: Path, state: PoolState) -> None:
    write_private(path, json.dumps({"schema": SCHEMA, **asdict(state)}, indent=1))


def read_state(path: Path) -> PoolState:
    """The pool that `path` describes.

    Raises:
        PoolUnavailable: no such file: no pool runs there (any more).
        ProtocolError: a file of another kvtool, or not a state file.
    """
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise PoolUnavailable(f"{path}: no pool runs there; start one with: kvtool pool up") from None
    except (ValueError, OSError) as error:
        raise ProtocolError(f"{path}: cannot be read as a pool's state ({error})") from None
    found = raw.pop("schema", None) if isinstance(raw, dict) else None
    if found != SCHEMA:
        raise ProtocolError(f"{path}: state schema {found!r}, this kvtool reads {SCHEMA}; restart the pool with it")
    try:
        ranks = [RankState(**{**rank, "tcp": (rank["tcp"][0], rank["tcp"][1])}) for rank in raw.pop("ranks")]
        return PoolState(ranks=ranks, **raw)
    except (TypeError, KeyError, IndexError) as error:
        raise ProtocolError(f"{path}: not a pool's state ({error}); restart the pool") from None
