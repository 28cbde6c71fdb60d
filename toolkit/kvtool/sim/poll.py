"""Waiting for many things at once, in the place of `selectors`, `select` and `os.eventfd`."""

from __future__ import annotations

import select as real_select
import selectors as real
from collections.abc import Callable
from typing import Any

from kvtool.sim.sched import Scheduler, Task


class Pollable:
    """Something that becomes ready. `watchers` are woken when that may have changed."""

    def __init__(self) -> None:
        self.watchers: list[Task] = []

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def changed(self) -> None:
        for task in self.watchers:
            task.process.sched.wake(task)

    def ready(self, events: int) -> int:
        found = 1 if events & 1 and self.readable() else 0  # EVENT_READ, EVENT_WRITE
        return found | 2 if events & 2 and self.writable() else found


class EventFd(Pollable):
    def __init__(self) -> None:
        super().__init__()
        self.value = 0

    def readable(self) -> bool:
        return self.value > 0


class Selector:
    """A `selectors.DefaultSelector` over sockets and event counters; ready ones in the order of their registration."""

    def __init__(self, sched: Callable[[], Scheduler], counters: dict[int, EventFd]) -> None:
        self._sched, self._counters = sched, counters
        self._keys: dict[Any, tuple[real.SelectorKey, Pollable]] = {}

    def _pollable(self, fileobj: Any) -> Pollable:
        return self._counters[fileobj] if isinstance(fileobj, int) else fileobj

    def register(self, fileobj: Any, events: int, data: Any = None) -> real.SelectorKey:
        if fileobj in self._keys:
            raise KeyError(f"{fileobj!r} is already registered")
        key = real.SelectorKey(fileobj, 3, events, data)
        self._keys[fileobj] = key, self._pollable(fileobj)
        return key

    def unregister(self, fileobj: Any) -> real.SelectorKey:
        return self._keys.pop(fileobj)[0]

    def modify(self, fileobj: Any, events: int, data: Any = None) -> real.SelectorKey:
        if fileobj not in self._keys:
            raise KeyError(f"{fileobj!r} is not registered")
        key = real.SelectorKey(fileobj, 3, events, data)
        self._keys[fileobj] = key, self._keys[fileobj][1]
        return key

    def get_map(self) -> dict[Any, Any]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[real.SelectorKey, int]]:
        sched = self._sched()
        task = sched.call()
        until_s = None if timeout is None else sched.now_s + max(0.0, timeout)
        while True:
            found = [(key, got) for key, pollable in self._keys.values() if (got := pollable.ready(key.events))]
            left_s = None if until_s is None else until_s - sched.now_s
            if found or (left_s is not None and left_s <= 0):
                return found
            watched = [pollable for _, pollable in self._keys.values()]
            for pollable in watched:
                pollable.watchers.append(task)
            try:
                sched.park(left_s)
            finally:
                for pollable in watched:
                    pollable.watchers.remove(task)

    def close(self) -> None:
        self._keys.clear()


class Poll:
    """A `select.poll` object."""

    def __init__(self, sched: Callable[[], Scheduler]) -> None:
        self._selector = Selector(sched, {})

    def register(self, fileobj: Any, events: int) -> None:
        mask = real.EVENT_READ if events & real_select.POLLIN else 0
        self._selector.register(fileobj, mask | (real.EVENT_WRITE if events & real_select.POLLOUT else 0))

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        found = self._selector.select(None if timeout_ms is None else timeout_ms / 1000)
        masks = {real.EVENT_READ: real_select.POLLIN, real.EVENT_WRITE: real_select.POLLOUT}
        return [(3, sum(bit for event, bit in masks.items() if got & event)) for _, got in found]
