"""The journal: one record for each request that is over, synced before it counts.

A record is one line: a checksum, a space, JSON. Whatever stops the process can leave at most a torn last record, which
the next opening cuts off; a record before it that does not fit its checksum is damage, and refused by name. `append`
returns when its records are on the disk, and several results share one sync. Numbers of requests that are in it are
over: a second record for one of them is refused by assertion, and ignored when it is read (it cannot be, but an answer
given twice is worse than a record too many).

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


class Files(Protocol):
    """The calls that make something durable."""

    def open(self, path: Path) -> int: ...

    def size(self, handle: int) -> int: ...

    def read(self, handle: int, size: int, at: int) -> bytes: ...

    def append(self, handle: int, data: bytes, at: int) -> int:
        """Write at byte `at`, the end; how many bytes went."""
        ...

    def truncate(self, handle: int, size: int) -> None: ...

    def sync(self, handle: int) -> None: ...

    def close(self, handle: int) -> None: ...

    def replace(self, old: Path, new: Path) -> None:
        """Rename, and sync the directory."""
        ...


class RealFiles:
    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

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

    def replace(self, old: Path, new: Path) -> None:
        old.replace(new)
        sync_directory(new.parent)


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Journal:
    """Of a job of `count` requests, numbered from 0. 8 bytes of memory a request.

    Raises:
        Refused: the file holds something else, or is damaged before its end.
    """

    def __init__(self, path: Path, count: int, files: Files | None = None, *, mend: bool = True) -> None:
        self.path, self._files, self._mend = path, files or RealFiles(), mend
        self._at: npt.NDArray[np.int64] = np.full(count, -1, dtype=np.int64)
        self._handle = self._files.open(path)
        self.torn = 0
        """Bytes that were cut off at the end."""
        try:
            self._end = self._recover()
        except BaseException:
            self._files.close(self._handle)
            raise

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
            line = encode({"number": number, **record})
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
        return None if at < 0 else self._record_at(at)[0]

    def records(self) -> Iterator[dict[str, Any]]:
        """In the order in which they were over."""
        at = 0
        while at < self._end:
            record, at = self._record_at(at)
            yield record

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
        size, at = self._files.size(self._handle), 0
        while at < size:
            line = self._line_at(at)
            record = decode(line)
            if record is None:
                if line.endswith(b"\n") and at + len(line) < size and self._whole_after(at + len(line), size):
                    raise Refused(
                        f"{self.path}: the record at byte {at} is damaged, and records follow it; restore the file, or "
                        "start the job anew"
                    )
                self.torn = size - at
                if self._mend:
                    self._files.truncate(self._handle, at)
                    self._files.sync(self._handle)
                break
            number = record["number"]
            if not 0 <= number < len(self._at):
                raise Refused(f"{self.path}: speaks of request {number}, this job has {len(self._at)}")
            if self._at[number] < 0:
                self._at[number] = at
            at += len(line)
        return at

    def _whole_after(self, at: int, size: int) -> bool:
        """Whether any whole record lies behind: then what is before was damaged, not torn off."""
        while at < size:
            line = self._line_at(at)
            if decode(line) is not None:
                return True
            at += len(line)
        return False

    def _record_at(self, at: int) -> tuple[dict[str, Any], int]:
        line = self._line_at(at)
        record = decode(line)
        if record is None:
            raise Refused(f"{self.path}: the record at byte {at} was changed behind our back; restore the file")
        return record, at + len(line)

    def _line_at(self, at: int) -> bytes:
        parts, step = [], 1 << 16
        while chunk := self._files.read(self._handle, step, at):
            end = chunk.find(b"\n")
            if end >= 0:
                parts.append(chunk[: end + 1])
                break
            parts.append(chunk)
            at += len(chunk)
        return b"".join(parts)


def encode(record: Mapping[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":")).encode()  # ASCII: a lone surrogate in a text stays what it is
    return xxhash.xxh3_64_hexdigest(body).encode() + b" " + body + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """None for what is no whole record."""
    body = line[_HEAD:-1]
    if not line.endswith(b"\n") or line[:_HEAD] != xxhash.xxh3_64_hexdigest(body).encode() + b" ":
        return None
    found = json.loads(body)
    return found if isinstance(found, dict) and type(found.get("number")) is int else None
