"""A client of the pool for asyncio: the calls of `PoolClient`, to await.

What a call does is the same code (`driver`). Here its waits are the event loop's: one socket a rank, watched by the
loop, and no thread for a call. A few threads make connections, map memory, wait for UCX transfers, and copy or hash
what is larger than a MiB, so that the loop goes on meanwhile.

**Cancelling a task** ends its call at its next wait: leases are released, reservations aborted, and answers that come
later are undone. A copy that is under way in a thread is waited for first: memory is not given back while it is being
written to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from kvtool.errors import PoolUnavailable
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.kv.retention import DEFAULT, Retention
from kvtool.pool.access import Access, UcxDoor
from kvtool.pool.aiolink import AioLink
from kvtool.pool.asking import Setting
from kvtool.pool.base import Cancelling, GetResult, Path, PoolCounts, Put, PutResult
from kvtool.pool.buffers import host_room, rooms_of
from kvtool.pool.calls import Calls
from kvtool.pool.client import check_path, tell_of_forks
from kvtool.pool.driver import Asked
from kvtool.pool.memory import SlotMemory
from kvtool.pool.moving import transfer
from kvtool.pool.outside import Outside
from kvtool.pool.ranks import Ranks
from kvtool.pool.reading import PoolRead
from kvtool.pool.state import RankState
from kvtool.pool.verbs import NOT_PICKLED, lengths_match, puts_of
from kvtool.pool.wire import Op
from kvtool.transfer.landing import Landing

INLINE_MAX = 2**20
"""Bytes that are copied on the event loop: handing them to a thread takes as long."""
THREADS = 4
_T = TypeVar("_T")


class AioOutside(Outside):
    """As `Outside`, with links for an event loop."""

    def access(self, rank: RankState, key: bytes, door: UcxDoor, on_epoch: Callable[[int], None]) -> Access:
        ucx = Access.wants_ucx(rank, self._path)
        link = AioLink(rank, key, self._layout, self._name, ucx, on_epoch, self.now_s, self._tenant)
        return Access(rank, link, self._layout, self._path, door, self.now_s)


class AioDriver:
    """A `driver.Driver` that suspends."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self.inline_max = INLINE_MAX

    async def reach(self, access: Access, deadline_s: float) -> Path | None:
        link = access.link
        assert isinstance(link, AioLink)
        if not link.usable:
            return None
        if not link.watched:
            async with link.connecting:
                if not link.watched:
                    await self._thread(lambda: link.connect(deadline_s))
                    link.watch()
        if access.path in (Path.SHM, Path.SOCKET):
            return access.path
        if link.ucx and access.path is None:
            await self._thread(access.prepare)
            await self.finish((link, link.start(Op.PING, b"", deadline_s)), deadline_s)
        return await self._thread(lambda: access.open(deadline_s, introduced=True))

    async def writable(self, access: Access, deadline_s: float) -> SlotMemory | None:
        return access.mapped or await self._thread(lambda: access.writable(deadline_s))

    async def finish(self, asked: Asked, deadline_s: float) -> bytes:
        link, number = asked
        assert isinstance(link, AioLink)
        answered = link.answered(number)
        if not answered.done():
            await asyncio.wait((answered,), timeout=max(0.0, deadline_s - self._now_s()))
        return link.finish(number, 0.0)

    async def race(self, groups: Sequence[Sequence[Asked]], until_s: float) -> int | None:
        waits = [[_answered(asked) for asked in group] for group in groups]
        while True:
            for at, group in enumerate(waits):
                if all(wait.done() for wait in group):
                    return at
            left_s = until_s - self._now_s()
            if left_s <= 0:
                return None
            pending = [wait for group in waits for wait in group if not wait.done()]
            await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def work(self, size: int, job: Callable[[], _T]) -> _T:
        return job() if size <= self.inline_max else await self._thread(job)

    async def _thread(self, job: Callable[[], _T]) -> _T:
        if self._closed:
            raise PoolUnavailable("this client of the pool is closed")
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, "kvtool-client")
        done = asyncio.get_running_loop().run_in_executor(self._threads, job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            while not done.done():  # whatever it writes to must stay ours until then
                try:
                    await asyncio.wait((done,))
                except asyncio.CancelledError:
                    continue
            if not done.cancelled():
                done.exception()  # seen
            raise

    def abandon(self) -> None:
        """In a child process, which has none of these threads."""
        self._closed, self._threads = True, None

    def close(self) -> None:
        self._closed = True
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)


def _answered(asked: Asked) -> asyncio.Future[None]:
    link, number = asked
    assert isinstance(link, AioLink)
    return link.answered(number)


