"""Tenants: who else may use a pool, each as if it were alone there.

A tenant proves its identity by its own key (`pool.handshake`). From then on every key that it names is turned into
another one by its *pad*, before the rules see it: 24 secret bytes that the rank derives from the pool's key and the
tenant's name, and that never leave it. Two tenants can therefore never name the same block, whatever they send; nor can
a tenant name one of the operator's. The first 8 bytes of a key stay as they are: they decide where a block belongs and
seed its checksum, on both sides alike, and 192 bits remain.

The memory of a rank shows everybody's blocks, so tenants get neither its segment nor UCX, only blocks by socket, each
validated by the rank. Nor may they ask what others do (STATUS, AUDIT), or anything that is the operator's (`ALLOWED`).

How firmly blocks are kept is the operator's to say: of a tenant, pins, copies and priorities above the default do not
count.

The tenants' file lists, in YAML, `name`, `key_file` (mode 0600; beside this file if relative) and, each optional,
`quota_dram`, `quota_files` (sizes) and `quota_blocks` (a count), for the whole pool: each rank enforces its share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from blake3 import blake3

from kvtool.errors import SpecRefused
from kvtool.kv.block import KEY_SIZE, BlockKey
from kvtool.kv.quota import Quota
from kvtool.kv.record import Want
from kvtool.kv.retention import PRIORITY_DEFAULT, Retention
from kvtool.pool.state import PoolState, write_state
from kvtool.pool.wire import Op
from kvtool.units import parse_size

TENANTS_MAX = 1024
CLEAR = 8
"""Bytes of a key that no pad changes."""
ALLOWED = frozenset(
    {
        Op.LOOKUP, Op.GATHER, Op.FETCH, Op.READ, Op.RELEASE, Op.RESERVE, Op.WRITE, Op.COMMIT, Op.ABORT, Op.DROP,
        Op.MATCH, Op.HAS, Op.DELETE, Op.CORRUPT, Op.COUNTED, Op.PING,
    }
)  # fmt: skip
_KNOWN = {"name", "key_file", "quota_dram", "quota_files", "quota_blocks"}


@dataclass(frozen=True)
class Tenant:
    """One tenant, as a rank knows it; `quota` is that of one rank."""

    name: str
    key: bytes
    pad: bytes
    quota: Quota

    def own(self, key: BlockKey) -> BlockKey:
        """The key under which the rules know a block that this tenant calls `key`."""
        number = int.from_bytes(key, "little") ^ int.from_bytes(self.pad, "little")
        return number.to_bytes(KEY_SIZE, "little")

    def own_all(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        return [self.own(key) for key in keys]

    def own_wants(self, wants: Sequence[Want]) -> list[Want]:
        return [
            replace(
                want,
                key=self.own(want.key),
                parent=None if want.parent is None else self.own(want.parent),
                retention=_modest(want.retention),
                tenant=self.name,
            )
            for want in wants
        ]


def _modest(wanted: Retention) -> Retention:
    """What a tenant may want of a block: to keep it less firmly than others do, not more, and as often as the pool
    does. Else its pins, priorities and copies would cost other tenants theirs, past every quota."""
    return Retention(min(wanted.priority, PRIORITY_DEFAULT), wanted.duration_s)


def pad_of(pool_key: bytes, pool_name: str, tenant: str) -> bytes:
    """The same for every rank and every start of a pool with this key, and as good as random without it."""
    secret = blake3(pool_key, derive_key_context="kvtool 2026 pads of a pool's tenants").digest()
    said = f"{len(pool_name)} {pool_name} {tenant}".encode()
    return bytes(CLEAR) + blake3(said, key=secret).digest(length=KEY_SIZE - CLEAR)


def read_tenants(path: Path, pool_key: bytes, pool_name: str, ranks: int, slot_size: int) -> dict[str, Tenant]:
    """The tenants of a pool of `ranks` ranks, by name.

    Raises:
        SpecRefused, Refused: the file, or a key file that it names, is wrong; the sentence says where.
    """
    from kvtool.transfer.crypt import read_key

    tenants: dict[str, Tenant] = {}
    keys: dict[bytes, str] = {pool_key: "the pool's own"}
    for at, entry in enumerate(_entries(path)):
        where = f"{path}: tenants[{at}]"
        name = _name(where, entry)
        if name in tenants:
            raise SpecRefused(f"{where}.name: {name} is there twice; names must differ")
        key = read_key(path.parent / str(entry.get("key_file", "")), f"{where}.key_file")
        if key in keys:
            raise SpecRefused(f"{where}.key_file: wanted a key of its own, found that of {keys[key]}; make another")
        keys[key] = f"tenant {name}"
        quota = Quota(
            _slots(where, entry, "quota_dram", ranks, slot_size),
            _slots(where, entry, "quota_files", ranks, slot_size),
            _blocks(where, entry, ranks),
        )
        tenants[name] = Tenant(name, key, pad_of(pool_key, pool_name, name), quota)
    return tenants


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise SpecRefused(f"pool.tenants: wanted a list of tenants in {path}, opening gave: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecRefused(f"{path}: cannot be read as YAML ({error})") from None
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found) or not found:
        raise SpecRefused(f"{path}: wanted a list of tenants, each with name and key_file, found {found!r:.80}")
    if len(found) > TENANTS_MAX:
        raise SpecRefused(f"{path}: wanted up to {TENANTS_MAX} tenants, found {len(found)}")
    return found


def _name(where: str, entry: dict[str, Any]) -> str:
    unknown = sorted(set(map(str, entry)) - _KNOWN)
    if unknown:
        raise SpecRefused(f"{where}: wanted {', '.join(sorted(_KNOWN))}, found {', '.join(unknown)}")
    name = entry.get("name")
    plain = isinstance(name, str) and 1 <= len(name) <= 64 and all(c.isalnum() or c in "-_" for c in name)
    if not plain or not name.isascii():  # type: ignore[union-attr]
        raise SpecRefused(f"{where}.name: wanted 1 to 64 letters, digits, - and _, found {name!r:.80}")
    if not isinstance(entry.get("key_file"), str):
        raise SpecRefused(f"{where}.key_file: wanted the path of a key, found {entry.get('key_file')!r:.80}")
    return str(name)


def _slots(where: str, entry: dict[str, Any], setting: str, ranks: int, slot_size: int) -> int | None:
    if setting not in entry:
        return None
    try:
        size = parse_size(entry[setting])
    except (ValueError, TypeError):
        raise SpecRefused(f"{where}.{setting}: wanted a size such as 10GiB, found {entry[setting]!r:.80}") from None
    slots = size // (ranks * slot_size)
    if slots < 1 and (setting == "quota_dram" or size):
        raise SpecRefused(
            f"{where}.{setting}: {entry[setting]} is less than one block of {slot_size} bytes on each of {ranks} ranks"
        )
    return slots


def _blocks(where: str, entry: dict[str, Any], ranks: int) -> int | None:
    count = entry.get("quota_blocks")
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or count < ranks:
        raise SpecRefused(f"{where}.quota_blocks: wanted a number, {ranks} (one a rank) or more, found {count!r:.80}")
    return count // ranks


def write_tenant_states(state_file: Path, state: PoolState, tenants: Iterable[Tenant]) -> None:
    """For each tenant a state file of its own, beside the pool's: with its key, and nothing that is not for it."""
    ranks = [
        replace(rank, segment="", segment_size=0, ucx_name="", ucx_metadata="", metrics="") for rank in state.ranks
    ]
    for tenant in tenants:
        theirs = replace(state, key=tenant.key.hex(), tenant=tenant.name, prefix="", ranks=ranks)
        write_state(tenant_state_file(state_file.parent, tenant.name), theirs)


def tenant_state_file(run_dir: Path, tenant: str) -> Path:
    return run_dir / f"tenant-{tenant}.json"
