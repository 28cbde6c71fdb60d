"""The disk under a block file: the few calls that it makes, and the real ones.

Everything that a block file asks of the world goes through a `Disk`, so that a simulated one can tear, lose, delay and
refuse writes, run full, or lie about what it has synced, under the very code that runs in production. All calls give
`OSError` when they fail; what that means is said by whoever asked.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Protocol

from kvtool.errors import Refused
from kvtool.transfer.room import demand, file_room

LOCK_WAIT_S = 2.0
"""A process that was killed holds its lock until its last I/O has ended."""
_POLL_S = 0.02


class Disk(Protocol):
    """One file's worth of bytes. Calls may come from several threads; offsets and lengths are whole pages."""

    @property
    def name(self) -> str:
        """What people call it, for sentences."""
        ...

    def size(self) -> int:
        """Bytes that are there now; 0 when it is new."""
        ...

    def allocate(self, size: int) -> None:
        """Make it `size` bytes long, all of them taken on the disk; what was written before stays, as far as it fits.

        Raises:
            Refused: the disk is known to have no room for it.
            OSError: it ran out of room, or failed.
        """
        ...

    def preadv(self, views: list[memoryview], at: int) -> int:
        """Fill `views` from byte `at`; how many bytes came, 0 at the end of the file."""
        ...

    def pwritev(self, views: list[memoryview], at: int) -> int:
        """Write `views` at byte `at`; how many bytes went. Durable only after `sync`."""
        ...

    def sync(self) -> None:
        """Return when everything that was written before is durable."""
        ...

    def direct(self, on: bool) -> None:
        """Go past the page cache, or not. OSError where that cannot be."""
        ...

    def close(self) -> None: ...

    def remove(self) -> None:
        """Take away the file itself."""
        ...


class FileDisk:
    """A file of ours alone: mode 0600, locked against other processes, no symbolic link."""

    def __init__(self, path: Path, setting: str = "pool.file_size", lock_wait_s: float = 0.0) -> None:
        """Open or make it. `setting` is what people lower when there is no room; `lock_wait_s`: how long a lock that
        somebody else holds is waited for.

        Raises:
            Refused: it cannot be opened, is not ours, or is in use.
        """
        self.path, self._setting = path, setting
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise Refused(f"{path}: wanted a block file of ours there, opening gave: {error.strerror}") from None
        try:
            self._check_owner()
            self._lock(lock_wait_s)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def name(self) -> str:
        return str(self.path)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def allocate(self, size: int) -> None:
        found = os.fstat(self._fd)
        if found.st_size > size:
            os.ftruncate(self._fd, size)
        if size:
            demand(self.name, max(0, size - found.st_blocks * 512), [file_room(self.path.parent)], self._setting)
            os.posix_fallocate(self._fd, 0, size)

    def preadv(self, views: list[memoryview], at: int) -> int:
        return os.preadv(self._fd, views, at)

    def pwritev(self, views: list[memoryview], at: int) -> int:
        return os.pwritev(self._fd, views, at)

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _check_owner(self) -> None:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise Refused(
                f"{self.path}: wanted a file of user {os.geteuid()} with mode 0600, found "
                f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
            )

    def _lock(self, wait_s: float) -> None:
        until_s = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise Refused(f"{self.path} is in use by another process; give each rank its own file") from None
                time.sleep(_POLL_S)
