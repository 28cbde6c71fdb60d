"""How a call waits: the one thing in which the two clients differ.

What a call does (`calls`, `asking`, `fetching`, `putting`) is written once, as coroutines that wait through a `Driver`
and in no other way. `Direct` blocks the calling thread inside each wait, so that such a coroutine never suspends and
`complete` runs it to its end by one `send`, which costs about as much as a function call. The asyncio driver (`aio`)
suspends instead.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from kvtool.pool.access import Access
from kvtool.pool.base import Path
from kvtool.pool.line import Line
from kvtool.pool.memory import SlotMemory

_T = TypeVar("_T")

Asked = tuple[Line, int]
"""A request that is on its way: the link, and its number there."""

SLICE_S = 0.001
UCX_SIZE = 2**62
"""Given to `work` for what waits for a transfer: as long as may be."""


class Driver(Protocol):
    """All deadlines are points on the client's clock, and every wait ends by them."""

    async def reach(self, access: Access, deadline_s: float) -> Path | None:
        """The path to a rank's bytes, opened, with its link up; None when there is none.

        Raises:
            Unavailable: it does not answer.
        """
        ...

    async def writable(self, access: Access, deadline_s: float) -> SlotMemory | None:
        """As `Access.writable`."""
        ...

    async def finish(self, asked: Asked, deadline_s: float) -> bytes:
        """As `Link.finish`."""
        ...

    async def race(self, groups: Sequence[Sequence[Asked]], until_s: float) -> int | None:
        """The first group all of whose requests are answered, or broke; None when none is until then."""
        ...

    async def work(self, size: int, job: Callable[[], _T]) -> _T:
        """Run what moves about `size` bytes, or waits for a transfer; to its end in any case."""
        ...


class Direct:
    """Waits in the calling thread."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s

    async def reach(self, access: Access, deadline_s: float) -> Path | None:
        if not access.link.usable:
            return None
        path = access.open(deadline_s)
        access.link.connect(deadline_s)
        return path

    async def writable(self, access: Access, deadline_s: float) -> SlotMemory | None:
        return access.writable(deadline_s)

    async def finish(self, asked: Asked, deadline_s: float) -> bytes:
        return asked[0].finish(asked[1], deadline_s)

    async def race(self, groups: Sequence[Sequence[Asked]], until_s: float) -> int | None:
        while True:
            for at, group in enumerate(groups):
                if all(link.wait(number, 0.0) for link, number in group):
                    return at
            now_s = self._now_s()
            if now_s >= until_s:
                return None
            slice_s = until_s if len(groups) == 1 else min(until_s, now_s + SLICE_S)
            for group in groups:
                late = next((asked for asked in group if not asked[0].wait(asked[1], 0.0)), None)
                if late is not None:
                    late[0].wait(late[1], slice_s)

    async def work(self, size: int, job: Callable[[], _T]) -> _T:
        return job()


def complete(call: Coroutine[Any, Any, _T]) -> _T:
    """Run a call whose waits do not suspend."""
    try:
        call.send(None)
    except StopIteration as end:
        value: _T = end.value
        return value
    call.close()
    raise AssertionError("a call suspended under a driver that waits in its thread")