class AsyncPoolClient:
    """As `PoolClient`, on the event loop that its first call runs on, and on no other. An async context manager.

    What `read` returns is released by leaving a plain `with`, which waits for nothing:

        with await pool.read(keys) as read: ...

    Raises:
        Refused: the pool that runs there holds another KV layout; both are in the sentence.
    """

    def __init__(
        self,
        state_file: FilePath,
        layout: KVLayout,
        *,
        path: str = "auto",
        client_name: str = "client",
        outside: AioOutside | None = None,
        namespace: str = "",
    ) -> None:
        check_path(path)
        self.layout = layout
        outside = outside or AioOutside(FilePath(state_file), layout, path, client_name)
        self._driver = AioDriver(outside.now_s)
        self._ranks = Ranks(outside, layout, client_name)
        self._calls = Calls(Setting(self._ranks, self._driver, namespace=namespace), layout)
        tell_of_forks(self)

    def _in_child(self) -> None:
        """A forked child has no use of its parent's event loop: there, this client is as if closed."""
        self._ranks.abandon()
        self._driver.abandon()

    async def match(self, keys: Sequence[BlockKey], budget_s: float = 0.5, *, at: int | str | None = None) -> int:
        return await self._calls.match(keys, budget_s, at)

    async def exists(
        self, keys: Sequence[BlockKey], budget_s: float = 0.5, *, at: int | str | None = None
    ) -> list[bool]:
        return await self._calls.exists(keys, budget_s, at)

    async def read(
        self,
        keys: Sequence[BlockKey],
        budget_s: float = 2.0,
        *,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> PoolRead:
        return await self._calls.read(keys, budget_s, at, cancel)

    async def get_into(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        budget_s: float = 2.0,
        *,
        leading: bool = True,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> GetResult:
        lengths_match(keys, buffers)
        return await self._calls.get_into(keys, rooms_of(buffers), budget_s, leading, at, cancel)

    def register(self, buffer: Any) -> Landing:
        """As `PoolClient.register`."""
        room = host_room(buffer)
        return self._ranks.door.register(room.view, room)

    async def write(
        self,
        blocks: Sequence[Put],
        budget_s: float = 2.0,
        *,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> list[PutResult]:
        return await self._calls.write(blocks, budget_s, at, cancel)

    async def put(self, blocks: Sequence[Put], budget_s: float = 2.0) -> list[PutResult]:
        return await self.write(blocks, budget_s)

    async def put_from(
        self,
        keys: Sequence[BlockKey],
        buffers: Sequence[Any],
        budget_s: float = 2.0,
        *,
        parent: BlockKey | None = None,
        chained: bool = True,
        transient_s: float | None = None,
        retention: Retention = DEFAULT,
    ) -> list[PutResult]:
        """As `PoolClient.put_from`."""
        return await self.write(puts_of(keys, buffers, parent, chained, transient_s, retention), budget_s)

    insert = put_from

    async def drop(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        return await self._calls.drop(keys, budget_s)

    async def delete(self, keys: Sequence[BlockKey], budget_s: float = 2.0) -> int:
        return await self._calls.delete(keys, budget_s)

    async def transfer_with_insert(
        self,
        keys: Sequence[BlockKey],
        to: int | str,
        budget_s: float = 5.0,
        *,
        origin: int | str | None = None,
        parent: BlockKey | None = None,
        retention: Retention = DEFAULT,
        cancel: Cancelling | None = None,
    ) -> list[PutResult]:
        """As `PoolClient.transfer_with_insert`."""
        return await transfer(self._calls, keys, to, origin, budget_s, None, parent, retention, cancel)

    async def transfer(
        self,
        keys: Sequence[BlockKey],
        to: int | str,
        budget_s: float = 5.0,
        *,
        keep_s: float = 60.0,
        origin: int | str | None = None,
        parent: BlockKey | None = None,
        cancel: Cancelling | None = None,
    ) -> list[PutResult]:
        """As `PoolClient.transfer`."""
        return await transfer(self._calls, keys, to, origin, budget_s, keep_s, parent, DEFAULT, cancel)

    async def alive(self) -> bool:
        return await self._calls.alive()

    def counts(self) -> PoolCounts:
        return self._calls.counts()

    async def close(self) -> None:
        """As `PoolClient.close`. What still runs in threads ends by its budget."""
        self._calls.tell_counts(at_once=True)
        self._driver.close()
        self._ranks.close()

    def __reduce__(self) -> NoReturn:
        """
        Raises:
            TypeError: always; with what to do.
        """
        raise TypeError(NOT_PICKLED.format(type(self).__name__))

    async def __aenter__(self) -> AsyncPoolClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
