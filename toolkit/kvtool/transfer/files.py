"""Block files: slots for blocks in one preallocated file, read and written past the page cache.

The pool's file tier is one file a rank. Every byte is allocated when it is made, so a cap is a cap and a full disk is a
sentence at start and not an error in a put. O_DIRECT, because a cache of a cache only costs memory and a copy; page
aligned memory (slots of a segment) goes to the disk as it is, other memory through a few aligned buffers. File systems
that refuse O_DIRECT (tmpfs, some overlays) are read and written through the page cache, and `how` says so.

    [ head 4 KiB | self-test area ][ slot 0: header 4 KiB | payload ][ slot 1: ...

A slot's header says what a restart must know of the block, under a checksum of its own. Whatever a crash leaves, a
reader finds the whole block that it asked for or `BlockCorrupt`: the checksum in the header, old or new, fails over
bytes that are part old and part new. So header and payload go in one request, in any order that the disk likes. A
`durable` write is done when it is on the disk; all that are waiting share one sync.

Work runs on an executor (a few threads of its own, if none is given) and is handed out as futures; reads and durable
writes, which somebody waits for, go before the rest. Memory given to
`read` and `write` belongs to the file until the future is done, also when a caller stops waiting: a time limit on
`result()` does not stop the disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvtool.errors import BlockCorrupt, Unavailable
from kvtool.kv.block import KEY_SIZE
from kvtool.transfer.checksum import as_bytes, checksum, copy_checksum
from kvtool.transfer.disk import Disk, FileDisk
from kvtool.transfer.filehead import KEPT_DEFAULT, PAGE, SEALED, FileHead, Kept, SlotHeader, page_up, put_header
from kvtool.transfer.filethreads import FileThreads
from kvtool.transfer.groupsync import GroupSync
from kvtool.transfer.pages import Pages, fits_direct

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

SCAN_STEP = 64
"""Headers that one task of a scan reads."""

_T = TypeVar("_T")


class Sealer(Protocol):
    """Encrypts payloads on their way to a file (see `transfer.crypt`)."""

    @property
    def key_check(self) -> str:
        """Differs between keys, and tells nothing else about them."""
        ...

    def seal(self, payload: memoryview, out: memoryview, header: SlotHeader) -> SlotHeader:
        """Encrypt `payload` into `out`, of the same size; the header that goes with it."""
        ...

    def reveal(self, header: SlotHeader) -> SlotHeader:
        """`header` as it was given to `seal`, with the checksum of the plain bytes."""
        ...

    def unseal(self, stored: memoryview, out: memoryview, header: SlotHeader) -> bool:
        """Decrypt `stored` into `out`; False when it is not what was sealed with that header."""
        ...


class BlockFile:
    """`slots` slots of up to `slot_size` bytes. Thread-safe; two users of one slot are the caller's to keep apart.
    `how` is "direct", or "buffered: <why>"."""

    def __init__(
        self,
        path: Path | None,
        slot_size: int,
        slots: int,
        *,
        fresh: bool = False,
        direct: bool = True,
        threads: int = 8,
        setting: str = "pool.file_size",
        fingerprint: str = "",
        layout: str = "",
        sealer: Sealer | None = None,
        disk: Disk | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Open the file, or make it. `fresh` forgets what it held; a file that had more slots keeps what fits. Locked
        against other processes while open. `disk` and `executor` instead of a real file at `path` and threads; they
        are this file's from here on, and closed with it.

        Raises:
            Refused: the directory is missing, the disk has no room, the file is in use, not ours, of another layout or
                key, or does not give back what was written.
        """
        if slot_size <= 0 or slots <= 0:
            raise ValueError(f"wanted a positive slot size and count, got {slot_size} and {slots}")
        if disk is None:
            if path is None:
                raise ValueError("wanted the path of a block file, or a disk")
            disk = FileDisk(path, setting)
        self.slot_size, self.slots = slot_size, slots
        self.stride = PAGE + page_up(slot_size)
        self.size = (slots + 1) * self.stride
        self._pages, self._sealer = Pages(disk, self.stride), sealer
        self._group = GroupSync(self._pages.sync, lambda task: self._submit(lambda _: task(), 0, urgent=True))
        self._closed = False
        made = False
        try:
            made = disk.size() == 0
            head = FileHead(slot_size, slots, fingerprint, layout, sealer.key_check if sealer else "")
            self._pages.prepare(head, self.size, fresh, setting)
            self.how = self._pages.choose(direct)
        except BaseException:
            if made:
                disk.remove()
            disk.close()
            raise
        self._executor = executor or FileThreads(threads)
        self._at_once = self._executor.urgent if isinstance(self._executor, FileThreads) else self._executor.submit
        self._pending: set[Future[object]] = set()
        log.info("block file open path=%s slots=%d bytes=%d how=%s", disk.name, slots, self.size, self.how)

    @staticmethod
    def slots_under(cap: int, slot_size: int) -> int:
        """How many slots a file of at most `cap` bytes has; 0 when not even one fits."""
        return max(0, cap // (PAGE + page_up(slot_size)) - 1)

    def write(
        self,
        slot: int,
        data: Buffer,
        key: bytes,
        *,
        sum: int | None = None,
        generation: int = 0,
        parent: bytes | None = None,
        kept: Kept = KEPT_DEFAULT,
        durable: bool = False,
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
        header = SlotHeader(key, view.nbytes, 0, generation, parent, kept)
        written = self._submit(self._write, slot, view, header, sum, urgent=durable)
        return self._group.when_synced(written) if durable else written

    def read(self, slot: int, out: Buffer, key: bytes, *, generation: int | None = None) -> Future[SlotHeader]:
        """Fill `out`, of the block's size, with the block `key` (of `generation`, when given).

        The future raises BlockCorrupt when the slot holds anything but that whole block (`out` is then rubbish), and
        Unavailable on an I/O error.
        """
        view = as_bytes(out)
        if view.readonly or view.nbytes > self.slot_size:
            raise ValueError(f"wanted a writable buffer of at most {self.slot_size} bytes, got {view.nbytes}")
        return self._submit(self._read, slot, view, key, generation, urgent=True)

    def check(self, slot: int, key: bytes, size: int, *, generation: int | None = None) -> Future[SlotHeader]:
        """Read a block and throw it away; raises as `read` does."""
        return self._submit(self._check, slot, size, key, generation)

    def copy_out(self, slot: int, key: bytes, size: int, generation: int) -> Future[bytes]:
        """The record of a block as it is on the disk, header page and payload, checked; raises as `read` does."""
        return self._submit(self._copy_out, slot, size, key, generation)

    def take_in(self, record: memoryview, out: Buffer, key: bytes) -> SlotHeader:
        """Fill `out` with the block `key` out of its record, in the calling thread.

        Raises:
            BlockCorrupt: the record is anything but that whole block.
        """
        view = as_bytes(out)
        header = SlotHeader.unpack(record)
        wrong = header.differs(key, view.nbytes, None) if header else "no whole header"
        if wrong or header is None or len(record) != PAGE + view.nbytes:
            raise BlockCorrupt(f"wanted the record of block {key.hex()[:8]}, found {wrong or f'{len(record)} bytes'}")
        return self._open(header, record[PAGE:], view, key, "a record")

    def erase(self, slot: int) -> Future[None]:
        """Clear a slot's header, durably: it is found by nobody any more."""
        return self._group.when_synced(self._submit(self._erase, slot, urgent=True))

    def headers(self) -> Iterator[tuple[int, SlotHeader]]:
        """Slots whose header is whole, in order: what was here before a restart. Not checked against the payload; a
        slot that cannot be read has none."""
        tasks = [self._submit(self._scan, slot) for slot in range(0, self.slots, SCAN_STEP)]
        for task in tasks:
            yield from task.result()

    def sync(self) -> Future[None]:
        """Make every write that is done durable."""
        return self._submit(lambda _: self._pages.sync(), 0)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Drop what has not begun, wait for the rest, close. False when the disk did not answer in `timeout_s`; the
        file then stays open and locked until it does. Again is a no-op."""
        if self._closed:
            return True
        self._closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        _, running = wait(list(self._pending), timeout_s)
        if running:
            log.warning("block file slow to close path=%s running=%d", self._pages.name, len(running))
            return False
        self._executor.shutdown(wait=True)
        self._pages.disk.close()
        return True

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at(self, slot: int) -> int:
        return (slot + 1) * self.stride

    def _submit(self, work: Callable[..., _T], slot: int, *arguments: object, urgent: bool = False) -> Future[_T]:
        if not 0 <= slot < self.slots:
            raise ValueError(f"{self._pages.name} has slots 0 to {self.slots - 1}, got {slot}")
        if self._closed:
            raise Unavailable(f"block file {self._pages.name} is closed")
        try:
            future = (self._at_once if urgent else self._executor.submit)(work, slot, *arguments)
        except RuntimeError:  # closed since
            raise Unavailable(f"block file {self._pages.name} is closed") from None
        self._pending.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._pending.discard)
        return future

    # What runs on the executor

    def _write(self, slot: int, data: memoryview, header: SlotHeader, sum: int | None) -> None:
        size = data.nbytes
        with self._pages.room() as buffer:
            payload, room = data, buffer[PAGE : PAGE + page_up(size)]
            if self._sealer is not None:
                header = header._replace(checksum=checksum(data, header.key) if sum is None else sum)
                header = self._sealer.seal(data, room[:size], header)
                header = header._replace(stored=checksum(room[:size], header.key))
            else:
                if not fits_direct(data):
                    found = copy_checksum(room[:size], data, header.key)
                elif sum is None:
                    found = checksum(data, header.key)
                sum = found if sum is None else sum
                header = header._replace(checksum=sum, stored=sum)
            if self._sealer is not None or not fits_direct(data):
                room[size:] = bytes(len(room) - size)
                payload = room
            self._pages.write([put_header(buffer, header), payload], self._at(slot))

    def _erase(self, slot: int) -> None:
        with self._pages.room() as buffer:
            self._pages.write([put_header(buffer, None)], self._at(slot))

    def _read(self, slot: int, out: memoryview, key: bytes, generation: int | None) -> SlotHeader:
        with self._pages.room() as buffer:
            direct = self._sealer is None and fits_direct(out)
            payload = out if direct else buffer[PAGE : PAGE + page_up(out.nbytes)]
            header = self._load(slot, buffer[:PAGE], payload, key, out.nbytes, generation)
            return self._open(header, out if direct else payload[: out.nbytes], out, key, f"slot {slot}")

    def _open(self, header: SlotHeader, stored: memoryview, out: memoryview, key: bytes, where: str) -> SlotHeader:
        """Have the plain bytes of a payload in `out`, checked; `stored` may be `out` itself."""
        if header.flags & SEALED:
            if self._sealer is None or not self._sealer.unseal(stored, out, header):
                raise BlockCorrupt(f"{self._pages.name}, {where}: block {key.hex()[:8]} fails its tag")
            header, found = self._sealer.reveal(header), checksum(out, key)
        else:
            found = checksum(out, key) if stored is out or not out.nbytes else copy_checksum(out, stored, key)
        self._same(where, key, found, header.checksum)
        return header

    def _copy_out(self, slot: int, size: int, key: bytes, generation: int) -> bytes:
        with self._pages.room() as buffer:
            payload = buffer[PAGE : PAGE + page_up(size)]
            header = self._load(slot, buffer[:PAGE], payload, key, size, generation)
            self._same(f"slot {slot}", key, checksum(payload[:size], key), header.stored)
            return bytes(buffer[: PAGE + size])

    def _check(self, slot: int, size: int, key: bytes, generation: int | None) -> SlotHeader:
        with self._pages.room() as buffer:
            payload = buffer[PAGE : PAGE + page_up(size)]
            header = self._load(slot, buffer[:PAGE], payload, key, size, generation)
            self._same(f"slot {slot}", key, checksum(payload[:size], key), header.stored)
            return header

    def _load(
        self, slot: int, page: memoryview, payload: memoryview, key: bytes, size: int, generation: int | None
    ) -> SlotHeader:
        self._pages.read([page, payload], self._at(slot))
        header = SlotHeader.unpack(page)
        wrong = header.differs(key, size, generation) if header else "no whole header"
        if wrong or header is None:
            raise BlockCorrupt(f"{self._pages.name}, slot {slot}: wanted block {key.hex()[:8]}, found {wrong}")
        return header

    def _same(self, where: str, key: bytes, found: int, wanted: int) -> None:
        if found != wanted:
            raise BlockCorrupt(
                f"{self._pages.name}, {where}: block {key.hex()[:8]} is torn or damaged: checksum "
                f"{found & (2**64 - 1):016x}, its header says {wanted:016x}"
            )

    def _scan(self, first: int) -> list[tuple[int, SlotHeader]]:
        found = []
        with self._pages.room() as buffer:
            for slot in range(first, min(first + SCAN_STEP, self.slots)):
                try:
                    self._pages.read([buffer[:PAGE]], self._at(slot))
                except Unavailable as error:
                    log.warning("block file slot unreadable slot=%d why=%r", slot, str(error))
                    continue
                header = SlotHeader.unpack(buffer)
                if header is not None and header.size <= self.slot_size:
                    found.append((slot, self._sealer.reveal(header) if self._sealer else header))
        return found
