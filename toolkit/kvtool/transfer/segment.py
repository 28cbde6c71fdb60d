"""Segments: memory that processes of one node share, under /dev/shm.

The pool's DRAM tier is one segment a rank. Local clients map it and copy from it, so a hit on the same node is one
memcpy and no message with bytes in it. Opened by hand and not by `multiprocessing.shared_memory`, whose resource
tracker unlinks segments that belong to others when any process that attached them ends (CPython issue 82300).

A cap is a cap: every page is allocated before `create` returns (a segment that does not fit is a sentence now, not a
SIGBUS in a copy later), and prefaulted, so that no put pays for a page fault. Huge pages where the host allows them
for shared memory (/sys/kernel/mm/transparent_hugepage/shmem_enabled).

Nobody but the owner's user may read or plant a segment: mode 0600, created exclusively, links refused, and a segment
that belongs to another user or is open to others is refused. The owner never shrinks a segment, so a mapping stays
good after `unlink` and even after the owner is dead.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from kvtool.errors import ProtocolError, Refused, Unavailable
from kvtool.transfer.room import demand, rooms
from kvtool.units import show_size

SHM = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PREFIX_LENGTH_MIN = 4
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # Linux 5.14; not in mmap's names
_PREFAULT_STEP = 64 * 2**20  # a whole number of huge pages


class Segment:
    """One mapped segment. `view` is its memory: writable for the creator, read-only when attached as such.

    Make one with `create` or `attach`; as a context manager it closes (and does not unlink). Not thread-safe itself;
    the memory is as safe as its users make it.
    """

    def __init__(self, name: str, directory: Path, fd: int, size: int, writable: bool) -> None:
        """For `create` and `attach`: takes the open file `fd`, which stays the caller's to close."""
        self.name = name
        self.size = size
        self.writable = writable
        self._path = directory / name
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map: mmap.mmap | None = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=prot)
        self._map.madvise(mmap.MADV_DONTDUMP)  # prompts of users do not belong in core files
        self._view: memoryview | None = memoryview(self._map)

    @classmethod
    def create(
        cls,
        name: str,
        size: int,
        *,
        prefault: bool = True,
        directory: Path = SHM,
        setting: str = "pool.dram_size or pool.ranks",
    ) -> Segment:
        """A new zeroed segment of `size` bytes, all of them allocated; about 1-2 GB/s a core with `prefault`.

        `setting` is what the sentence tells the user to lower when there is no room.

        Raises:
            Refused: bad name or size, the name is taken, or /dev/shm, a control group or the host has no room.
        """
        path = _checked_path(directory, name)
        if size <= 0:
            raise Refused(f"segment {name}: wanted a positive size, got {size}")
        demand(f"segment {name}", size, rooms(directory), setting)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o600)
        except FileExistsError:
            raise Refused(
                f"segment {name}: {path} is there already; stop the pool that uses it, or remove it if that is dead"
            ) from None
        segment: Segment | None = None
        try:
            os.fchmod(fd, 0o600)  # whatever the umask left
            os.ftruncate(fd, size)
            segment = cls(name, directory, fd, size, writable=True)
            segment._allocate(fd, prefault)
        except BaseException as error:
            if segment is not None:
                segment.close()
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT, errno.EDQUOT):
                raise Refused(
                    f"segment {name}: wanted {show_size(size)}, {directory} ran out of room while it was allocated; "
                    f"lower {setting} or make room there"
                ) from None
            raise
        finally:
            os.close(fd)
        return segment

    @classmethod
    def attach(
        cls,
        name: str,
        writable: bool = False,
        *,
        size: int | None = None,
        prefault: bool = False,
        directory: Path = SHM,
    ) -> Segment:
        """Map the segment `name` of another process of this user; read-only unless `writable`.

        `size`, when the owner told it, must be what is found. `prefault` fills the page tables now (about 10 ms a
        256 MiB) so that first reads cost no faults.

        Raises:
            Unavailable: no such segment: its owner is gone, or was never on this node.
            Refused: not a file of ours (a link, another user's, open to others), or a bad name.
            ProtocolError: not of the size that its owner announced.
        """
        path = _checked_path(directory, name)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            raise Unavailable(
                f"segment {name} is not under {directory}: its owner is gone or on another node"
            ) from None
        except OSError as error:
            raise Refused(f"segment {name}: wanted a file of ours, opening {path} gave {error.strerror}") from None
        try:
            found = os.fstat(fd)
            _check_ours(path, found)
            if found.st_size == 0 or (size is not None and found.st_size != size):
                raise ProtocolError(
                    f"segment {name}: wanted {size if size is not None else 'some'} bytes as its owner announced, "
                    f"found {found.st_size}; is the state file from another run?"
                )
            segment = cls(name, directory, fd, found.st_size, writable)
        finally:
            os.close(fd)
        if prefault:
            segment._populate(_POPULATE_WRITE if writable else _POPULATE_READ)
        return segment

    def prefault_aside(self) -> None:
        """Fill the page tables in a thread of its own, for segments too large to wait for; from the start on."""
        held = self.view[:]  # what is being faulted in stays mapped
        advice = _POPULATE_WRITE if self.writable else _POPULATE_READ

        def run() -> None:
            libc, base = ctypes.CDLL(None), _address(held)
            for at in range(0, len(held), _PREFAULT_STEP):
                size = min(_PREFAULT_STEP, len(held) - at)
                if self._view is None or libc.madvise(ctypes.c_void_p(base + at), ctypes.c_size_t(size), advice):
                    break  # closed, or a kernel without it: then page by page, as they are used
            held.release()

        threading.Thread(target=run, name="kvtool-prefault", daemon=True).start()

    @property
    def view(self) -> memoryview:
        """The memory; valid until `close`.

        Raises:
            ValueError: the segment is closed.
        """
        if self._view is None:
            raise ValueError(f"segment {self.name} is closed")
        return self._view

    @property
    def address(self) -> int:
        """Where the segment is mapped in this process."""
        return _address(self.view)

    def close(self) -> bool:
        """Unmap. Again is a no-op.

        False when views of it (slices, arrays over it) are still alive: they stay good, and the memory is unmapped
        when the last of them goes. Nothing ever dangles.
        """
        view, mapped = self._view, self._map
        self._view = self._map = None
        if view is None or mapped is None:
            return True
        try:
            view.release()
            mapped.close()
        except BufferError:
            return False
        return True

    def unlink(self) -> None:
        """Remove the name: nobody can attach any more; who has it mapped keeps it. Again is a no-op."""
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _allocate(self, fd: int, prefault: bool) -> None:
        """Take every page. Faulting in first lets the kernel use huge pages, which fallocate on tmpfs would not;
        then fallocate takes whatever is not there yet, and is the guarantee."""
        assert self._map is not None
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without them
        faulted = prefault and self._populate(_POPULATE_WRITE)
        os.posix_fallocate(fd, 0, self.size)
        if prefault and not faulted:
            np.frombuffer(self.view, np.uint8)[:: mmap.PAGESIZE] = 0

    def _populate(self, advice: int) -> bool:
        """Fault all pages in, in parallel. False where the kernel cannot (before 5.14)."""
        libc, base = ctypes.CDLL(None, use_errno=True), self.address

        def step(at: int) -> int:
            size = min(_PREFAULT_STEP, self.size - at)
            ok = libc.madvise(ctypes.c_void_p(base + at), ctypes.c_size_t(size), advice) == 0
            return 0 if ok else ctypes.get_errno()

        threads = min(len(os.sched_getaffinity(0)), 8)
        with ThreadPoolExecutor(threads) as pool:
            errors = set(pool.map(step, range(0, self.size, _PREFAULT_STEP))) - {0}
        for code in errors - {errno.EINVAL}:
            raise OSError(code, os.strerror(code))
        return not errors


def unlink_prefix(prefix: str, directory: Path = SHM) -> list[str]:
    """Remove the segments of this user whose names start with `prefix`; returns their names, sorted.

    For what a killed pool left behind. Files of other users and links are left alone.

    Raises:
        Refused: a prefix shorter than four characters or with characters that no segment name has.
    """
    if len(prefix) < _PREFIX_LENGTH_MIN or not _NAME.fullmatch(prefix):
        raise Refused(f"will not remove segments by the prefix {prefix!r}: wanted four or more of A-Z a-z 0-9 . _ -")
    removed = []
    for path in sorted(directory.glob(f"{prefix}*")):
        try:
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                path.unlink()
                removed.append(path.name)
        except FileNotFoundError:
            pass  # somebody else was faster
    return removed


def _checked_path(directory: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise Refused(f"segment name {name!r}: wanted 1 to 200 of A-Z a-z 0-9 . _ -, not starting with . _ -")
    return directory / name


def _check_ours(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Refused(
            f"{path} is not a segment of ours: wanted a file of user {os.geteuid()} with mode 0600, found "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        )


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
