"""What becomes of a request that failed, and how many run at once. Pure: time and events in, decisions out."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvtool.errors import (
    Cancelled,
    DeadlinePassed,
    EngineFailed,
    EngineFull,
    KvtoolError,
    Overloaded,
    Refused,
    Unavailable,
    Unreachable,
)

PARTS = 10
"""That one attempt has."""


def code_of(error: KvtoolError) -> str:
    """For programs: what kind of failure this was."""
    if isinstance(error, Refused):
        return "request_refused"
    for kind, code in (
        (Overloaded, "overloaded"),
        (EngineFull, "engine_full"),
        (Unavailable, "unavailable"),
        (DeadlinePassed, "deadline_passed"),
        (EngineFailed, "engine_failed"),
        (Cancelled, "cancelled"),
    ):
        if isinstance(error, kind):
            return code
    return "failed"


@dataclass(frozen=True)
class Limits:
    """`attempts`: of one request that fails for reasons that may pass; see `parts_of` for what counts as one.
    `request_s`: of one attempt. `job_s`: of all of the job, over all its runs. `tokens`: that the job may generate."""

    attempts: int = 3
    request_s: float = 600.0
    job_s: float | None = None
    tokens: int | None = None
    backoff_s: float = 0.5
    backoff_s_max: float = 30.0


@dataclass(frozen=True)
class Again:
    """Try once more, not before `at_s`. `counts` as an attempt."""

    at_s: float
    counts: bool = True


def parts_of(error: KvtoolError) -> int:
    """How much of an attempt a failure uses up: nothing where the request was told to come later, a little where there
    was no deployment. An outage is not the request's fault, but one that ends the deployment must not do so for ever.
    """
    return 0 if isinstance(error, Overloaded) else 1 if isinstance(error, Unreachable) else PARTS


def after_failure(error: KvtoolError, attempts: int, limits: Limits, now_s: float, rng: Random) -> Again | None:
    """What to do after a request's `attempts`-th failure; None: it is over.

    A request that is wrong stays wrong. The wait doubles, with full jitter, so that many do not come back at once.
    """
    if isinstance(error, Overloaded):
        return Again(now_s + error.retry_after_s * (1 + rng.random()), counts=False)
    if isinstance(error, (Refused, Cancelled)) or attempts >= limits.attempts:
        return None
    wait_s = min(limits.backoff_s_max, limits.backoff_s * 2.0 ** (attempts - 1))
    return Again(now_s + wait_s * rng.random())


@dataclass
class Pressure:
    """How many requests run at once: one more after a round without a refusal, half after one.

    Additive increase, multiplicative decrease (Chiu & Jain, Computer Networks 17, 1989); within a round trip the
    refusals of one burst count once.
    """

    most: int
    allowed: float = 4.0
    calm_at_s: float = 0.0
    away: int = 0
    """Calms since the last answer in which the target could not serve at all."""

    def succeeded(self) -> None:
        self.away = 0
        self.allowed = min(float(self.most), self.allowed + 1.0 / max(self.allowed, 1.0))

    def refused(self, now_s: float, retry_after_s: float) -> None:
        if now_s >= self.calm_at_s:
            self.allowed = max(1.0, self.allowed / 2)
            self.calm_at_s = now_s + max(retry_after_s, 0.1)

    def unserved(self, now_s: float, limits: Limits) -> None:
        """The target did not answer, or could not: the wait doubles until it does, so that an outage uses up few
        attempts."""
        if now_s >= self.calm_at_s:
            wait_s = min(limits.backoff_s_max, limits.backoff_s * 2.0 ** min(self.away, 30))
            self.away += 1
            self.allowed = max(1.0, self.allowed / 2)
            self.calm_at_s = now_s + wait_s

    @property
    def slots(self) -> int:
        return max(1, int(self.allowed))
