"""The roster: entries of a view as ranks, and as bytes on the wire.

    view = count u32, whole u8; then for each: incarnation u64, status u8, step u8, and three byte strings with their
    lengths (u32): identity, place, record

The record is all of a `RankState` that does not change within one incarnation, as a msgpack map.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import msgpack

from kvtool.errors import ProtocolError
from kvtool.kv.view import RAMP_STEPS, Entry, Standing, Status
from kvtool.pool.config import RANKS_MAX
from kvtool.pool.state import RankState

_HEAD = struct.Struct("<IB")
_ENTRY = struct.Struct("<QBBIII")
_STANDING = ("alive", "weight", "incarnation", "status", "step")
_FIELDS_MAX = 64
_INCARNATION_MAX = 2**40


def identity_of(pool: str, rank: int) -> str:
    return f"{pool}/{rank}"


def entry_of(rank: RankState) -> Entry:
    record = {name: value for name, value in asdict(rank).items() if name not in _STANDING}
    packed: bytes = msgpack.packb(record)
    return Entry(rank.identity, Standing(rank.incarnation, Status[rank.status.upper()], rank.step), rank.host, packed)


def rank_of(entry: Entry) -> RankState:
    """
    Raises:
        ProtocolError: its record is none.
    """
    standing = entry.standing
    try:
        record: dict[str, Any] = msgpack.unpackb(entry.record, max_map_len=_FIELDS_MAX, max_array_len=_FIELDS_MAX)
        host, port = record.pop("tcp")
        rank = RankState(
            **record,
            tcp=(str(host), int(port)),
            alive=standing.serves,
            weight=standing.weight,
            incarnation=standing.incarnation,
            status=standing.status.name.lower(),
            step=standing.step,
        )
    except Exception as error:
        raise ProtocolError(f"{entry.identity}: wanted the record of a rank, found {type(error).__name__}") from None
    if rank.identity != entry.identity or rank.host != entry.place or rank.rank != entry.number:
        raise ProtocolError(f"{entry.identity}: wanted its own record, found that of {rank.identity} on {rank.host}")
    return rank


def ranks_of(entries: Iterable[Entry]) -> list[RankState]:
    return [rank_of(entry) for entry in entries]


def pack_view(entries: Sequence[Entry], whole: bool = False) -> bytes:
    parts = [_HEAD.pack(len(entries), whole)]
    for entry in entries:
        strings = (entry.identity.encode(), entry.place.encode(), entry.record)
        parts += [_ENTRY.pack(*entry.standing, *map(len, strings)), *strings]
    return b"".join(parts)


def unpack_view(body: bytes | memoryview, pool: str) -> tuple[list[Entry], bool]:
    """
    Raises:
        ProtocolError: not a view of ranks of the pool of that name.
    """
    raw = bytes(body)
    if len(raw) < _HEAD.size:
        raise ProtocolError(f"view: wanted at least {_HEAD.size} bytes, found {len(raw)}")
    count, whole = _HEAD.unpack_from(raw)
    if count > RANKS_MAX:
        raise ProtocolError(f"view: {count} ranks announced, the limit is {RANKS_MAX}")
    at, entries = _HEAD.size, []
    for _ in range(count):
        entry, at = _unpack(raw, at, pool)
        entries.append(entry)
    return entries, bool(whole)


def _unpack(raw: bytes, at: int, pool: str) -> tuple[Entry, int]:
    if len(raw) - at < _ENTRY.size:
        raise ProtocolError(f"view: wanted an entry of at least {_ENTRY.size} bytes, found {len(raw) - at}")
    incarnation, status, step, *lengths = _ENTRY.unpack_from(raw, at)
    at += _ENTRY.size
    if sum(lengths) > len(raw) - at:
        raise ProtocolError(f"view: an entry of {sum(lengths)} bytes announced, {len(raw) - at} sent")
    strings = []
    for length in lengths:
        strings.append(raw[at : at + length])
        at += length
    try:
        identity, place = strings[0].decode(), strings[1].decode()
        standing = Standing(incarnation, Status(status), step)
    except ValueError as error:
        raise ProtocolError(f"view: {error}") from None
    name, _, number = identity.rpartition("/")
    if name != pool or not number.isdecimal() or int(number) >= RANKS_MAX:
        raise ProtocolError(f"view: wanted ranks of the pool {pool}, found {identity[:200]!r}")
    if step >= RAMP_STEPS or not 1 <= incarnation <= _INCARNATION_MAX:
        raise ProtocolError(f"view: {identity} cannot be incarnation {incarnation}, step {step}")
    entry = Entry(identity, standing, place, strings[2])
    rank_of(entry)
    return entry, at
