"""Time as an argument: the real clock for processes, a wound one for tests.

Rules in `kv/` and `conductor/` take `now_s` and never ask for the time. What waits on the world takes a
`Clock`, so that a test can wind hours past in no time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a monotonic clock; only differences mean anything."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class WoundClock:
    """A clock that moves only when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def wind(self, seconds: float) -> float:
        if seconds < 0:
            raise ValueError(f"a clock cannot be wound back, got {seconds} s")
        self._now_s += seconds
        return self._now_s
