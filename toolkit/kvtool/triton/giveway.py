"""Batch requests give way to online ones, in all of a deployment.

An engine sees only the requests that it has. While an online request is in prefill, the decode servers know nothing of
it, and on CPUs their batch work takes cores from it. So the front, which sees all, tells every instance to hold batch
work while an online request waits for its first token (`serve.turns.Beside` obeys). A hold is a lease, renewed while it
is wanted: a front that dies holds nobody for long. Nor does a batch request begin its next stage meanwhile, but for one
after each `PATIENCE_S`, so that none waits for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from kvtool.serve.turns import is_batch
from kvtool.triton.flight import Flight

PATIENCE_S = 5.0
HOLD_S = 2.0

TellAll = Callable[[float], Awaitable[None]]
"""Tell every instance to hold batch work for so many seconds; 0: no longer. Never raises."""


class GiveWay:
    """Belongs to the front's loop. `tell` None: instances have processors of their own, and none needs to be told."""

    def __init__(self, tell: TellAll | None) -> None:
        self._tell = tell
        self._urgent: set[str] = set()
        self._batch: dict[str, Flight] = {}
        self._calm, self._changed = asyncio.Event(), asyncio.Event()
        self._calm.set()
        self._first = asyncio.Lock()

    @property
    def batch(self) -> int:
        """Batch requests in flight."""
        return len(self._batch)

    def entered(self, flight: Flight) -> None:
        if is_batch(flight.asked):
            self._batch[flight.asked.request_id] = flight
        else:
            self._urgent.add(flight.asked.request_id)
            self._calm.clear()
        self._changed.set()

    def served(self, flight: Flight) -> None:
        """It has its first token, or needs none any more. Again is a no-op."""
        name = flight.asked.request_id
        if name in self._urgent:
            self._urgent.remove(name)
            if not self._urgent:
                self._calm.set()
            self._changed.set()

    def left(self, flight: Flight) -> None:
        self.served(flight)
        if self._batch.pop(flight.asked.request_id, None) is not None:
            self._changed.set()

    def youngest(self) -> Flight | None:
        """The batch request that came last: the one to end where an online one needs its place."""
        return max(self._batch.values(), key=lambda flight: flight.arrived_s, default=None)

    async def turn(self, flight: Flight) -> None:
        """A batch request waits here before each of its stages; an online one passes."""
        if not is_batch(flight.asked):
            return
        async with self._first:  # in the order of their coming, so the patience of one lets one through
            if self._urgent:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._calm.wait(), PATIENCE_S)

    async def hold(self) -> None:
        """Until cancelled: tell the instances what changed, one word after the other."""
        held = False
        while self._tell is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), HOLD_S / 2 if held else None)
            self._changed.clear()
            wanted = bool(self._urgent and self._batch)
            if wanted or held:
                await self._tell(HOLD_S if wanted else 0.0)
            held = wanted
