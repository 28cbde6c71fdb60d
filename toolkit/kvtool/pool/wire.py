"""What a rank and its clients say to each other: one frame a message, one message for a whole batch.

    frame = length u32, op u8, status u8, version u16, request u64, epoch u64; then `length` bytes; little-endian

A reply carries the request's number and the pool's epoch, so that every answer tells a client whether its list of
ranks is out of date. Request 0 wants no reply. Frames are bounded on both sides; counts are checked against the bytes
that are there before anything is believed. Keys are 32 bytes, records fixed in size: a batch of 64 blocks is packed
and unpacked by a few calls, without a round trip for each block.

The first frame comes from the server, and the first of the client is HELLO: `pool.handshake`. From there on, where
somebody on the way could put in frames of his own (TCP without TLS), each ends in 16 bytes that only the two can make.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import msgpack

from kvtool.errors import ProtocolError
from kvtool.kv.block import KEY_SIZE, BlockKey
from kvtool.kv.copying import Why
from kvtool.kv.hot import Near
from kvtool.kv.record import Commit, Grant, Granted, Hit, Want
from kvtool.kv.retention import DEFAULT, Pin, Retention

VERSION = 2
FRAME_MAX = 4 * 2**20
BATCH_MAX = 16384
"""Keys or records in one message."""
MAP_MAX, LIST_MAX = 2**20, 4096
"""Bytes of a map, and items of a list or map in it: nested announcements of long lists cost room before they fail."""
WAIT_MAX_S = 3600.0
HEAD = struct.Struct("<IBBHQQ")


class Op(IntEnum):
    HELLO = 1
    LOOKUP = 2
    RELEASE = 3
    RESERVE = 4
    COMMIT = 5
    ABORT = 6
    DROP = 7
    MATCH = 8
    CORRUPT = 9
    STATUS = 10
    AUDIT = 11
    PING = 12
    VIEW = 13
    JOIN = 14
    DRAIN = 15
    DELETE = 16
    HAS = 17
    GATHER = 18
    READ = 20
    """Send slots that the client has a lease on, on a data connection. No answer but the bytes."""
    WRITE = 21
    """Blocks for reserved slots follow on a data connection. No answer: their commit waits for them."""
    FETCH = 22
    """A LOOKUP or GATHER whose blocks are sent at once; no lease is left. For what is as quickly sent as asked for."""
    TOUCH = 30
    STORE = 31
    LEASE = 32
    COPYING = 40
    """What this connection puts from here on are copies that another rank makes, and why."""
    COUNTED = 41
    """What a client counted of its reads since it said so last: a map."""
    VERIFY = 50


class Status(IntEnum):
    OK = 0
    REFUSED = 1
    """The body is a sentence."""


_LOOKUP = struct.Struct("<QII")
_READ = struct.Struct("<IIQQ")
_FETCH = struct.Struct("<I?Q")
_WRITE = struct.Struct("<IIQ")
_WRITTEN = struct.Struct("<IQ")
_FOUND = struct.Struct("<dII")
_HIT = struct.Struct("<IIQQI")
_COUNT = struct.Struct("<I")
_WAIT_COUNT = struct.Struct("<II")
_WANT = struct.Struct("<32s32sIffBBB")
_GRANT = struct.Struct("<BIQ")
_COMMIT = struct.Struct("<IQQ")
_ABORT = struct.Struct("<IQ")
_NUMBER = struct.Struct("<Q")
_SETTLED = struct.Struct("<d")
_CORRUPT = struct.Struct("<32sIQ")
_COPYING = struct.Struct("<IB")
_NEAR = struct.Struct("<IIf")
_POSITION = struct.Struct("<I")
_NO_KEY = bytes(KEY_SIZE)
_DURABLE = -1.0
_KEPT_DEFAULT = (_DURABLE, DEFAULT.priority, DEFAULT.pin, DEFAULT.copies)

Body = bytes | memoryview
_Kind = TypeVar("_Kind", bound=IntEnum)


class Sealing(Protocol):
    """See `handshake.Seal`."""

    size: int

    def mac(self, data: Body) -> bytes: ...

    def check(self, data: Body, mac: Body) -> None: ...


def frame(
    op: Op,
    request: int,
    epoch: int,
    body: bytes = b"",
    status: Status = Status.OK,
    seal: Sealing | None = None,
) -> bytes:
    if len(body) > FRAME_MAX:
        raise ProtocolError(
            f"a {op.name} message of {len(body)} bytes is over the limit of {FRAME_MAX}; send less at once"
        )
    if seal is None:
        return HEAD.pack(len(body), op, status, VERSION, request, epoch) + body
    data = HEAD.pack(len(body) + seal.size, op, status, VERSION, request, epoch) + body
    return data + seal.mac(data)


_KINDS = {(op.value, status.value): (op, status) for op in Op for status in Status}


class Message(NamedTuple):
    op: Op
    status: Status
    request: int
    epoch: int
    body: bytes


class Splitter:
    """Frames out of a byte stream, however it was cut. `limit`: of one body; `seal`: checks each frame.

    Raises:
        ProtocolError: from `feed`; another version, an unknown op, a frame over the limit or one that was tampered
            with. Close the connection.
    """

    def __init__(self, limit: int = FRAME_MAX) -> None:
        self.limit = limit
        self.seal: Sealing | None = None
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        buffer = self._rest + data if self._rest else data
        at, messages = 0, []
        while len(buffer) - at >= HEAD.size:
            length, op, status, version, request, epoch = HEAD.unpack_from(buffer, at)
            if version != VERSION:
                raise ProtocolError(f"the peer speaks version {version} of the pool's protocol, this side {VERSION}")
            if length > self.limit + (0 if self.seal is None else self.seal.size):
                raise ProtocolError(f"the peer announced a message of {length} bytes, the limit is {self.limit}")
            end = at + HEAD.size + length
            if end > len(buffer):
                break
            body_end = end if self.seal is None else self._checked(self.seal, buffer, at, end)
            kind = _KINDS.get((op, status))
            if kind is None:
                raise ProtocolError(f"the peer sent op {op} with status {status}, which do not exist")
            messages.append(Message(*kind, request, epoch, buffer[at + HEAD.size : body_end]))
            at = end
        self._rest = buffer[at:]
        return messages

    @property
    def unread(self) -> int:
        """Bytes of a frame that is not whole yet."""
        return len(self._rest)

    @staticmethod
    def _checked(seal: Sealing, buffer: bytes, at: int, end: int) -> int:
        """Where the body of a sealed frame ends."""
        body_end = end - seal.size
        if body_end < at + HEAD.size:
            raise ProtocolError("the peer sent a message without its seal")
        view = memoryview(buffer)
        seal.check(view[at:body_end], view[body_end:end])
        return body_end


def pack_map(value: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def unpack_map(body: Body) -> dict[str, Any]:
    if len(body) > MAP_MAX:
        raise ProtocolError(f"wanted a map of at most {MAP_MAX} bytes, found {len(body)}")
    try:
        value = msgpack.unpackb(body, max_array_len=LIST_MAX, max_map_len=LIST_MAX)
    except Exception as error:
        raise ProtocolError(f"wanted a map in msgpack, found something else ({type(error).__name__})") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"wanted a map in msgpack, found {type(value).__name__}")
    return value


def _records(what: str, record: struct.Struct, count: int, body: Body, at: int) -> memoryview:
    if count > BATCH_MAX or len(body) - at < count * record.size:
        raise ProtocolError(f"{what}: {count} records of {record.size} bytes announced, {len(body) - at} bytes sent")
    return memoryview(body)[at : at + count * record.size]


def _one_of(kind: type[_Kind], value: int) -> _Kind:
    member = kind._value2member_map_.get(value)  # several times quicker than calling `kind`
    if member is None:
        raise ProtocolError(f"the peer sent {value} where a {kind.__name__} was expected")
    return cast(_Kind, member)


def _seconds(value: float) -> float:
    """A duration: NaN would never be due, and what is infinite or negative is no time that anybody may hold things."""
    if not (math.isfinite(value) and value >= 0):
        raise ProtocolError(f"the peer sent {value} where a number of seconds, 0 or more, was expected")
    return value


def _milliseconds(wait_s: float) -> int:
    """Of a budget, whatever a caller made of it."""
    return int(min(max(wait_s, 0.0), WAIT_MAX_S) * 1000) if wait_s == wait_s else 0


def _head(what: str, head: struct.Struct, body: Body) -> tuple[Any, ...]:
    if len(body) < head.size:
        raise ProtocolError(f"{what}: wanted at least {head.size} bytes, found {len(body)}")
    return head.unpack_from(body)


def split_keys(body: Body, at: int = 0) -> list[BlockKey]:
    size = len(body) - at
    if size % KEY_SIZE or size > BATCH_MAX * KEY_SIZE:
        raise ProtocolError(f"wanted up to {BATCH_MAX} keys of {KEY_SIZE} bytes, found {size} bytes")
    raw = bytes(body)
    return [raw[i : i + KEY_SIZE] for i in range(at, len(raw), KEY_SIZE)]


def join_keys(keys: Sequence[BlockKey]) -> bytes:
    """
    Raises:
        ValueError: something else than keys.
    """
    joined = b"".join(keys)
    if len(joined) != KEY_SIZE * len(keys):
        wrong = next(len(key) for key in keys if len(key) != KEY_SIZE)
        raise ValueError(f"wanted block keys of {KEY_SIZE} bytes, found one of {wrong}")
    return joined


def pack_count(count: int) -> bytes:
    return _COUNT.pack(count)


def unpack_count(body: Body) -> int:
    return int(_head("count", _COUNT, body)[0])


# Lookup: (number of the read, milliseconds it may wait, keys) -> (lease term, why it was cut, hits)


def pack_lookup(number: int, wait_s: float, keys: Sequence[BlockKey]) -> bytes:
    return _LOOKUP.pack(number, _milliseconds(wait_s), len(keys)) + b"".join(keys)


def unpack_lookup(body: Body) -> tuple[int, float, list[BlockKey]]:
    number, wait_ms, count = _head("lookup", _LOOKUP, body)
    keys = split_keys(body, _LOOKUP.size)
    if len(keys) != count:
        raise ProtocolError(f"lookup: {count} keys announced, {len(keys)} sent")
    return number, wait_ms / 1000, keys


# Read: (number of the data connection, numbers of the transfer and of the read that has the lease, slot each)


def pack_read(lane: int, transfer: int, number: int, slots: Sequence[int]) -> bytes:
    return _READ.pack(lane, len(slots), transfer, number) + b"".join(_COUNT.pack(slot) for slot in slots)


def unpack_read(body: Body) -> tuple[int, int, int, list[int]]:
    lane, count, transfer, number = _head("read", _READ, body)
    records = _records("read", _COUNT, count, body, _READ.size)
    return lane, transfer, number, [slot for (slot,) in _COUNT.iter_unpack(records)]


# Fetch: (number of the data connection, whether it gathers, number of the transfer, lookup) -> found or gathered


def pack_fetch(lane: int, transfer: int, gather: bool, lookup: bytes) -> bytes:
    return _FETCH.pack(lane, gather, transfer) + lookup


def unpack_fetch(body: Body) -> tuple[int, int, bool, memoryview]:
    lane, gather, transfer = _head("fetch", _FETCH, body)
    return lane, transfer, gather, memoryview(body)[_FETCH.size :]


# Write: (number of the data connection, number of the transfer, (slot, generation) each)


def pack_write(lane: int, transfer: int, slots: Sequence[tuple[int, int]]) -> bytes:
    return _WRITE.pack(lane, len(slots), transfer) + b"".join(_WRITTEN.pack(*slot) for slot in slots)


def unpack_write(body: Body) -> tuple[int, int, list[tuple[int, int]]]:
    lane, count, transfer = _head("write", _WRITE, body)
    return lane, transfer, list(_WRITTEN.iter_unpack(_records("write", _WRITTEN, count, body, _WRITE.size)))


class Cut(IntEnum):
    """Why a run ended before its last key."""

    ABSENT = 0
    LATE = 1
    FULL = 2


@dataclass(frozen=True)
class Found:
    term_s: float
    cut: Cut
    hits: list[tuple[int, int, int, int, int]]
    """(slot, length, generation, checksum, 1 if it came from a file), in the order of the keys."""
    near: list[Near] = field(default_factory=list)
    """Copies on the asker's host; positions are those in `hits`."""


