"""Pages of a disk: reads and writes that are whole or an error, aligned room for them, and opening a file so that what
it holds is known to be ours.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvtool.errors import PoolFull, Refused, Unavailable
from kvtool.transfer.disk import Disk
from kvtool.transfer.filehead import HEAD_SIZE, PAGE, FileHead, is_ours, rest_of
from kvtool.units import show_size

log = logging.getLogger(__name__)


class Pages:
    """`disk`, in whole pages, with room of `stride` bytes for each request that runs."""

    def __init__(self, disk: Disk, stride: int) -> None:
        self.disk, self.stride = disk, stride
        self.name = disk.name
        self._room: deque[memoryview] = deque()

    @contextmanager
    def room(self) -> Iterator[memoryview]:
        """Aligned room for a header and a payload; what is in it is undefined."""
        try:
            buffer = self._room.pop()
        except IndexError:
            buffer = memoryview(mmap.mmap(-1, self.stride))
        try:
            yield buffer
        finally:
            self._room.append(buffer)

    def read(self, views: list[memoryview], at: int) -> None:
        self._move(self.disk.preadv, views, at)

    def write(self, views: list[memoryview], at: int) -> None:
        self._move(self.disk.pwritev, views, at)

    def sync(self) -> None:
        try:
            self.disk.sync()
        except OSError as error:
            raise Unavailable(f"{self.name}: {error.strerror} in fdatasync; the disk may be failing") from error

    def _move(self, call: Callable[[list[memoryview], int], int], views: list[memoryview], at: int) -> None:
        """preadv or pwritev, all of it: after a short one on from the last whole page."""
        done, size = 0, sum(view.nbytes for view in views)
        while done < size:
            try:
                moved = call(rest_of(views, done), at + done)
            except OSError as error:
                where = f"{self.name}, byte {at + done}: {error.strerror}"
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise PoolFull(f"{where}, though the file is preallocated; make room on the disk") from None
                raise Unavailable(f"{where}; the disk may be failing") from error
            ahead = done + moved if done + moved == size else (done + moved) // PAGE * PAGE
            if ahead <= done:
                raise Unavailable(f"{self.name}: no progress at byte {at + done}; was the file cut short?")
            done = ahead

    def prepare(self, wanted: FileHead, size: int, fresh: bool, setting: str) -> None:
        """Check what is there, take what is not allocated yet, write the head."""
        with self.room() as buffer:
            head = buffer[:PAGE]
            if not fresh and self.disk.size():
                fresh = not self._matches(head, wanted)
            try:
                if fresh:
                    self.disk.allocate(0)
                self.disk.allocate(size)
            except OSError as error:
                raise Refused(
                    f"{self.name}: wanted {show_size(size)}, the disk ran full ({error.strerror}); lower {setting}"
                ) from None
            head[:] = wanted.pack() + bytes(PAGE - HEAD_SIZE)
            self.write([head], 0)
            self.sync()

    def _matches(self, page: memoryview, wanted: FileHead) -> bool:
        """Whether the file's blocks can be ours. One whose head is damaged or was never written begins afresh.

        Raises:
            Refused: it holds something else.
        """
        page[:] = bytes(PAGE)
        if self.disk.size() >= PAGE:
            self.read([page], 0)
        raw = bytes(page)
        if raw == bytes(PAGE) and self.disk.size() >= PAGE:
            return False
        if not is_ours(raw):
            raise Refused(f"{self.name}: wanted a block file, found something else; move it away or remove it")
        found = FileHead.unpack(raw)
        if found is None:
            log.warning("block file head damaged, its blocks are lost path=%s", self.name)
            return False
        if found._replace(slots=wanted.slots, key_check="") != wanted._replace(key_check=""):
            raise Refused(
                f"{self.name}: wanted {wanted}, found {found}; give each layout its own file or pool name, or "
                "remove this one"
            )
        if found.key_check != wanted.key_check:
            raise Refused(_other_key(self.name, found.key_check, wanted.key_check))
        return True

    def choose(self, direct: bool) -> str:
        """Self-test: what was written must come back. O_DIRECT first, then the page cache."""
        why = "as asked"
        if direct:
            try:
                self.disk.direct(True)
                self._self_test()
                return "direct"
            except (OSError, Unavailable) as error:
                why = f"no O_DIRECT here ({error.strerror if isinstance(error, OSError) else error.__cause__})"
                self.disk.direct(False)
        self._self_test()
        return f"buffered: {why}"

    def _self_test(self) -> None:
        size = min(self.stride - PAGE, 64 * PAGE)
        with self.room() as buffer:
            view = buffer[:size]
            sample = os.urandom(size)
            view[:] = sample
            self.write([view], PAGE)
            view[:] = bytes(size)
            self.read([view], PAGE)
            if view != sample:
                raise Refused(f"{self.name}: {size} bytes written did not come back the same; do not trust this disk")


def fits_direct(data: memoryview) -> bool:
    """Whether O_DIRECT takes `data` as it is: whole pages at a page's start."""
    return data.nbytes > 0 and data.nbytes % PAGE == 0 and np.frombuffer(data, np.uint8).ctypes.data % PAGE == 0


def _other_key(name: str, found: str, wanted: str) -> str:
    if not found:
        return f"{name}: wanted an encrypted block file, found one that is not; remove it, or unset pool.file_key"
    if not wanted:
        return (
            f"{name}: wanted a block file without encryption, found an encrypted one; set pool.file_key, or remove it"
        )
    return f"{name}: wanted blocks encrypted with the key of pool.file_key, found another's; give that key or remove it"
