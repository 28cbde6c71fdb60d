"""Streams of the device, and their twin on a CPU.

The connector orders its copies against the engine's forward passes by streams and events only, never by waiting on the
host. On a GPU they are torch.cuda's. Elsewhere `HostStream` has the same calls and does its work in order in a thread
of its own, so a missing order shows as wrong bytes there too: what waits for no event really runs early.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvtool.errors import EngineFailed, EngineRefused

WAIT_S = 60.0
"""An event that is not reached by then never is."""


class HostEvent:
    """As torch.cuda.Event, for the calls that we use."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def query(self) -> bool:
        """Whether the work before it is done. Raises EngineFailed: it failed."""
        self._raise()
        return self._done.is_set()

    def synchronize(self) -> None:
        if not self._done.wait(WAIT_S):
            raise EngineFailed(f"a copy of the connector did not end within {WAIT_S:.0f} s")
        self._raise()

    def reached(self, error: BaseException | None) -> None:
        self.error = error
        self._done.set()

    def _raise(self) -> None:
        if self.error is not None:
            raise EngineFailed(f"a copy of the connector failed: {self.error}") from self.error


class HostStream:
    """As torch.cuda.Stream. `late_s`: longest pause before a piece of work, drawn from `seed`; for tests."""

    def __init__(self, seed: int = 0, late_s: float = 0.0) -> None:
        self._random, self._late_s = random.Random(seed), late_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvtool-copies", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def wait_event(self, event: Any) -> None:
        self._work.put(event.synchronize)

    def record_event(self) -> HostEvent:
        event = HostEvent()
        self._work.put(lambda: event.reached(self._error))
        return event

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._late_s:
                time.sleep(self._random.uniform(0, self._late_s))
            try:
                work()
            except BaseException as error:  # as on a device: nothing after it can be believed
                self._error = self._error or error


class Device(Protocol):
    """Where the engine's KV memory lies."""

    def side_stream(self) -> Any:
        """A stream for our copies, beside the engine's."""
        ...

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """Queue the copies of `work` on `stream`."""
        ...

    def memory(self, size: int) -> torch.Tensor:
        """uint8 [size] of the host that the device copies from and to by itself."""
        ...


class Host:
    def __init__(self, late_s: float = 0.0, seed: int = 0) -> None:
        self._late_s, self._seed = late_s, seed

    def side_stream(self) -> HostStream:
        return HostStream(self._seed, self._late_s)

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        stream.enqueue(work)

    def memory(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8)


class Cuda:
    """`device` of the engine's memory. Never run on a machine without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def side_stream(self) -> Any:
        return torch.cuda.Stream(device=self._device)  # type: ignore[no-untyped-call]

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            work()

    def memory(self, size: int) -> torch.Tensor:
        """Pinned: copies to and from other memory would hold up the engine.

        Raises:
            EngineRefused: the system does not give that much.
        """
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise EngineRefused(
                f"staging: {size} bytes of pinned host memory were refused ({str(error).splitlines()[0]}); lower "
                "staging_bytes in connector.yaml, or raise the container's memory and memlock limits"
            ) from None


def device_of(memory: torch.Tensor) -> Device:
    return Cuda(memory.device) if memory.is_cuda else Host()
