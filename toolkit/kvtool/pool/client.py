"""A client of the pool: match, read, get and write over all ranks, each call within its budget.

Keys are placed by rendezvous hashing, so a batch becomes one message for each rank that owns some of it; all are sent
before the first answer is waited for. On the same node blocks are read in place and written in place; elsewhere they
go by UCX, one transfer a rank. Every block is checked against its key and checksum before it is handed out; one that
fails is reported, quarantined by its rank, and a miss.

What could not be had in time is a miss with its reason, never an error: a dead rank at once, a hung one after the
budget of one call and at once from then on, until it answers. Blocks that are kept by several ranks are read from the
nearest, and from the next when that is down or slow.

What the calls do is in `calls` and beneath; here they are made to wait in the caller's thread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any, Protocol

from kvtool.errors import SpecRefused
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.kv.retention import DEFAULT, Retention
from kvtool.pool.asking import Setting
from kvtool.pool.base import Cancelling, GetResult, PoolCounts, Put, PutResult
from kvtool.pool.buffers import host_room, rooms_of
from kvtool.pool.calls import Calls
from kvtool.pool.driver import Direct, complete
from kvtool.pool.moving import transfer
from kvtool.pool.outside import Outside
from kvtool.pool.ranks import Ranks
from kvtool.pool.reading import PoolRead
from kvtool.pool.verbs import Verbs, lengths_match
from kvtool.transfer.landing import Landing

PATHS = ("auto", "shm", "ucx", "socket")


def check_path(path: str) -> None:
    """
    Raises:
        SpecRefused: there is no such way to a pool.
    """
    if path not in PATHS:
        raise SpecRefused(f"pool.path: wanted auto, shm, ucx or socket, found {path!r}")


class PoolClient(Verbs):
    """A `pool.base.Pool` over the ranks that `state_file` names. Thread-safe, and without threads of its own.

    `path`: "shm", "ucx", "socket", or "auto" (the first of them that can be had). No pool running yet is no error.
    `outside` replaces the machine's clock and network (see `outside`); `state_file` and `path` then mean nothing.

    `namespace`: of the blocks that are put; the pool may have a number of copies for it.

    `at`, in every call that has it: ask that rank (number or identity) and no other, whoever the owners are.

    A child process that was forked has its own connection from its first call on. After `close` all reads are misses
    and all puts fail.

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
        outside: Outside | None = None,
        namespace: str = "",
    ) -> None:
        check_path(path)
        self.layout = layout
        self._outside = outside or Outside(FilePath(state_file), layout, path, client_name)
        self._name, self._namespace, self._closed = client_name, namespace, False
        self._join(Ranks(self._outside, layout, client_name))
        tell_of_forks(self)

    def _join(self, ranks: Ranks) -> None:
        self._ranks = ranks
        setting = Setting(ranks, Direct(self._outside.now_s), namespace=self._namespace)
        self._calls = Calls(setting, self.layout)

    def match(self, keys: Sequence[BlockKey], budget_s: float = 0.5, *, at: int | str | None = None) -> int:
        return complete(self._calls.match(keys, budget_s, at))

    def exists(self, keys: Sequence[BlockKey], budget_s: float = 0.5, *, at: int | str | None = None) -> list[bool]:
        return complete(self._calls.exists(keys, budget_s, at))

    def read(
        self,
        keys: Sequence[BlockKey],
        budget_s: float = 2.0,
        *,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> PoolRead:
        return complete(self._calls.read(keys, budget_s, at, cancel))

    def get_into(
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
        rooms = rooms_of(buffers)
        if len(rooms) == 1 and at is None and cancel is None:
            one = self._calls.get_one_near(keys[0], rooms[0])
            if one is not None:
                return one
        return complete(self._calls.get_into(keys, rooms, budget_s, leading, at, cancel))

    def register(self, buffer: Any) -> Landing:
        """Memory of yours that blocks may be read into by UCX without a copy on the way, once `get_into` is given
        pieces of it. A context manager; release it when it is not wanted for that any more. On other paths it changes
        nothing.

        A rank that hangs in the middle of such a read may still write there when it goes on. Then the result names the
        positions (`GetResult.held`), and until the landing is `free` again all of it must be left alone.

        Raises:
            ValueError, TypeError: not writable contiguous memory of the host.
        """
        room = host_room(buffer)
        return self._ranks.door.register(room.view, room)

    def write(
        self,
        blocks: Sequence[Put],
        budget_s: float = 2.0,
        *,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> list[PutResult]:
        return complete(self._calls.write(blocks, budget_s, at, cancel))

    def drop(self, keys: Sequence[BlockKey], budget_s: float = 0.5) -> int:
        return complete(self._calls.drop(keys, budget_s))

    def delete(self, keys: Sequence[BlockKey], budget_s: float = 2.0) -> int:
        return complete(self._calls.delete(keys, budget_s))

    def transfer_with_insert(
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
        """Copy blocks to the rank `to` (number or identity) and index them there, in one call; from `origin`, or from
        whoever owns them. What breaks it off at any step leaves whole blocks there, the first so many, and nothing
        else. They are found there by `at=to`, and by everybody when `to` is one of their owners."""
        return complete(transfer(self._calls, keys, to, origin, budget_s, None, parent, retention, cancel))

    def transfer(
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
        """As `transfer_with_insert`, for whoever reads them there soon: forgotten after `keep_s`."""
        return complete(transfer(self._calls, keys, to, origin, budget_s, keep_s, parent, DEFAULT, cancel))

    def alive(self) -> bool:
        return complete(self._calls.alive())

    def counts(self) -> PoolCounts:
        return self._calls.counts()

    def close(self) -> None:
        """Leave the pool; its ranks end our leases. Views in place must not be used any more. Again is a no-op."""
        if not self._closed:
            self._calls.tell_counts(at_once=True)
        self._closed = True
        self._ranks.close()

    def _in_child(self) -> None:
        """Just after a fork: the sockets, and UCX with its memory, are the parent's."""
        self._ranks.abandon()
        _parents.append(self._ranks)
        self._outside.forget()
        self._join(Ranks(self._outside, self.layout, self._name, eager=False))
        if self._closed:
            self._ranks.close()


class Forked(Protocol):
    """Whoever must do something in a child process."""

    def _in_child(self) -> None: ...


_clients: weakref.WeakSet[Forked] = weakref.WeakSet()
_parents: list[Ranks] = []
"""Of the process that we were forked from: never closed here, since that would end transfers of the parent's."""


def tell_of_forks(client: Forked) -> None:
    _clients.add(client)


def _forked() -> None:
    for client in list(_clients):
        client._in_child()


os.register_at_fork(after_in_child=_forked)
