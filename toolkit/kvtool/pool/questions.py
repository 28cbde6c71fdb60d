"""What ranks are asked by message, and what their answers say; an answer that is about something else is none."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.errors import ProtocolError
from kvtool.pool import wire
from kvtool.pool.asking import Part, Question
from kvtool.pool.wire import Cut, Found, Op

_CUTS = {Cut.ABSENT: "absent", Cut.LATE: "timeout", Cut.FULL: "full"}


def keys_of(part: Part) -> bytes:
    return b"".join(part.keys)


def _take_count(part: Part, body: bytes) -> tuple[Sequence[int], str]:
    return part.positions[wire.unpack_count(body) :], "absent"


def _take_flags(part: Part, body: bytes) -> tuple[Sequence[int], str]:
    return [
        at for at, there in zip(part.positions, body.ljust(len(part.keys), b"\0"), strict=False) if not there
    ], "absent"


def take_found(part: Part, body: bytes) -> tuple[Sequence[int], str]:
    found = wire.unpack_found(body)
    count = len(found.hits)
    _sane(part, found, count)
    part.at, part.names, part.found = part.positions[:count], part.keys[:count], found
    return part.positions[count:], _CUTS[found.cut]


def take_gathered(part: Part, body: bytes) -> tuple[Sequence[int], str]:
    found, indices = wire.unpack_gathered(body)
    _sane(part, found, max(indices, default=-1) + 1)
    part.at, part.names = [part.positions[index] for index in indices], [part.keys[index] for index in indices]
    part.found = found
    there = set(part.at)
    return [position for position in part.positions if position not in there], _CUTS[found.cut]


def _sane(part: Part, found: Found, count: int) -> None:
    """What a rank says must be about what it was asked; and what it says of its file tier is remembered."""
    if count > len(part.keys):
        raise ProtocolError(f"rank {part.access.state.rank} answered for {count} keys of the {len(part.keys)} asked")
    if found.cut is Cut.LATE:
        part.access.files.bad(part.sent_s)
    elif any(hit[4] for hit in found.hits):
        part.access.files.good()


MATCH, HAS = Question(Op.MATCH, keys_of, _take_count), Question(Op.HAS, keys_of, _take_flags)
