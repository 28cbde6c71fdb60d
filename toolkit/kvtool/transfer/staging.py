"""Staging: the registered memory that one-sided transfers land in and leave from.

One slab, prefaulted and registered once (registration costs more than a block's transfer), cut into equal slots. Slots
are handed out in batches and given back by whoever took them. The number is fixed: who wants more waits up to a
deadline and is then told how many are out and how many are held.

**Held slots.** A transfer that was given up may still write: NIXL 1.5 lets a posted read be released, and its peer
removed, and over TCP the bytes arrived all the same when a stopped peer went on. So the slots of an abandoned transfer
are held until the transfer itself is over, whatever their taker does, and are not handed out before.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from threading import Condition
from types import TracebackType

import numpy as np

from kvtool.errors import Unavailable
from kvtool.units import show_size


class StagingExhausted(Unavailable):
    """No free slots before the deadline; callers should give batches back sooner, or ask for fewer blocks."""


class Staged(Sequence[memoryview]):
    """Slots handed out together, as writable views of the sizes asked for. A context manager: leaving gives back.

    After `release` the views raise ValueError; arrays over them must not be used any more, as others write there.
    """

    def __init__(self, staging: Staging, slots: list[int], views: list[memoryview]) -> None:
        self.slots = slots
        self._staging = staging
        self._views = views
        self._released = False

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # the two overloads say nothing more
        return self._views[index]

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._views)

    def release(self) -> None:
        """Give the slots back. Again is a no-op."""
        if self._released:
            return
        self._released = True
        for view in self._views:
            try:
                view.release()
            except BufferError:
                pass  # an array over it is alive; its owner was told
        self._staging.give(self.slots)

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Staging:
    """`size` bytes in slots of `slot_size` (rounded up to a page). Thread-safe. `prefault` False: they become memory as
    they are used, for those who register nothing."""

    def __init__(self, size: int, slot_size: int, prefault: bool = True) -> None:
        """
        Raises:
            ValueError: no slot fits.
        """
        if slot_size <= 0 or size < slot_size:
            raise ValueError(f"wanted room for at least one slot of {slot_size} bytes, got {size}")
        self.slot_size = -(-slot_size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.slots = max(1, size // self.slot_size)
        self.slab = mmap.mmap(-1, self.slots * self.slot_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            self.slab.madvise(mmap.MADV_HUGEPAGE)
            self.slab.madvise(mmap.MADV_DONTDUMP)
        except OSError:
            pass  # an old kernel
        array = np.frombuffer(self.slab, np.uint8)
        if prefault:
            array[:: mmap.PAGESIZE] = 0  # fault it all in now
        self.address = int(array.ctypes.data)
        self._view = memoryview(self.slab)
        self._free = list(range(self.slots))[::-1]  # the lowest, and the warmest, are handed out first
        self._holds: dict[int, int] = {}
        self._given_while_held: set[int] = set()
        self._changed = Condition()

    def take(self, sizes: Sequence[int], deadline_s: float) -> Staged:
        """One slot for each of `sizes`; waits for other takers until `deadline_s` (time.monotonic).

        Raises:
            ValueError: a size is negative or larger than a slot, or more slots than there are.
            StagingExhausted: not enough slots came back in time.
        """
        if any(not 0 <= size <= self.slot_size for size in sizes):
            raise ValueError(f"wanted sizes of 0 to {self.slot_size} bytes (one slot), got {max(sizes)}")
        if len(sizes) > self.slots:
            raise ValueError(f"wanted {len(sizes)} slots at once, staging has {self.slots}; read in smaller batches")
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self._free) >= len(sizes), timeout=max(0.0, deadline_s - time.monotonic())
            ):
                raise StagingExhausted(
                    f"wanted {len(sizes)} staging slots of {show_size(self.slot_size)}, {len(self._free)} of "
                    f"{self.slots} are free ({self.held} held by abandoned transfers); give batches back sooner or "
                    "raise the staging size"
                )
            slots = [self._free.pop() for _ in sizes]
        starts = [slot * self.slot_size for slot in slots]
        return Staged(self, slots, [self._view[at : at + size] for at, size in zip(starts, sizes, strict=True)])

    def give(self, slots: Sequence[int]) -> None:
        """Slots come back from their taker; those that are held stay out until the hold ends."""
        with self._changed:
            for slot in slots:
                if slot in self._holds:
                    self._given_while_held.add(slot)
                else:
                    self._free.append(slot)
            self._changed.notify_all()

    def hold(self, slots: Sequence[int]) -> None:
        """A transfer on these slots was abandoned and may still touch them."""
        with self._changed:
            for slot in slots:
                self._holds[slot] = self._holds.get(slot, 0) + 1

    def unhold(self, slots: Sequence[int]) -> None:
        """That transfer is over."""
        with self._changed:
            for slot in slots:
                self._holds[slot] -= 1
                if self._holds[slot] == 0:
                    del self._holds[slot]
                    if slot in self._given_while_held:
                        self._given_while_held.remove(slot)
                        self._free.append(slot)
            self._changed.notify_all()

    @property
    def held(self) -> int:
        """Slots that abandoned transfers may still touch."""
        return len(self._holds)

    @property
    def free(self) -> int:
        return len(self._free)

    def slot_of(self, address: int) -> int | None:
        """The slot that `address` lies in, None when it is not staging memory."""
        at = address - self.address
        return at // self.slot_size if 0 <= at < self.slots * self.slot_size else None
