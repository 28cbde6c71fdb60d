"""Loads: staged blocks into the engine's pages, beside its forward passes.

Copies run on a stream of ours, which first waits for what the engine has queued so far: a page may still be read by the
pass that was its last. A load beside the batch is done when its event is reached. A layerwise one records an event for
each layer, and the engine's stream waits for a layer's just before its attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvtool.errors import EngineFailed
from kvtool_trtllm.copies import Table, scatter
from kvtool_trtllm.meta import Load
from kvtool_trtllm.pages import EnginePages
from kvtool_trtllm.staging import Slots, Staging
from kvtool_trtllm.streams import Device


@dataclass
class _Running:
    load: Load
    slots: list[int]
    events: list[Any] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return all(event.query() for event in self.events)


class Loader:
    def __init__(self, device: Device, pages: EnginePages, staging: Staging, slots: Slots) -> None:
        self._device, self._pages, self._staging, self._slots = device, pages, staging, slots
        self._side = device.side_stream()
        self._running: list[_Running] = []
        self._layer_events: dict[int, list[Any]] = {}
        self._waited: set[int] = set()
        self.blocks = 0
        self.started: set[int] = set()
        """Requests whose load beside the batch was queued, and is not reported yet."""

    def start(self, loads: tuple[Load, ...], stream: Any) -> None:
        """Queue the copies of `loads` behind what `stream` has."""
        self._tidy()
        self._layer_events, self._waited = {}, set()
        if not loads:
            return
        self._side.wait_event(stream.record_event())
        for load in loads:
            count = len(load.pages[0])
            running = _Running(load, self._staging.take(load.load_id, count))
            self._running.append(running)
            self.blocks += count
            if load.layerwise:
                self._by_layer(running)
            else:
                for group in self._pages.groups:
                    self._copy(running, group.index, group.pieces)
                running.events.append(self._side.record_event())
                self.started.add(load.request_id)

    def _by_layer(self, running: _Running) -> None:
        for layer in sorted(layer for group in self._pages.groups for layer in group.layers):
            group = self._pages.group_of(layer)
            assert group is not None
            self._copy(running, group.index, group.layers[layer])
            event = self._side.record_event()
            running.events.append(event)
            self._layer_events.setdefault(layer, []).append(event)

    def _copy(self, running: _Running, group: int, pieces: Table) -> None:
        pages, slots = list(running.load.pages[group]), running.slots

        def work(stream: Any) -> None:
            for start, end in runs(slots):
                scatter(pieces, pages[start:end], self._rows(slots, start, end), stream)

        on_device(self._device, self._side, work)

    def _rows(self, slots: list[int], start: int, end: int) -> Any:
        return self._slots.memory[slots[start] : slots[start] + (end - start)]

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        for event in self._layer_events.get(layer, ()):
            stream.wait_event(event)
        self._waited.add(layer)

    def check_waited(self) -> None:
        """
        Raises:
            EngineFailed: a pass ran without waiting for its layers, so it may have read pages before they were filled.
        """
        missed = sorted(set(self._layer_events) - self._waited)
        if missed:
            raise EngineFailed(
                f"load: layerwise, and a forward pass ran without asking for layers {missed[:4]} of {len(missed)}: a "
                "CUDA graph was replayed. Set load: async in connector.yaml"
            )

    def done(self, request_id: int) -> bool:
        """Whether nothing is written to the request's pages any more."""
        return all(running.done for running in self._running if running.load.request_id == request_id)

    def _tidy(self) -> None:
        for running in [running for running in self._running if running.done]:
            self._running.remove(running)
            self._slots.give(running.slots)

    def tidy(self) -> None:
        """Give back the slots of loads that have ended."""
        self._tidy()

    def close(self) -> None:
        for running in self._running:
            for event in running.events:
                event.synchronize()
        self._tidy()
        close_stream(self._side)


def runs(slots: list[int]) -> list[tuple[int, int]]:
    """Positions [start, end) of slots that follow each other, so that each run is one copy without a detour."""
    found, start = [], 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1:
            found.append((start, at))
            start = at
    return found


def on_device(device: Device, stream: Any, work: Callable[[Any], None]) -> None:
    device.run(stream, functools.partial(work, stream))


def close_stream(stream: Any) -> None:
    close = getattr(stream, "close", None)
    if close is not None:
        close()
