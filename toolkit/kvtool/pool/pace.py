"""What a client has seen lately: how soon a rank answers, how fast bytes come. Estimates, for deciding how to ask."""

from __future__ import annotations

_SAMPLES = 64
_AGAIN = 16
HEDGE_S = (0.002, 0.1)
"""A first owner is waited for at least so long, and at most, before the second is asked too."""


class Answers:
    """The last answer times of one rank; `p95_s` of them. Several threads may add: a lost sample is no harm."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._at = 0
        self.p95_s = HEDGE_S[1]

    def add(self, seconds: float) -> None:
        if len(self._seconds) < _SAMPLES:
            self._seconds.append(seconds)
        else:
            self._seconds[self._at % _SAMPLES] = seconds
        self._at += 1
        if self._at % _AGAIN == 0:
            ordered = sorted(self._seconds)
            self.p95_s = ordered[len(ordered) * 95 // 100]

    @property
    def patience_s(self) -> float:
        """How long to wait for this rank before another is asked as well."""
        return min(max(self.p95_s, HEDGE_S[0]), HEDGE_S[1])


class Pace:
    """Bytes a second of checked reading, an average that forgets. `bytes_s` starts from a cautious guess."""

    SLOWEST = 16 * 2**20

    def __init__(self, bytes_s: float = 512 * 2**20) -> None:
        self.bytes_s = bytes_s

    def add(self, size: int, seconds: float) -> None:
        if size and seconds > 0:
            self.bytes_s = max(self.SLOWEST, 0.7 * self.bytes_s + 0.3 * size / seconds)

    def blocks_in(self, seconds: float, block_size: int) -> int:
        """How many blocks can be read in `seconds`; at least one."""
        return max(1, int(self.bytes_s * seconds) // block_size)
