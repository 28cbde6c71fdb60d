"""Shared memory, in the place of `transfer.segment.Segment`: bytes that several processes see at once.

A mapping outlives the segment's name and its owner, as it does on Linux.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, ClassVar

from kvtool.errors import Unavailable


class Segment:
    """`names` gives the segments of the calling process's host; `keep` holds memory until the run is over."""

    names: ClassVar[Callable[[], dict[str, Segment]]]
    keep: ClassVar[Callable[[mmap.mmap], None]]

    def __init__(self, name: str, memory: mmap.mmap, writable: bool) -> None:
        self.name, self.size, self.writable = name, len(memory), writable
        self.memory = memory
        self.view = memoryview(memory) if writable else memoryview(memory).toreadonly()

    @classmethod
    def create(cls, name: str, size: int, *_: Any, **__: Any) -> Segment:
        memory = mmap.mmap(-1, size)
        cls.keep(memory)
        segment = cls.names()[name] = cls(name, memory, True)
        return segment

    @classmethod
    def attach(cls, name: str, writable: bool = False, *, size: int | None = None, **_: Any) -> Segment:
        """
        Raises:
            Unavailable: there is none of that name.
        """
        found = cls.names().get(name)
        if found is None:
            raise Unavailable(f"/dev/shm/{name}: no such segment")
        return cls(name, found.memory, writable)

    def close(self) -> bool:
        return True  # views of it may be alive; the memory goes with the last of them

    def unlink(self) -> None:
        type(self).names().pop(self.name, None)
