"""The journal: one record for each request that is over, synced before it counts.

A record is one line: a checksum, a space, JSON. Several results share one write and one sync; each record says where
that write began (`group`). Whatever stops the process, or the machine, can spoil no more than the last write, of which
any part may then be missing, a middle one too; the next opening cuts off what follows the first spoiled record. Where a
later write's record is found behind it, what was synced is damaged, and the job is refused by name: nothing that was
acknowledged is thrown away in silence. Numbers of requests that are in the journal are over: a second record for one of
them is refused by assertion, and ignored when it is read (it cannot be, but an answer given twice is worse than a
record too many).

Everything that it asks of the disk goes through `Files`, so that a test can stop it between any two calls.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvtool.errors import Refused, Unavailable

_HEAD = 17
"""16 hex digits and a space."""
_NEAR, _FAR = 4 << 10, 1 << 20
"""Bytes to read for one record, and for all of them."""


class Files(Protocol):
    """The calls that make something durable."""

    def open(self, path: Path, *, change: bool) -> int: ...

    def size(self, handle: int) -> int: ...

    def read(self, handle: int, size: int, at: int) -> bytes: ...

    def append(self, handle: int, data: bytes, at: int) -> int:
        """Write at byte `at`, the end; how many bytes went."""
        ...

    def truncate(self, handle: int, size: int) -> None: ...

    def sync(self, handle: int) -> None: ...

    def close(self, handle: int) -> None: ...


class RealFiles:
    def open(self, path: Path, *, change: bool) -> int:
        return os.open(path, (os.O_RDWR if change else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, size: int, at: int) -> bytes:
        return os.pread(handle, size, at)

    def append(self, handle: int, data: bytes, at: int) -> int:
        return os.pwrite(handle, data, at)

    def truncate(self, handle: int, size: int) -> None:
        os.ftruncate(handle, size)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)


def sync(path: Path) -> None:
    """A file, or a directory: its names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """Of a job of `count` requests, numbered from 0. 8 bytes of memory a request.

    Raises:
        Refused: the file is gone, holds something else, or is damaged before its last write.
    """

    def __init__(self, path: Path, count: int, files: Files | None = None, *, mend: bool = True) -> None:
        self.path, self._files, self._mend = path, files or RealFiles(), mend
        self._at: npt.NDArray[np.int64] = np.full(count, -1, dtype=np.int64)
        try:
            self._handle = self._files.open(path, change=mend)
        except OSError as error:
            raise Refused(
                f"{path}: the job's journal cannot be opened ({error.strerror or error}), and without it nobody knows "
                "what is answered; restore the file, or start the job anew"
            ) from None
        self.torn = 0
        """Bytes that were cut off at the end."""
        try:
            self._end = self._recover()
        except BaseException:
            self._files.close(self._handle)
            raise

    @staticmethod
    def make(path: Path) -> None:
        """An empty one, durable once its directory is synced. It is there from a job's first moment: were it made by
        the first who needs it, one that was lost would be taken for one with nothing in it."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    @classmethod
    def reading(cls, path: Path, count: int) -> Journal:
        """As it is now, while another process may write to it: nothing is changed, its unfinished end is left out."""
        return cls(path, count, mend=False)

    def __len__(self) -> int:
        """Requests that are over."""
        return int(np.count_nonzero(self._at >= 0))

    def __contains__(self, number: int) -> bool:
        return bool(self._at[number] >= 0)

    def append(self, records: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Returns when all of `records` are durable. A failure leaves none of them in the journal.

        Raises:
            Unavailable: the disk is full, or failed; what was there before stays.
        """
        lines, places, at = [], [], self._end
        for number, record in records:
            assert number not in self, f"request {number} is over already"
            line = encode({"number": number, **record}, self._end)
            places.append((number, at))
            lines.append(line)
            at += len(line)
        try:
            self._write(b"".join(lines))
            self._files.sync(self._handle)
        except OSError as error:
            self._cut()
            raise Unavailable(
                f"{self.path}: {len(records)} results could not be written ({error.strerror or error}); make room, "
                f"then: kvtool batch resume {self.path.parent}"
            ) from None
        self._end = at
        for number, place in places:
            self._at[number] = place

    def record(self, number: int) -> dict[str, Any] | None:
        """What came of a request; None when it is not over."""
        at = int(self._at[number])
        return None if at < 0 else self._whole(at, self._line_at(at))

    def records(self) -> Iterator[dict[str, Any]]:
        """In the order in which they were over."""
        for at, line in self._lines(0, self._end):
            yield self._whole(at, line)

    def close(self) -> None:
        self._files.close(self._handle)

    def _write(self, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += self._files.append(self._handle, data[done:], self._end + done)

    def _cut(self) -> None:
        """A write that failed may have left a part; the next must not follow it."""
        try:
            self._files.truncate(self._handle, self._end)
        except OSError:
            pass  # the part is overwritten by the next record, or cut off by the next opening

    def _recover(self) -> int:
        """Read what is there; the end of the last whole record."""
        size, end = self._files.size(self._handle), 0
        for at, line in self._lines(0, size):
            found = decode(line)
            if found is None:
                if any(later > at for later in self._groups(at + len(line), size)):
                    raise Refused(
                        f"{self.path}: the record at byte {at} is damaged, and records follow it; restore the file, or "
                        "start the job anew"
                    )
                self.torn = size - at
                if self._mend:
                    self._files.truncate(self._handle, at)
                    self._files.sync(self._handle)
                break
            number = found[1]["number"]
            if not 0 <= number < len(self._at):
                raise Refused(f"{self.path}: speaks of request {number}, this job has {len(self._at)}")
            if self._at[number] < 0:
                self._at[number] = at
            end = at + len(line)
        return end

    def _groups(self, at: int, size: int) -> Iterator[int]:
        """Where the writes began of the whole records behind. All before such a place was synced once."""
        for _, line in self._lines(at, size):
            found = decode(line)
            if found is not None:
                yield found[0]

    def _whole(self, at: int, line: bytes) -> dict[str, Any]:
        found = decode(line)
        if found is None:
            raise Refused(f"{self.path}: the record at byte {at} was changed behind our back; restore the file")
        return found[1]

    def _line_at(self, at: int) -> bytes:
        parts, step = [], _NEAR
        while chunk := self._files.read(self._handle, step, at):
            end = chunk.find(b"\n")
            if end >= 0:
                parts.append(chunk[: end + 1])
                break
            parts.append(chunk)
            at, step = at + len(chunk), _FAR
        return b"".join(parts)

    def _lines(self, at: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Each line from byte `at` on, with its place; the last may be unfinished."""
        parts: list[bytes] = []
        to = at
        while to < end and (chunk := self._files.read(self._handle, min(_FAR, end - to), to)):
            to += len(chunk)
            *whole, rest = chunk.split(b"\n")
            for piece in whole:
                line, parts = b"".join([*parts, piece, b"\n"]), []
                yield at, line
                at += len(line)
            parts.append(rest)
        if last := b"".join(parts):
            yield at, last


def encode(record: Mapping[str, Any], group: int) -> bytes:
    """`group`: the byte at which the write begins that this record is part of."""
    body = json.dumps({"group": group, **record}, separators=(",", ":")).encode()  # ASCII: a lone surrogate stays
    return xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"


def decode(line: bytes) -> tuple[int, dict[str, Any]] | None:
    """Group and record; None for what is no whole record."""
    body = line[_HEAD:-1]
    if not line.endswith(b"\n") or line[:_HEAD] != xxhash.xxh3_64_hexdigest(body).encode() + b" ":
        return None
    found = json.loads(body)
    if not isinstance(found, dict) or type(found.get("number")) is not int:
        return None
    group = found.pop("group", None)
    return (group, found) if type(group) is int else None
