"""A device stream on a CPU: work in order, in a thread of its own, late by a seeded while.

Calls are those of torch.cuda.Stream and Event, so that a connector treats it as one. What does not wait for an event
really runs early, and what is not ordered by one really runs late.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from typing import Any

WAIT_S = 30.0


class Event:
    """Like torch.cuda.Event: never recorded is done; waiting takes the latest record."""

    def __init__(self, **_: Any) -> None:
        self.done = threading.Event()
        self.done.set()

    def record(self, stream: Stream) -> None:
        stream.record_event(self)

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        if not self.done.wait(WAIT_S):
            raise TimeoutError(f"an event was not reached within {WAIT_S:.0f} s")

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)


class Stream:
    """`late_s`: longest pause before a piece of work, drawn for each from `seed`."""

    device = "cpu"

    def __init__(self, seed: int = 0, late_s: float = 0.0) -> None:
        self._random, self._late_s = random.Random(seed), late_s
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="fake-device", daemon=True)
        self._thread.start()

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        done = event.done = threading.Event()
        self.enqueue(done.set)
        return event

    def wait_event(self, event: Any) -> None:
        done = event.done if isinstance(event, Event) else None
        self.enqueue(event.synchronize if done is None else lambda: self._await(done))

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def query(self) -> bool:
        return bool(self.record_event().query())

    def synchronize(self) -> None:
        self.record_event().synchronize()
        if self.errors:
            raise RuntimeError(f"the device stopped: {self.errors[0]!r}") from self.errors[0]

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(WAIT_S)

    @staticmethod
    def _await(done: threading.Event) -> None:
        if not done.wait(WAIT_S):
            raise TimeoutError(f"a stream waited {WAIT_S:.0f} s for an event")

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._late_s:
                self._idle.wait(self._random.uniform(0, self._late_s))
            try:
                work()
            except BaseException as error:  # what a device error is: nothing after it can be believed
                self.errors.append(error)
