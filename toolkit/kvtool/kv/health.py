"""Backing off: something that keeps failing is tried ever more rarely, and never given up.

Pure rules: callers pass the time in.
"""

from __future__ import annotations


class Backoff:
    """Whether a tier or peer is worth a try. Waits from `first_s` on, twice as long after every failure."""

    def __init__(self, first_s: float = 0.1, longest_s: float = 10.0) -> None:
        self.first_s, self.longest_s = first_s, longest_s
        self.failures = 0
        """In a row."""
        self.why = ""
        self._again_at_s = float("-inf")

    def over(self, now_s: float) -> bool:
        """Whether it may be tried now."""
        return now_s >= self._again_at_s

    def failed(self, now_s: float, why: str = "") -> None:
        """Several that were under way together count once."""
        self.why = why or self.why
        if self.over(now_s):
            self._again_at_s = now_s + min(self.longest_s, self.first_s * 2**self.failures)
            self.failures = min(self.failures + 1, 32)

    def worked(self) -> None:
        self.failures, self.why, self._again_at_s = 0, "", float("-inf")

    @property
    def clause(self) -> str:
        """For the end of a sentence; empty while all is well."""
        return f"; files are left alone for now: {self.why}" if self.why else ""