def pack_found(term_s: float, cut: Cut, hits: Iterable[Hit]) -> bytes:
    records = [_HIT.pack(h.slot, h.length, h.generation, h.checksum, h.filed) for h in hits]
    return _FOUND.pack(term_s, cut, len(records)) + b"".join(records)


def unpack_found(body: Body, gathered: bool = False) -> Found:
    term_s, cut, count = _head("found", _FOUND, body)
    hits = list(_HIT.iter_unpack(_records("found", _HIT, count, body, _FOUND.size)))
    near_at = _FOUND.size + count * (_HIT.size + _POSITION.size * gathered)
    return Found(_seconds(term_s), _one_of(Cut, cut), hits, unpack_near(body, near_at))


# Copying: (rank, why)


def pack_copying(rank: int, why: Why) -> bytes:
    return _COPYING.pack(rank, why)


def unpack_copying(body: Body) -> tuple[int, Why]:
    rank, why = _head("copying", _COPYING, body)
    return rank, _one_of(Why, why)


# Gather: as lookup, but of every key that is there -> (found as above, position of each hit in what was asked)


def pack_gathered(term_s: float, cut: Cut, hits: Sequence[Hit], positions: Sequence[int]) -> bytes:
    return pack_found(term_s, cut, hits) + struct.pack(f"<{len(hits)}I", *positions[: len(hits)])


