"""The tier below the files, carried out: what `kv.remote` decides, on a store's time and in threads of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kvtool.errors import BlockCorrupt, KvtoolError
from kvtool.kv.record import Archive, Discard, Fetch, Filed, Reading
from kvtool.kv.store import Store
from kvtool.pool.memory import SlotMemory
from kvtool.transfer.remote import ObjectStore

if TYPE_CHECKING:
    from kvtool.transfer.filehead import SlotHeader
    from kvtool.transfer.files import BlockFile

log = logging.getLogger("kvtool.pool")

THREADS = 6
FILE_S = 10.0
CLOSE_S = 2.0


class Below:
    """`post` as for `Tiers`; `described` makes of a record's header what the rules take."""

    def __init__(
        self,
        store: Store,
        memory: SlotMemory,
        files: BlockFile,
        objects: ObjectStore,
        post: Callable[[Callable[[float], list[Reading]]], None],
        described: Callable[[SlotHeader], Filed],
        executor: Executor | None = None,
    ) -> None:
        self._store, self._memory, self._files, self._objects = store, memory, files, objects
        self._post, self._described = post, described
        self._threads = executor or ThreadPoolExecutor(THREADS, thread_name_prefix="kvtool-below")
        self._closed = False

    def open(self, size: int) -> None:
        """Find out what is there, and begin: `size` bytes of the store are ours."""

        def listed(future: Future[list[tuple[bytes, int]]]) -> None:
            found, error = (future.result(), None) if not _failed(future) else ([], _failed(future))
            if error is not None:
                log.warning("store below cannot be listed, what it has is not found store=%s why=%r", self.name, error)

            def event(now_s: float) -> list[Reading]:
                self._store.open_below(size, found, now_s)
                log.info("store below open store=%s blocks=%d", self.name, len(found))
                return []

            self._tell(event)

        self._threads.submit(lambda: list(self._objects.list())).add_done_callback(listed)

    @property
    def name(self) -> str:
        return self._objects.name

    def carry_out(self, action: Archive | Fetch | Discard) -> None:
        if isinstance(action, Archive):
            self._archive(action)
        elif isinstance(action, Fetch):
            self._fetch(action)
        else:
            self._threads.submit(self._objects.delete, action.key).add_done_callback(_said)

    def report(self) -> dict[str, object]:
        """How it does, for a status."""
        store = self._store
        return {
            "store": self.name,
            "size": store.below_size,
            "used": store.below_used,
            "blocks": store.below_count,
            "failures": store.below_backoff.failures,
            "why": store.below_backoff.why,
        }

    def close(self) -> None:
        """Drop what has not begun. What a store does not answer is left to end by its own time limit."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _archive(self, action: Archive) -> None:
        def copy() -> None:
            record = self._files.copy_out(action.file_slot, action.key, action.length, action.record).result(FILE_S)
            self._objects.put(action.key, record)

        def ended(future: Future[None]) -> None:
            error = _failed(future)
            gone = isinstance(error, BlockCorrupt)  # its slot is another block's by now
            why = "" if error is None or gone else str(error) or type(error).__name__

            def event(now_s: float) -> list[Reading]:
                self._store.archived(action.move, error is None, now_s, why)
                return []

            self._tell(event)

        self._threads.submit(copy).add_done_callback(ended)

    def _fetch(self, action: Fetch) -> None:
        out = self._memory.slot(action.slot, action.length)

        def copy() -> SlotHeader:
            return self._files.take_in(memoryview(self._objects.get(action.key)), out, action.key)

        def ended(future: Future[SlotHeader]) -> None:
            error = _failed(future)
            found = None if error is not None else self._described(future.result())
            lost = isinstance(error, (BlockCorrupt, FileNotFoundError))
            if error is not None:
                log.warning("block not fetched key=%s why=%r", action.key.hex()[:16], str(error))
            self._tell(lambda now_s: self._store.fetched(action.move, found, now_s, str(error or ""), lost))

        self._threads.submit(copy).add_done_callback(ended)

    def _tell(self, event: Callable[[float], list[Reading]]) -> None:
        if not self._closed:
            self._post(event)


def _failed(future: Future[Any]) -> BaseException | None:
    if future.cancelled():
        return KvtoolError("closed before it began")
    return future.exception()


def _said(future: Future[None]) -> None:
    error = _failed(future)
    if error is not None:
        log.warning("object not removed why=%r", str(error))
