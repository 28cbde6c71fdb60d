"""What happened in a run: a hash over all of it, the last lines of it, and how often each kind of thing happened."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from blake3 import blake3

TAIL = 60


class Journal:
    """The event log of one run. Lines hold nothing that differs from one process to another."""

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = lambda: 0.0
        self.counts: Counter[str] = Counter()
        self.lines = 0
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._hash = blake3()

    def log(self, kind: str, who: str, *facts: object) -> None:
        line = f"{self.now_s():.9f} {who} {kind} {' '.join(map(str, facts))}"
        self.lines += 1
        self.tail.append(line)
        self._hash.update(line.encode())

    def keep_all(self) -> None:
        self.tail = deque()

    def count(self, kind: str, by: int = 1) -> None:
        """Coverage: `kind` happened."""
        self.counts[kind] += by

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:16]
