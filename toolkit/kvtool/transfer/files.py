"""Block files: slots for blocks in one preallocated file, read and written past the page cache.

The pool's file tier is one file a rank. Every byte is allocated when it is made, so a cap is a cap and a full disk is a
sentence at start and not an error in a put. O_DIRECT, because a cache of a cache only costs memory and a copy; page
aligned memory (slots of a segment) goes to the disk as it is, other memory through a few aligned buffers. File systems
that refuse O_DIRECT (tmpfs, some overlays) are read and written through the page cache, and `how` says so.

    [ head 4 KiB | self-test area ][ slot 0: header 4 KiB | payload ][ slot 1: ...

A slot's header holds key, length, checksum and generation under a checksum of its own. Whatever a crash leaves, a
reader finds the whole block that it asked for or `BlockCorrupt`: the checksum in the header, old or new, fails over
bytes that are part old and part new. With `fsync` the header is written after its payload is on the disk, and a write
is durable when its future is done; without, both go in one request, which is a third faster.

Work runs on a few threads and is handed out as futures. Memory given to `read` and `write` belongs to the file until
the future is done, also when a caller stops waiting: a time limit on `result()` does not stop the disk.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import queue
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvtool.errors import BlockCorrupt, PoolFull, Refused, Unavailable
from kvtool.kv.block import KEY_SIZE
from kvtool.transfer.checksum import as_bytes, checksum, copy_checksum
from kvtool.transfer.filehead import HEAD_SIZE, PAGE, SlotHeader, pack_head, page_of, page_up, rest_of, shape_of
from kvtool.transfer.room import demand, file_room
from kvtool.units import show_size

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class BlockFile:
    """`slots` slots of up to `slot_size` bytes in the file `path`. Thread-safe; two users of one slot are the caller's
    to keep apart. `how` is "direct", or "buffered: <why>"."""

    def __init__(
        self,
        path: Path,
        slot_size: int,
        slots: int,
        *,
        fresh: bool = False,
        fsync: bool = False,
        direct: bool = True,
        threads: int = 4,
        setting: str = "pool.file_size",
    ) -> None:
        """Open the file, or make it. `fresh` forgets what it held. Locked against other processes while open.

        Raises:
            Refused: the directory is missing, the disk has no room, the file is in use, not ours, of another shape,
                or does not give back what was written.
        """
        if slot_size <= 0 or slots <= 0:
            raise ValueError(f"wanted a positive slot size and count, got {slot_size} and {slots}")
        self.path, self.slot_size, self.slots = path, slot_size, slots
        self.stride = PAGE + page_up(slot_size)
        self.size = (slots + 1) * self.stride
        self._fsync = fsync
        self._fd, made = _open(path, self.size, fresh, setting)
        self._closed = False
        try:
            self._prepare(setting)
            self._buffers: queue.LifoQueue[memoryview] = queue.LifoQueue()
            for _ in range(threads):
                self._buffers.put(memoryview(mmap.mmap(-1, self.stride)))
            self.how = self._choose(direct)
        except BaseException:
            if made:
                path.unlink()
            os.close(self._fd)
            raise
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvtool-file")
        self._pending: set[Future[object]] = set()
        log.info("block file open path=%s slots=%d bytes=%d how=%s", path, slots, self.size, self.how)

    @staticmethod
    def slots_under(cap: int, slot_size: int) -> int:
        """How many slots a file of at most `cap` bytes has; 0 when not even one fits."""
        return max(0, cap // (PAGE + page_up(slot_size)) - 1)

    def write(
        self, slot: int, data: Buffer, key: bytes, *, sum: int | None = None, generation: int = 0
    ) -> Future[None]:
        """Store `data` under `key`; `sum` is its checksum when the caller has it.

        The future raises PoolFull (a copy-on-write disk ran full), Unavailable (an I/O error).
        """
        view = as_bytes(data)
        if len(key) != KEY_SIZE or view.nbytes > self.slot_size:
            raise ValueError(
                f"wanted a key of {KEY_SIZE} bytes and at most {self.slot_size} of data, got {len(key)} and "
                f"{view.nbytes}"
            )
        return self._submit(self._write, slot, view, key, sum, generation)

    def read(self, slot: int, out: Buffer, key: bytes, *, generation: int | None = None) -> Future[SlotHeader]:
        """Fill `out`, of the block's size, with the block `key` (of `generation`, when given).

        The future raises BlockCorrupt when the slot holds anything but that whole block (`out` is then rubbish), and
        Unavailable on an I/O error.
        """
        view = as_bytes(out)
        if view.readonly or view.nbytes > self.slot_size:
            raise ValueError(f"wanted a writable buffer of at most {self.slot_size} bytes, got {view.nbytes}")
        return self._submit(self._read, slot, view, key, generation)

    def erase(self, slot: int) -> Future[None]:
        """Clear a slot's header: it is found by nobody any more."""
        return self._submit(self._put_header, slot, None)

    def headers(self) -> Iterator[tuple[int, SlotHeader]]:
        """Slots whose header is whole, in order: what was here before a restart. Not checked against the payload."""
        page = memoryview(mmap.mmap(-1, PAGE))
        for slot in range(self.slots):
            self._move(os.preadv, [page], self._at(slot))
            header = SlotHeader.unpack(page)
            if header is not None:
                yield slot, header

    def sync(self) -> Future[None]:
        """Make every write that is done durable."""
        return self._submit(self._sync, 0)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Drop what has not begun, wait for the rest, close. False when the disk did not answer in `timeout_s`; the
        file then stays open and locked until it does. Again is a no-op."""
        if self._closed:
            return True
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        _, running = wait(list(self._pending), timeout_s)
        if running:
            log.warning("block file slow to close path=%s running=%d", self.path, len(running))
            return False
        self._threads.shutdown(wait=True)
        os.close(self._fd)
        return True

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at(self, slot: int) -> int:
        return (slot + 1) * self.stride

    def _submit(self, work: Callable[..., _T], slot: int, *arguments: object) -> Future[_T]:
        if not 0 <= slot < self.slots:
            raise ValueError(f"{self.path} has slots 0 to {self.slots - 1}, got {slot}")
        if self._closed:
            raise Unavailable(f"block file {self.path} is closed")
        try:
            future = self._threads.submit(work, slot, *arguments)
        except RuntimeError:  # closed since
            raise Unavailable(f"block file {self.path} is closed") from None
        self._pending.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._pending.discard)
        return future

    def _write(self, slot: int, data: memoryview, key: bytes, sum: int | None, generation: int) -> None:
        at, buffer = self._at(slot), None
        try:
            if not self._fits_direct(data):
                buffer = self._buffers.get_nowait()  # one a thread: never empty
                copy = buffer[: data.nbytes]
                found = copy_checksum(copy, data, key)
                sum = found if sum is None else sum
                buffer[data.nbytes : page_up(data.nbytes)] = bytes(page_up(data.nbytes) - data.nbytes)
                payload = buffer[: page_up(data.nbytes)]
            else:
                sum = checksum(data, key) if sum is None else sum
                payload = data
            header = SlotHeader(key, data.nbytes, sum, generation)
            if not self._fsync:
                self._move(os.pwritev, [page_of(header), payload], at)
                return
            self._move(os.pwritev, [payload], at + PAGE)
            self._sync()
            self._put_header(slot, header)
        finally:
            if buffer is not None:
                self._buffers.put(buffer)

    def _put_header(self, slot: int, header: SlotHeader | None) -> None:
        self._move(os.pwritev, [page_of(header)], self._at(slot))
        if self._fsync:
            self._sync()

    def _read(self, slot: int, out: memoryview, key: bytes, generation: int | None) -> SlotHeader:
        buffer = self._buffers.get_nowait()
        try:
            header_page = buffer[:PAGE]
            direct = self._fits_direct(out)
            payload = out if direct else buffer[PAGE : PAGE + page_up(out.nbytes)]
            self._move(os.preadv, [header_page, payload], self._at(slot))
            header = SlotHeader.unpack(header_page)
            wrong = header.differs(key, out.nbytes, generation) if header else "no whole header"
            if wrong or header is None:
                raise BlockCorrupt(f"{self.path}, slot {slot}: wanted block {key.hex()[:8]}, found {wrong}")
            found = checksum(out, key) if direct else copy_checksum(out, payload[: out.nbytes], key)
            if found != header.checksum:
                raise BlockCorrupt(
                    f"{self.path}, slot {slot}: block {key.hex()[:8]} is torn or damaged: checksum {found:016x}, "
                    f"its header says {header.checksum:016x}"
                )
            return header
        finally:
            self._buffers.put(buffer)

    def _fits_direct(self, data: memoryview) -> bool:
        return data.nbytes > 0 and data.nbytes % PAGE == 0 and np.frombuffer(data, np.uint8).ctypes.data % PAGE == 0

    def _move(self, call: Callable[[int, list[memoryview], int], int], views: list[memoryview], at: int) -> None:
        """preadv or pwritev, all of it: after a short one on from the last whole page."""
        done, size = 0, sum(view.nbytes for view in views)
        while done < size:
            try:
                moved = call(self._fd, rest_of(views, done), at + done)
            except OSError as error:
                where = f"{self.path}, byte {at + done}: {error.strerror}"
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise PoolFull(f"{where}, though the file is preallocated; make room on the disk") from None
                raise Unavailable(f"{where}; the disk may be failing") from error
            ahead = done + moved if done + moved == size else (done + moved) // PAGE * PAGE
            if ahead <= done:
                raise Unavailable(f"{self.path}: no progress at byte {at + done}; was the file cut short?")
            done = ahead

    def _sync(self, _slot: int = 0) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise Unavailable(f"{self.path}: {error.strerror} in fdatasync; the disk may be failing") from error

    def _prepare(self, setting: str) -> None:
        """Take what is not allocated yet, and check or write the head."""
        try:
            os.posix_fallocate(self._fd, 0, self.size)
        except OSError as error:
            raise Refused(
                f"{self.path}: wanted {show_size(self.size)}, the disk ran full ({error.strerror}); lower {setting}"
            ) from None
        head, wanted = os.pread(self._fd, HEAD_SIZE, 0), pack_head(self.slot_size, self.slots)
        if head == bytes(HEAD_SIZE):
            os.pwrite(self._fd, wanted, 0)
            os.fsync(self._fd)
        elif head != wanted:
            raise Refused(
                f"{self.path}: wanted a block file of {self.slots} slots of {self.slot_size} bytes, found "
                f"{shape_of(head)}; give each layout and size its own file, or remove this one"
            )

    def _choose(self, direct: bool) -> str:
        """Self-test: what was written must come back. O_DIRECT first, then the page cache."""
        flags, why = fcntl.fcntl(self._fd, fcntl.F_GETFL), "as asked"
        if direct:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
                self._self_test()
                return "direct"
            except (OSError, Unavailable) as error:
                why = f"no O_DIRECT here ({error.strerror if isinstance(error, OSError) else error.__cause__})"
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
        self._self_test()
        return f"buffered: {why}"

    def _self_test(self) -> None:
        size = min(self.stride - PAGE, 64 * PAGE)
        buffer = self._buffers.get_nowait()
        view = buffer[:size]
        try:
            sample = os.urandom(size)
            view[:] = sample
            self._move(os.pwritev, [view], PAGE)
            view[:] = bytes(size)
            self._move(os.preadv, [view], PAGE)
            if view != sample:
                raise Refused(f"{self.path}: {size} bytes written did not come back the same; do not trust this disk")
        finally:
            self._buffers.put(buffer)


def _open(path: Path, size: int, fresh: bool, setting: str) -> tuple[int, bool]:
    """The file, ours alone and locked, of `size` bytes or (True) empty; removed again when empty and without room."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise Refused(f"{path}: wanted a block file of ours there, opening gave: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise Refused(
                f"{path}: wanted a file of user {os.geteuid()} with mode 0600, found {stat.filemode(found.st_mode)} of "
                f"user {found.st_uid}"
            )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{path} is in use by another process; give each rank its own file") from None
        if fresh:
            os.ftruncate(fd, 0)
        elif found.st_size not in (0, size):
            raise Refused(
                f"{path}: wanted {size} bytes for this slot size and count, found {found.st_size} with "
                f"{shape_of(os.pread(fd, HEAD_SIZE, 0))}; give each layout and size its own file, or remove this one"
            )
        found = os.fstat(fd)
        made = found.st_size == 0
        try:
            demand(f"{path}", max(0, size - found.st_blocks * 512), [file_room(path.parent)], setting)
        except Refused:
            if made:
                path.unlink()
            raise
    except BaseException:
        os.close(fd)
        raise
    return fd, made