def unpack_gathered(body: Body) -> tuple[Found, tuple[int, ...]]:
    """
    Raises:
        ProtocolError: as all of these; or positions that are there twice.
    """
    found = unpack_found(body, gathered=True)
    at = _FOUND.size + len(found.hits) * _HIT.size
    records = _records("gathered", _POSITION, len(found.hits), body, at)
    positions = tuple(position for (position,) in _POSITION.iter_unpack(records))
    if len(set(positions)) != len(positions):
        raise ProtocolError("gathered: the peer sent a position twice")
    return found, positions


# Near: behind what was found, copies on the asker's host: (position, rank, seconds that it lives) each


def pack_near(near: Sequence[Near]) -> bytes:
    if not near:
        return b""
    return _COUNT.pack(len(near)) + b"".join(_NEAR.pack(one.position, one.rank, one.left_s) for one in near)


def unpack_near(body: Body, at: int) -> list[Near]:
    """What stands at `at`, behind an answer's records; nothing is fine."""
    if len(body) < at + _COUNT.size:
        return []
    (count,) = _COUNT.unpack_from(body, at)
    records = _records("near", _NEAR, count, body, at + _COUNT.size)
    return [Near(position, rank, _seconds(left_s)) for position, rank, left_s in _NEAR.iter_unpack(records)]


