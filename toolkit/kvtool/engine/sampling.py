"""From logits to one token: greedy, or temperature with top-k and top-p.

The random number of a step is a function of (seed, position) alone, drawn from the counter-based generator Philox
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). An answer therefore does not depend on who
shares the batch, on which instance decodes it, or on how often it was retried.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtool.errors import EngineFailed, RequestRefused

_HEAD = 1024
"""Candidates sorted at first for top-p; nearly always enough, and 10 x cheaper than sorting a vocabulary."""


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0. `top_k` 0 and `top_p` 1 switch themselves off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def check_sampling(sampling: Sampling) -> None:
    """Raises RequestRefused with the field, what was found and what would be right."""
    temperature, top_p = sampling.temperature, sampling.top_p
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and 0 <= temperature <= 100):
        raise RequestRefused(f"temperature must lie in 0 (greedy) to 100, found {temperature!r}")
    if not _whole(sampling.top_k) or sampling.top_k < 0:
        raise RequestRefused(f"top_k must be a whole number from 0 (off) up, found {sampling.top_k!r}")
    if not (isinstance(top_p, (int, float)) and 0 < top_p <= 1):
        raise RequestRefused(f"top_p must lie above 0 and at most 1 (off), found {top_p!r}")
    if not _whole(sampling.seed) or not 0 <= sampling.seed < 1 << 63:
        raise RequestRefused(f"seed must be a whole number in 0 to 2**63 - 1, found {sampling.seed!r}")


def sample(logits: npt.NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The token that follows `position`; `logits` is one row, float32 [vocab_size]. Ties go to the lower token id.

    Raises:
        EngineFailed: a logit is not a number or infinite, or none is finite. -inf alone is fine: a token ruled out.
    """
    best = int(np.argmax(logits))
    top = float(logits[best])  # argmax gives the first NaN where there is one
    if not math.isfinite(top):
        bad = int(np.count_nonzero(~np.isfinite(logits)))
        raise EngineFailed(f"the engine gave {bad} logits of {logits.size} that are no numbers at position {position}")
    if sampling.temperature == 0 or sampling.top_k == 1:
        return best
    weights = np.exp((logits.astype(np.float64) - top) / max(sampling.temperature, 1e-6))
    ids, weights = _candidates(weights, sampling)
    sums = np.cumsum(weights)
    at = int(np.searchsorted(sums, uniform(sampling.seed, position) * sums[-1], side="right"))
    at = min(at, len(weights) - 1)
    while weights[at] == 0:  # only rounding at the very end can land on a token that is ruled out
        at -= 1
    return at if ids is None else int(ids[at])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position)."""
    word = np.random.Philox(key=seed, counter=position).random_raw()
    return float((int(word) >> 11) * 2.0**-53)


def _candidates(
    weights: npt.NDArray[np.float64], sampling: Sampling
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float64]]:
    """Token ids (None: all, in order) and weights that may be drawn, heaviest first."""
    size = weights.size
    top_k = min(sampling.top_k or size, size)
    if sampling.top_p == 1 and top_k == size:
        return None, weights
    head = top_k if sampling.top_k else min(_HEAD, size)
    ids = _heaviest(weights, head)
    if sampling.top_p == 1:
        return ids, weights[ids]
    total = float(weights[ids].sum() if sampling.top_k else weights.sum())
    if not sampling.top_k and float(weights[ids].sum()) < sampling.top_p * total:
        ids = _heaviest(weights, size)
    sums = np.cumsum(weights[ids])
    keep = int(np.searchsorted(sums, sampling.top_p * total, side="left")) + 1
    return ids[:keep], weights[ids[:keep]]


def _heaviest(weights: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
    """Ids of the `count` heaviest, heaviest first, ties by id."""
    if count < weights.size:
        least = np.partition(weights, weights.size - count)[weights.size - count]
        ids = np.flatnonzero(weights >= least)
    else:
        ids = np.arange(weights.size)
    order = np.argsort(-weights[ids], kind="stable")
    return np.asarray(ids[order][:count], dtype=np.int64)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
