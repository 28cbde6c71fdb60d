"""Saves: whole blocks out of the engine's pages into the pool, behind its forward passes.

A pass that completes a block writes its last KV, so the gather runs on a stream of ours behind an event of the
engine's: the one that the forward-pass callable records (under CUDA graphs too), or layer by layer in an eager pass, so
that most of the copying is over before the pass is. The engine's stream then waits for the gathers before it goes on.
That orders them before whatever the pages are used for next, whoever gives them back and why: a finished request, a
window that moved on, a reset. The price is the copy of what a pass completed, and it overlaps with the layers behind.

From staging memory a thread checksums and puts them, and gives the memory back. The pool's pace therefore holds staging
memory and nothing of the engine; what finds none is dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from typing import Any

from kvtool.kv.block import BlockKey
from kvtool.pool.base import Outcome, Pool, Put
from kvtool_trtllm.copies import Table, gather
from kvtool_trtllm.loading import close_stream, on_device, runs
from kvtool_trtllm.meta import Pages, Save
from kvtool_trtllm.pages import EnginePages
from kvtool_trtllm.staging import Part, Slots, parts_of
from kvtool_trtllm.streams import WAIT_S, Device

log = logging.getLogger(__name__)


@dataclass
class _Batch:
    """Blocks of one Save that found staging memory."""

    request_id: int
    keys: tuple[BlockKey, ...]
    parents: tuple[BlockKey | None, ...]
    pages: Pages
    slots: list[int]
    event: Any = None
    torn: bool = False
    """Its pass or its request is gone; only its memory is wanted back, once nothing writes to it any more."""


class Saver:
    """`layers`: of the model, for passes that call the hooks of each."""

    def __init__(self, device: Device, pages: EnginePages, slots: Slots, pool: Pool, budget_s: float) -> None:
        self._device, self._pages, self._slots, self._pool, self._budget_s = device, pages, slots, pool, budget_s
        self._parts = parts_of(pages, pages.shards.writes)
        self._layers = {layer for group in pages.groups for layer in group.layers}
        self._side = device.side_stream()
        self._now: list[_Batch] = []
        self._gathered: set[int] = set()
        self._passed: Any = None
        self._rows: Any = slots.memory.numpy()
        self._queue: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._flying: list[_Batch] = []
        self.counts = {"gathered": 0, "stored": 0, "duplicate": 0, "refused": 0, "failed": 0, "torn": 0}
        self._thread = threading.Thread(target=self._run, name="kvtool-save", daemon=True)
        self._thread.start()

    # The executor's thread.

    def begin(self, saves: tuple[Save, ...]) -> None:
        """This iteration's. A rank that owns none of the stored shards (replicated heads) saves nothing."""
        self.forget(tuple(batch.request_id for batch in self._now))  # of a pass that never ran
        self._now, self._gathered, self._passed = [], set(), None
        if not self._parts:
            return
        for save in saves:
            slots = self._slots.take(len(save.keys), "save", f"request {save.request_id}")
            if slots:
                count = len(slots)
                pages = tuple(group[:count] for group in save.pages)
                self._now.append(_Batch(save.request_id, save.keys[:count], save.parents[:count], pages, slots))

    def layer_done(self, layer: int, stream: Any) -> None:
        """In an eager pass: `stream` has this layer's KV. Its part of every block goes at once."""
        group = self._pages.group_of(layer)
        if not self._now or group is None or layer in self._gathered:
            return
        self._gathered.add(layer)
        self._side.wait_event(stream.record_event())
        for batch in self._now:
            self._gather(batch, group.index, group.layers[layer])

    def passed(self, stream: Any) -> None:
        """The forward pass is queued."""
        if self._now:
            self._passed = stream.record_event()

    def finish(self, stream: Any) -> None:
        """Gather what the hooks did not, and have the engine wait for all of it before it queues anything more."""
        if not self._now:
            return
        left = self._layers - self._gathered
        if left:
            self._side.wait_event(self._passed if self._passed is not None else stream.record_event())
            for batch in self._now:
                for group in self._pages.groups:
                    if not self._gathered:
                        self._gather(batch, group.index, group.pieces)
                    else:
                        for layer in sorted(left & set(group.layers)):
                            self._gather(batch, group.index, group.layers[layer])
        event = self._side.record_event()
        stream.wait_event(event)
        batches, self._now = self._now, []
        for batch in batches:
            self.counts["gathered"] += len(batch.keys)
            self._send(batch, event)

    def forget(self, request_ids: tuple[int, ...]) -> None:
        """Reset requests. What was gathered before their pages went is whole, since the engine waited for it; what had
        no event yet is given up."""
        for batch in [batch for batch in self._now if batch.request_id in request_ids]:
            self._now.remove(batch)
            self.counts["torn"] += len(batch.keys)
            if self._gathered:  # layers of it are on their way into its memory
                batch.torn = True
                self._send(batch, self._side.record_event())
            else:
                self._slots.give(batch.slots)

    def _send(self, batch: _Batch, event: Any) -> None:
        batch.event = event
        with self._lock:
            self._flying.append(batch)
        self._queue.put(batch)

    def drained(self, timeout_s: float) -> bool:
        """Whether everything gathered so far is with the pool, or given up, at the latest after `timeout_s`."""
        done = threading.Event()
        self._queue.put(_Batch(-1, (), (), (), [], done))
        return done.wait(timeout_s)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(WAIT_S)
        close_stream(self._side)

    def _gather(self, batch: _Batch, group: int, pieces: Table) -> None:
        pages, slots = list(batch.pages[group]), batch.slots

        def work(stream: Any) -> None:
            for start, end in runs(slots):
                rows = self._slots.memory[slots[start] : slots[start] + (end - start)]
                gather(pieces, pages[start:end], rows, stream)

        on_device(self._device, self._side, work)

    # The saver's thread.

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            if isinstance(batch.event, threading.Event):
                batch.event.set()
                continue
            try:
                batch.event.synchronize()
                if not batch.torn:
                    self._put(batch)
            except Exception:  # a device that failed ends the engine's own pass too
                log.exception("save failed request=%d blocks=%d", batch.request_id, len(batch.keys))
                self.counts["failed"] += len(batch.keys)
            finally:
                with self._lock:
                    self._flying.remove(batch)
                self._slots.give(batch.slots)

    def _put(self, batch: _Batch) -> None:
        puts = []
        for at, (key, parent, slot) in enumerate(zip(batch.keys, batch.parents, batch.slots, strict=True)):
            for part in self._parts:
                if batch.pages[part.group][at] >= 0:  # a group that holds no page of the block has nothing of it
                    puts.append(_put_of(part, key, parent, self._rows[slot]))
        for result in self._pool.write(puts, self._budget_s):
            if result.outcome is Outcome.FAILED:
                log.debug("put failed request=%d reason=%s", batch.request_id, result.reason)
            self.counts[result.outcome.value] += 1


def _put_of(part: Part, key: BlockKey, parent: BlockKey | None, row: Any) -> Put:
    data = memoryview(row[part.start : part.end])
    return Put(part.key(key), len(data), None, None if parent is None else part.key(parent), data=data)