# Reserve: (milliseconds it may wait, wants) -> (answers, the reason when something was full)


def pack_wants(wait_s: float, wants: Sequence[Want]) -> bytes:
    records = [
        _WANT.pack(w.key, w.parent or _NO_KEY, w.size, _lasting(w.transient_s), *_kept(w.retention)) for w in wants
    ]
    return _WAIT_COUNT.pack(_milliseconds(wait_s), len(records)) + b"".join(records)


def unpack_wants(body: Body) -> tuple[float, list[Want]]:
    wait_ms, count = _head("reserve", _WAIT_COUNT, body)
    records = _records("reserve", _WANT, count, body, _WAIT_COUNT.size)
    return wait_ms / 1000, [
        Want(key, size, None if parent == _NO_KEY else parent, _lasts(transient_s), _keeping(*kept))
        for key, parent, size, transient_s, *kept in _WANT.iter_unpack(records)
    ]


def _lasting(seconds: float | None) -> float:
    return _DURABLE if seconds is None else seconds


def _lasts(seconds: float) -> float | None:
    return None if seconds == _DURABLE else _seconds(seconds)


def _kept(retention: Retention) -> tuple[float, int, int, int]:
    return _lasting(retention.duration_s), retention.priority, retention.pin, retention.copies


def _keeping(duration_s: float, priority: int, pin: int, copies: int) -> Retention:
    if (duration_s, priority, pin, copies) == _KEPT_DEFAULT:
        return DEFAULT
    try:
        return Retention(priority, _lasts(duration_s), Pin(pin), copies)
    except ValueError as error:
        raise ProtocolError(f"reserve: {error}") from None


def pack_grants(answers: Sequence[Granted], why: str) -> bytes:
    records = [_GRANT.pack(a.grant, max(a.slot, 0), a.generation) for a in answers]
    return _COUNT.pack(len(records)) + b"".join(records) + why.encode()


def unpack_grants(body: Body) -> tuple[list[Granted], str]:
    (count,) = _head("grants", _COUNT, body)
    records = _records("grants", _GRANT, count, body, _COUNT.size)
    answers = [
        Granted(_one_of(Grant, grant), slot, generation) for grant, slot, generation in _GRANT.iter_unpack(records)
    ]
    return answers, bytes(body[_COUNT.size + len(records) :]).decode(errors="replace")


# Commit: (slot, generation, checksum) each -> one byte each. Abort: (seconds until settled, (slot, generation) each)


