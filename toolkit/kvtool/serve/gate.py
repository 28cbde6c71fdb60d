"""Fetch or recompute: when a worker turns to its pool, and for how long it waits.

Reuse pays only where fetching is faster than computing (Mooncake, arXiv 2407.00079, section 2). Both speeds are
measured as the worker runs, as exponentially weighted means. A fetch gets a budget from them, so that a pool that
stalls costs a request a small share of its own prefill; a pool that keeps stalling is left alone for a while, then
asked once before it is trusted again.

Pure rules: time is an argument. Several threads may call; what they touch are single numbers, and a lost update costs
one sample.
"""

from __future__ import annotations

from kvtool.serve.options import PoolOptions

_WEIGHT = 0.2
_PROBE_EVERY = 16


class Mean:
    """An exponentially weighted mean of a rate; None before the first sample."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, amount: float, seconds: float) -> None:
        if amount <= 0 or seconds <= 0:
            return
        rate = amount / seconds
        self.value = rate if self.value is None else self.value + _WEIGHT * (rate - self.value)


class FetchGate:
    def __init__(self, options: PoolOptions, block_tokens: int, block_size: int) -> None:
        self._options = options
        self._block_tokens, self._block_size = block_tokens, block_size
        self.fetch_bytes_s, self.compute_tokens_s = Mean(), Mean()
        self._failures, self._rests_until_s, self._skipped = 0, 0.0, 0
        self.opened = 0
        """How often the breaker opened."""

    def passes(self, now_s: float) -> bool:
        """Whether the pool may be asked now. While it rests, one call a rest passes and is the probe."""
        if self._failures < self._options.breaker_failures:
            return True
        if now_s < self._rests_until_s:
            return False
        self._rests_until_s = now_s + self._options.breaker_rest_s
        return True

    def rests(self, now_s: float) -> bool:
        """Whether the breaker is open; asks for no probe."""
        return self._failures >= self._options.breaker_failures and now_s < self._rests_until_s

    def answered(self) -> None:
        self._failures = 0

    def failed(self, now_s: float) -> None:
        """A wait in vain: the budget was spent, or the pool raised."""
        self._failures += 1
        if self._failures == self._options.breaker_failures:
            self._rests_until_s = now_s + self._options.breaker_rest_s
            self.opened += 1

    def worth_fetching(self, blocks: int) -> bool:
        """Whether fetching `blocks` should be faster than computing them; every so often yes anyway, to measure."""
        if blocks <= 0:
            return False
        fetch_s, compute_s = self._fetch_s(blocks), self._compute_s(blocks)
        if not self._options.recompute_if_faster:
            return True
        if fetch_s is None or compute_s is None or fetch_s < compute_s:
            return True
        self._skipped += 1
        return self._skipped % _PROBE_EVERY == 0

    def fetch_budget_s(self, blocks: int) -> float:
        """How long a fetch of `blocks` may take: what it needs with room to spare, or a share of recomputing."""
        options = self._options
        compute_s, fetch_s = self._compute_s(blocks), self._fetch_s(blocks)
        if compute_s is None:
            return options.fetch_budget_s
        wanted_s = max(options.fetch_slack * compute_s, 2 * fetch_s if fetch_s is not None else 0.0)
        return min(options.fetch_budget_s, max(options.fetch_floor_s, wanted_s))

    def match_budget_s(self, blocks: int) -> float:
        compute_s = self._compute_s(blocks)
        if compute_s is None:
            return self._options.match_budget_s
        wanted_s = max(self._options.fetch_floor_s, self._options.fetch_slack * compute_s)
        return min(self._options.match_budget_s, wanted_s)

    def _fetch_s(self, blocks: int) -> float | None:
        rate = self.fetch_bytes_s.value
        return None if rate is None else blocks * self._block_size / rate

    def _compute_s(self, blocks: int) -> float | None:
        rate = self.compute_tokens_s.value
        return None if rate is None else blocks * self._block_tokens / rate
