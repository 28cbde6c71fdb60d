"""Settings of a pool: what `kvtool pool up` takes, and what it hands to the ranks."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvtool.errors import SpecRefused
from kvtool.kv.layout import KVLayout
from kvtool.kv.policy import AUTO, CHOICES
from kvtool.kv.retention import COPIES_MAX
from kvtool.pool.directory import slots_under
from kvtool.pool.embedded import file_slots_in
from kvtool.pool.filetier import WRITE, check_name
from kvtool.units import show_size

RANKS_MAX = 1024


@dataclass(frozen=True)
class PoolConfig:
    """A pool to start. Sizes in bytes, for each rank; times in seconds.

    `host`: where ranks listen on TCP. Anything but loopback wants a `key_file`; see `pool.handshake` for what the key
    protects there: who is let in, and every request and answer, but not the bytes of blocks.
    `reserve_term_s`: how long a writer may take between reserving a slot and committing it.
    """

    layout: KVLayout
    ranks: int = 2
    dram_size: int = 256 * 2**20
    file_size: int = 2**30
    file_dir: Path | None = None
    """None: the run directory."""
    remote: str = ""
    """Store below the files: a directory on a shared file system, or the URL of an object store, such as s3://BUCKET."""
    remote_size: int = 0
    """Bytes of it for each rank; a hard cap."""
    file_key: Path | None = None
    """File of mode 0600 with the key that block files are encrypted with; None: they are not."""
    write: str = "back"
    """When a block goes to its file. "back": when its memory is wanted, or the pool stops. "through": before its put is
    answered, which then says that it is durable."""
    evict: str = AUTO
    """The policy by which blocks leave memory and files; auto changes it by what shadows of each would have hit."""
    flush_s: float = 3.0
    """How long a stopping rank may write to its file what only its memory holds."""
    scrub_rate: float = 4 * 2.0**20
    """Bytes a second of its file that an idle rank reads and checks; 0 for none."""
    lease_term_s: float = 10.0
    reserve_term_s: float = 10.0
    copies: int = 1
    """How many ranks hold a block whose put does not say. The first of them answers the put; the others follow."""
    namespaces: dict[str, int] = field(default_factory=dict)
    """The same for blocks of clients that name their namespace."""
    copy_rate: float = 2.0**30
    """Bytes a second that a rank may spend on copies to others."""
    metrics: bool = True
    """Whether each rank serves /metrics on a loopback port, named in the state file."""
    key_file: Path | None = None
    """File of mode 0600 with the pool's key; None: a new key for every start."""
    tenants: Path | None = None
    """Who else may use the pool (see `pool.tenants`); wants a `key_file`, from which their pads come."""
    ucx: bool | None = None
    """Whether those who cannot map the segment may read by UCX; None: if NIXL is installed."""
    host: str = "127.0.0.1"
    name: str = "pool"
    start_timeout_s: float = 60.0
    lost_s: float = 10.0
    """How long another host may be out of reach before the keys of its ranks get owners on this side."""
    heal: bool = True
    """Leave a keeper behind, which starts ranks again that died."""
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= RANKS_MAX:
            raise SpecRefused(f"pool.ranks: wanted 1 to {RANKS_MAX}, found {self.ranks}")
        file_slots = file_slots_in(self.file_size, self.layout.block_size)
        if slots_under(self.dram_size, self.layout.block_size, file_slots) < 1:
            raise SpecRefused(
                f"pool.dram_size: {show_size(self.dram_size)} has no room for one block of "
                f"{show_size(self.layout.block_size)} ({self.layout}); raise it"
            )
        if self.file_size and not file_slots:
            raise SpecRefused(
                f"pool.file_size: {show_size(self.file_size)} has no room for one block of "
                f"{show_size(self.layout.block_size)}; raise it, or switch files off with 0"
            )
        for setting, copies in (("copies", self.copies), *((f"namespaces.{n}", c) for n, c in self.namespaces.items())):
            if not 1 <= copies <= COPIES_MAX:
                raise SpecRefused(f"pool.{setting}: wanted 1 to {COPIES_MAX} copies, found {copies}")
        if self.copy_rate <= 0:
            raise SpecRefused(f"pool.copy_rate: wanted more than 0 bytes/s, found {self.copy_rate}")
        check_name(self.name)
        if self.remote and not (self.remote_size and self.file_size):
            raise SpecRefused(
                f"pool.remote: wanted sizes for {self.remote} and for the files above it, found pool.remote_size "
                f"{self.remote_size} and pool.file_size {self.file_size}; raise them, or leave pool.remote out"
            )
        if self.write not in WRITE:
            raise SpecRefused(f"pool.write: wanted {' or '.join(WRITE)}, found {self.write}")
        if self.write == "through" and not self.file_size:
            raise SpecRefused("pool.write: through needs files, found pool.file_size 0; raise it, or write back")
        if self.evict not in CHOICES:
            raise SpecRefused(f"pool.evict: wanted one of {', '.join(CHOICES)}, found {self.evict}")
        if self.flush_s < 0:
            raise SpecRefused(f"pool.flush_s: wanted 0 s or more, found {self.flush_s}")
        if not 0 <= self.scrub_rate < float("inf"):
            raise SpecRefused(f"pool.scrub_rate: wanted 0 bytes/s or more, found {self.scrub_rate}")
        for setting in ("lease_term_s", "reserve_term_s", "start_timeout_s", "lost_s"):
            if getattr(self, setting) <= 0:
                raise SpecRefused(f"pool.{setting}: wanted more than 0 s, found {getattr(self, setting)}")
        if self.tenants is not None and self.key_file is None:
            raise SpecRefused(
                "pool.tenants: wanted pool.key_file beside it, found none: what keeps tenants apart is derived from "
                "the pool's key, and must outlive the pool as its files do"
            )
        self._check_host()

    def _check_host(self) -> None:
        if self.host == "localhost":
            return
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise SpecRefused(f"pool.host: wanted an IP address of this host, found {self.host!r:.80}") from None
        if address.is_unspecified or address.is_multicast:
            raise SpecRefused(
                f"pool.host: wanted the address that clients and other ranks connect to, found {self.host}; name it"
            )
        if not address.is_loopback and self.key_file is None:
            raise SpecRefused(
                f"pool.host: {self.host} can be reached from other hosts, so pool.key_file is wanted beside it, found "
                "none; clients there need the same key, in a file of mode 0600"
            )


@dataclass(frozen=True)
class RankConfig:
    """What every rank is told, in a file of mode 0600: it holds the pool's key."""

    run_dir: str
    state_file: str
    file_dir: str
    prefix: str
    name: str
    key: str
    base: int
    """Where the count of epochs starts."""
    layout: dict[str, Any]
    dram_size: int
    file_size: int
    remote: str
    remote_size: int
    file_key: str
    write: str
    evict: str
    flush_s: float
    scrub_rate: float
    lease_term_s: float
    reserve_term_s: float
    ucx: bool
    host: str
    tenants: str = ""
    metrics: bool = True
    copies: int = 1
    namespaces: dict[str, int] = field(default_factory=dict)
    copy_rate: float = 2.0**30
    lost_s: float = 10.0
    log_level: str = field(default="INFO")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
