"""Whose turn it is: admission, chunks, the share of time that recomputing may take from a running batch, and when work
that nobody waits for gives way.

Pure rules: jobs and time in, a choice out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

BATCH_PRIORITY = 0
"""Of requests that nobody waits for: batch jobs. All others are online requests."""
FIRM_S = 60.0
"""A batch request that waited so long is admitted before online ones that came later, and keeps what it then holds."""
BESIDE_SHARE = 0.2
"""Of the time of online streams that batch requests may take between two of their tokens."""
_CALM_S = 60.0
_PIECE_S, _CALM_PIECE_S = 0.1, 0.5


class Ranked(Protocol):
    @property
    def priority(self) -> int: ...


class Waiting(Protocol):
    priority: int
    arrived_at_s: float


class Served(Waiting, Protocol):
    served_at_s: float


class Computing(Served, Protocol):
    @property
    def left(self) -> int: ...


W = TypeVar("W", bound=Waiting)
S = TypeVar("S", bound=Served)
C = TypeVar("C", bound=Computing)


def admission_order(jobs: Iterable[W], now_s: float) -> list[W]:
    """Highest priority first, and a second of waiting counts as much as one step of priority: nothing starves."""
    return sorted(jobs, key=lambda job: (-(job.priority + now_s - job.arrived_at_s), job.arrived_at_s))


def is_batch(job: Ranked) -> bool:
    return job.priority <= BATCH_PRIORITY


def batch_share(most: int) -> int:
    """How many of `most` places batch requests may have: half, and one at least."""
    return max(1, most // 2)


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


class Beside:
    """When batch requests may use an engine that online requests use too.

    They wait while somebody waits for a first token: at this engine, or, as the front says by `hold`, at another that
    shares its cores. Never for ever: who had to wait for `patience_s` may do one piece of work all the same. A piece is
    what an online request that comes meanwhile waits for, so it is short, and less so when none came for a minute:
    longer pieces are computed faster.
    """

    def __init__(self, patience_s: float = 5.0) -> None:
        self._patience_s = patience_s
        self._held_until_s = self._online_at_s = float("-inf")
        self._waits_since_s: float | None = None

    def hold(self, until_s: float) -> None:
        """A lease: a front that died holds nobody. A time that is over ends the hold."""
        self._held_until_s = until_s

    def may_run(self, urgent: bool, now_s: float) -> bool:
        """`urgent`: an online request waits here for its first token."""
        urgent = urgent or now_s < self._held_until_s
        if not urgent:
            self._waits_since_s = None
            return True
        self._online_at_s = now_s
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        return now_s - self._waits_since_s >= self._patience_s

    def ran(self, now_s: float) -> None:
        """A piece of batch work was done; the next one's patience begins."""
        if self._waits_since_s is not None:
            self._waits_since_s = now_s

    def piece_s(self, now_s: float) -> float:
        """How long one piece of batch work may take."""
        return _PIECE_S if now_s - self._online_at_s < _CALM_S else _CALM_PIECE_S


def together(online: Sequence[S], batch: Sequence[S], allowed: bool, most: int) -> list[S]:
    """Who decodes in the next step of at most `most` rows: all online requests, and beside them a quarter of the rows
    from batch requests, those first that were not served for longest; where nobody is online, as many as there are."""
    if not allowed:
        return list(online)
    room = min(max(1, most // 4), most - len(online)) if online else most
    return [*online, *sorted(batch, key=lambda job: job.served_at_s)[: max(0, room)]]
