"""Group commit: everything that waits to be durable shares the next sync."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvtool.errors import KvtoolError, Unavailable


class GroupSync:
    """`sync` makes all that was written durable, and may wait; `run` starts a task where waiting is allowed."""

    def __init__(self, sync: Callable[[], None], run: Callable[[Callable[[], None]], Future[None]]) -> None:
        self._sync, self._run = sync, run
        self._lock = threading.Lock()
        self._waiting: list[Future[None]] = []
        self._syncing = False

    def when_synced(self, written: Future[None]) -> Future[None]:
        """A future that is done when what was written is on the disk."""
        durable: Future[None] = Future()

        def done(future: Future[None]) -> None:
            if future.cancelled():
                durable.set_exception(Unavailable("the file was closed before this was written"))
            elif (error := future.exception()) is not None:
                durable.set_exception(error)
            else:
                self._want(durable)

        written.add_done_callback(done)
        return durable

    def _want(self, durable: Future[None]) -> None:
        with self._lock:
            self._waiting.append(durable)
            if self._syncing:
                return
            self._syncing = True
        try:
            task = self._run(self._sync_all)
        except KvtoolError as error:
            self._give_up(error)
        else:
            task.add_done_callback(lambda task: self._give_up() if task.cancelled() else None)

    def _sync_all(self) -> None:
        while True:
            with self._lock:
                group, self._waiting = self._waiting, []
                if not group:
                    self._syncing = False
                    return
            error: KvtoolError | None = None
            try:
                self._sync()
            except KvtoolError as found:
                error = found
            for future in group:
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    def _give_up(self, why: KvtoolError | None = None) -> None:
        with self._lock:
            group, self._waiting, self._syncing = self._waiting, [], False
        for future in group:
            future.set_exception(why or Unavailable("the file was closed before this was durable"))
