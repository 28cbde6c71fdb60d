"""Disks, in the place of `transfer.disk.FileDisk`: one file of pages that a crash, or its age, can damage.

What was written and not synced is lost by a power cut, page by page, each with even odds, and a page that was being
written is torn. A process that is killed loses nothing that its write call had taken: the kernel has it. A lying disk
says it synced and did not. Reads and writes take their time, and a slow disk takes long.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from kvtool.errors import Refused
from kvtool.sim.sched import Process
from kvtool.sim.world import World

PAGE = 4096
OPERATION_S = 80e-6
TORN_AT = 512
"""Disks write sectors whole."""


class Platter:
    """One file's bytes, which outlive the processes that use it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.pages: dict[int, bytes] = {}
        """As anybody reads them now."""
        self.unsynced: dict[int, bytes | None] = {}
        """Page -> what the medium holds; None: it was never written there."""
        self.size = 0
        self.holder: Process | None = None
        self.slow_until_s = self.failing_until_s = self.full_until_s = 0.0
        self.lies = False
        self.used = min(PAGE, world.block_size)
        """Bytes of a page that matter; rot elsewhere would go by unseen."""
        self.rotten = self.failures = self.cuts = 0

    @property
    def honest(self) -> bool:
        """Whether it did all along what disks promise."""
        return not (self.lies or self.rotten or self.failures)

    def power_cut(self) -> None:
        """What the medium does not hold is lost, some of it; the page under the head is torn."""
        rng, lost = self.world.rng, 0
        self.cuts += 1
        for number, old in sorted(self.unsynced.items()):
            if rng.random() < 0.5:
                continue  # it had reached the medium on its own
            new, before = self.pages[number], old or bytes(PAGE)
            if rng.random() < 0.2:
                at = rng.randrange(0, PAGE, TORN_AT)
                self.pages[number] = new[:at] + before[at:]
                self.world.journal.count("disk: torn page")
            else:
                self.pages[number] = before
            lost += 1
        self.unsynced.clear()
        if lost:
            self.world.journal.count("disk: unsynced page lost", lost)

    def rot(self) -> bool:
        """A bit of every tenth page turns, but for the file's head: without that there is no file."""
        rng, pages = self.world.rng, sorted(number for number in self.pages if number > 1)
        for number in pages:
            if rng.random() < 0.1:
                page = bytearray(self.pages[number])
                page[rng.randrange(self.used)] ^= 1 << rng.randrange(8)
                self.pages[number] = bytes(page)
                self.rotten += 1
                self.world.journal.count("disk: rotten page")
        return bool(pages)


class SimDisk:
    """A `transfer.disk.Disk`."""

    here: ClassVar[Callable[[], World]]

    def __init__(self, path: Path, setting: str = "pool.file_size", lock_wait_s: float = 0.0) -> None:
        self._world, self._path = SimDisk.here(), path
        self._platter = self._world.platter(str(path), lambda: Platter(self._world, path.name))
        process = self._world.process
        holder = self._platter.holder
        if holder is not None and not holder.dead and holder is not process:
            raise Refused(f"{path} is in use by another process; give each rank its own file")
        self._platter.holder = process

    @property
    def name(self) -> str:
        return str(self._path)

    def size(self) -> int:
        return int(self._platter.size)

    def allocate(self, size: int) -> None:
        platter = self._platter
        for number in [number for number in platter.pages if number * PAGE >= size]:
            del platter.pages[number]
            platter.unsynced.pop(number, None)
        platter.size = size

    def preadv(self, views: list[memoryview], at: int) -> int:
        self._operation()
        self._may_fail("read")
        total = max(0, min(sum(view.nbytes for view in views), self.size() - at))
        number, left = at // PAGE, total
        for view in views:
            flat, done = view.cast("B"), 0
            while done < flat.nbytes and left > 0:
                page = self._platter.pages.get(number, b"")
                take = min(PAGE, flat.nbytes - done, left)
                flat[done : done + take] = page[:take].ljust(take, b"\0")
                number, done, left = number + 1, done + take, left - take
        return total

    def pwritev(self, views: list[memoryview], at: int) -> int:
        """A page at a time, so that others see the write half done; and now and then not all of it."""
        self._operation()
        self._may_fail("write")
        world, platter = self._world, self._platter
        if world.sched.now_s < platter.full_until_s:
            world.journal.count("disk: full")
            raise OSError(errno.ENOSPC, "No space left on device")
        raw = b"".join(bytes(view) for view in views)
        if len(raw) > PAGE and world.rng.random() < 0.01:
            raw = raw[: world.rng.randrange(PAGE, len(raw))]
            world.journal.count("disk: short write")
        for start in range(0, len(raw), PAGE):
            if start and world.rng.random() < 0.1:
                world.sched.call()
                world.sched.sleep(20e-6)
            number, piece = (at + start) // PAGE, raw[start : start + PAGE]
            platter.unsynced.setdefault(number, platter.pages.get(number))
            platter.pages[number] = piece + platter.pages.get(number, bytes(PAGE))[len(piece) :]
        return len(raw)

    def sync(self) -> None:
        self._operation(5)
        self._may_fail("sync")
        if self._platter.lies:
            self._world.journal.count("disk: lying sync")
        else:
            self._platter.unsynced.clear()

    def direct(self, on: bool) -> None:
        pass

    def close(self) -> None:
        self._platter.holder = None

    def remove(self) -> None:
        self._platter.pages.clear()
        self._platter.unsynced.clear()
        self._platter.size = 0

    def _operation(self, factor: float = 1.0) -> None:
        world, platter = self._world, self._platter
        world.sched.call()
        took_s = OPERATION_S * factor * (1 + world.rng.random())
        if world.sched.now_s < platter.slow_until_s:
            took_s += world.rng.uniform(0.05, 1.0)
            world.journal.count("disk: slow operation")
        world.sched.sleep(took_s)

    def _may_fail(self, what: str) -> None:
        if self._world.sched.now_s < self._platter.failing_until_s and self._world.rng.random() < 0.5:
            self._world.journal.count(f"disk: failed {what}")
            self._platter.failures += 1
            raise OSError(errno.EIO, "Input/output error")
