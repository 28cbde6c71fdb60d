"""Whose turn it is: admission, chunks, and the share of time that recomputing may take from a running batch.

Pure rules: jobs and time in, a choice out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

BATCH_PRIORITY = 0
"""Of requests that nobody waits for: batch jobs."""


class Waiting(Protocol):
    priority: int
    arrived_at_s: float


class Computing(Waiting, Protocol):
    served_at_s: float

    @property
    def left(self) -> int: ...


W = TypeVar("W", bound=Waiting)
C = TypeVar("C", bound=Computing)


def admission_order(jobs: Iterable[W], now_s: float) -> list[W]:
    """Highest priority first, and a second of waiting counts as much as one step of priority: nothing starves."""
    return sorted(jobs, key=lambda job: (-(job.priority + now_s - job.arrived_at_s), job.arrived_at_s))


def next_chunk(jobs: Iterable[C], now_s: float, patience_s: float = 1.0) -> C | None:
    """Who computes the next chunk: highest priority, and among equals who has least left, so that a long prompt does
    not hold up a short one. Who has had no turn for `patience_s` goes before all of them, longest unserved first."""
    waiting = list(jobs)
    starved = [job for job in waiting if now_s - job.served_at_s > patience_s]
    if starved:
        return min(starved, key=lambda job: (job.served_at_s, job.arrived_at_s))
    return min(waiting, key=lambda job: (-job.priority, job.left, job.arrived_at_s), default=None)


class Share:
    """At most `share` of the time, as a debt: a chunk may run when earlier ones are paid for by decode steps.

    The first chunk after a while goes at once, and a chunk longer than expected is paid for afterwards.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"a share lies between 0 and 1, got {share}")
        self._earns = share / (1 - share)
        self._debt_s = 0.0

    def may_run(self) -> bool:
        return self._debt_s <= 0

    def spent(self, seconds: float) -> None:
        self._debt_s += seconds

    def earned(self, step_s: float) -> None:
        self._debt_s = max(0.0, self._debt_s - step_s * self._earns)

    def forgive(self) -> None:
        """No batch runs: nobody is owed anything."""
        self._debt_s = 0.0