def pack_commits(commits: Sequence[tuple[int, int, int]]) -> bytes:
    return _COUNT.pack(len(commits)) + b"".join(_COMMIT.pack(*commit) for commit in commits)


def unpack_commits(body: Body) -> list[tuple[int, int, int]]:
    (count,) = _head("commit", _COUNT, body)
    return list(_COMMIT.iter_unpack(_records("commit", _COMMIT, count, body, _COUNT.size)))


def unpack_committed(body: Body) -> list[Commit]:
    return [_one_of(Commit, value) for value in bytes(body)]


def pack_aborts(settle_s: float, aborts: Sequence[tuple[int, int]]) -> bytes:
    return _SETTLED.pack(settle_s) + b"".join(_ABORT.pack(*abort) for abort in aborts)


def unpack_aborts(body: Body) -> tuple[float, list[tuple[int, int]]]:
    (settle_s,) = _head("abort", _SETTLED, body)
    count, rest = divmod(len(body) - _SETTLED.size, _ABORT.size)
    if rest:
        raise ProtocolError(f"abort: wanted records of {_ABORT.size} bytes, found {len(body) - _SETTLED.size}")
    return _seconds(settle_s), list(_ABORT.iter_unpack(_records("abort", _ABORT, count, body, _SETTLED.size)))


# Store: a reserved slot, what it holds, and under which key another is to be reserved -> what came of it, that slot


@dataclass(frozen=True)
class Storing:
    slot: int
    generation: int
    checksum: int
    want: Want
    next_key: BlockKey | None
    """None: no slot is wanted for a next block."""


def pack_store(storing: Storing) -> bytes:
    head = _COMMIT.pack(storing.slot, storing.generation, storing.checksum)
    return head + pack_wants(0.0, [storing.want]) + (storing.next_key or b"")


def unpack_store(body: Body) -> Storing:
    slot, generation, checksum = _head("store", _COMMIT, body)
    size = _COMMIT.size + _WAIT_COUNT.size + _WANT.size
    _, wants = unpack_wants(body[_COMMIT.size : size])
    if len(wants) != 1 or len(body) not in (size, size + KEY_SIZE):
        raise ProtocolError(f"store: wanted one block in {size} bytes, found {len(wants)} in {len(body)}")
    return Storing(slot, generation, checksum, wants[0], bytes(body[size:]) or None)


def pack_stored(grant: Grant, commit: Commit, spare: Granted | None) -> bytes:
    return bytes([grant, commit]) + pack_grants([] if spare is None else [spare], "")


def unpack_stored(body: Body) -> tuple[Grant, Commit, Granted | None]:
    if len(body) < 2:
        raise ProtocolError(f"stored: wanted at least 2 bytes, found {len(body)}")
    spare, _ = unpack_grants(body[2:])
    return _one_of(Grant, body[0]), _one_of(Commit, body[1]), spare[0] if spare else None


# Touch: (slot, generation) each, of blocks that were found in the rank's directory


def pack_touches(uses: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(_ABORT.pack(*use) for use in uses)


def unpack_touches(body: Body) -> list[tuple[int, int]]:
    count, rest = divmod(len(body), _ABORT.size)
    if rest:
        raise ProtocolError(f"touch: wanted records of {_ABORT.size} bytes, found {len(body)}")
    return list(_ABORT.iter_unpack(_records("touch", _ABORT, count, body, 0)))


# Lease: the number of a read, and what it found: no answer; released as any other


def pack_lease(number: int, uses: Sequence[tuple[int, int]]) -> bytes:
    return _NUMBER.pack(number) + pack_touches(uses)


def unpack_lease(body: Body) -> tuple[int, list[tuple[int, int]]]:
    (number,) = _head("lease", _NUMBER, body)
    return number, unpack_touches(body[_NUMBER.size :])


def pack_numbers(numbers: Sequence[int]) -> bytes:
    return b"".join(_NUMBER.pack(number) for number in numbers)


def unpack_numbers(body: Body) -> list[int]:
    if len(body) % _NUMBER.size:
        raise ProtocolError(f"release: wanted numbers of {_NUMBER.size} bytes, found {len(body)} bytes")
    return [number for (number,) in _NUMBER.iter_unpack(body)]


def pack_corrupt(key: BlockKey, slot: int, generation: int) -> bytes:
    return _CORRUPT.pack(key, slot, generation)


def unpack_corrupt(body: Body) -> tuple[BlockKey, int, int]:
    key, slot, generation = _head("corrupt", _CORRUPT, body)
    return key, slot, generation
