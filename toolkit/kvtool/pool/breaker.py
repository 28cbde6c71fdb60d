"""A circuit breaker: what failed several times in a row is not tried for a while, then once, and so on.

Closed, it counts failures in a row. Open, it allows nothing until a time that doubles with every failed probe. Then it
is half-open: one caller may try, and what comes of that closes it or opens it again. Links have a breaker of their own
kind (`link`), since for a rank the late answer itself is the probe; this one is for a path or a tier of a rank.

Pure: callers pass the time in. Losing a count to another thread is no harm.
"""

from __future__ import annotations

FAILURES = 3
PAUSE_S = (0.5, 30.0)


class Breaker:
    """`breaks`: how often it opened."""

    def __init__(self) -> None:
        self.breaks = 0
        self._failed = 0
        self._pause_s = PAUSE_S[0]
        self._again_at_s: float | None = None

    def allows(self, now_s: float) -> bool:
        """Whether to try now. True while open only for one caller each pause, who must say what came of it."""
        if self._again_at_s is None:
            return True
        if now_s < self._again_at_s:
            return False
        self._again_at_s = (
            now_s + self._pause_s
        )  # this caller is the probe; the next is allowed if he is never heard of
        return True

    def good(self) -> None:
        self._failed, self._again_at_s, self._pause_s = 0, None, PAUSE_S[0]

    def bad(self, now_s: float) -> None:
        self._failed += 1
        if self._again_at_s is not None:
            self._pause_s = min(2 * self._pause_s, PAUSE_S[1])
            self._again_at_s = now_s + self._pause_s
        elif self._failed >= FAILURES:
            self.breaks += 1
            self._again_at_s = now_s + self._pause_s

    def state(self, now_s: float) -> str:
        if self._again_at_s is None:
            return "closed"
        return "open" if now_s < self._again_at_s else "half-open"
