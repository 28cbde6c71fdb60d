"""Sampling: by (seed, position) alone, from exactly the candidates that were asked for."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from kvtool.engine.sampling import Sampling, check_sampling, sample, uniform
from kvtool.errors import EngineFailed, RequestRefused


def logits(seed: int, size: int = 5000) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=2.0, size=size).astype(np.float32)


def candidates(row: np.ndarray, sampling: Sampling) -> set[int]:
    """The plain definition: sort all, keep top_k, then the fewest whose share reaches top_p."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    order = order[: sampling.top_k or len(order)]
    weights = np.exp((row[order].astype(np.float64) - row.max()) / sampling.temperature)
    kept = int(np.searchsorted(np.cumsum(weights), sampling.top_p * weights.sum())) + 1
    return set(order[:kept])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, top_k=3),
        Sampling(0.7, top_p=0.5),
        Sampling(1.5, top_k=50, top_p=0.8),
        Sampling(0.2, top_p=0.999),
        Sampling(5.0, top_p=0.95),
    ],
)
def test_only_candidates_are_drawn_and_all_likely_ones_are(sampling):
    row = logits(1)
    allowed = candidates(row, sampling)
    drawn = Counter(sample(row, sampling, position) for position in range(600))
    assert set(drawn) <= allowed
    if len(allowed) <= 3:
        assert set(drawn) == allowed


def test_shares_are_those_of_the_softmax():
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    drawn = Counter(sample(row, Sampling(1.0, seed=4), position) for position in range(8000))
    for token, share in enumerate((0.5, 0.3, 0.15, 0.05)):
        assert drawn[token] / 8000 == pytest.approx(share, abs=0.02)


def test_a_draw_depends_on_seed_and_position_alone():
    row = logits(2)
    again = [sample(row, Sampling(1.0, seed=7), position) for position in range(50)]
    assert again == [sample(row, Sampling(1.0, seed=7), position) for position in range(50)]
    assert again != [sample(row, Sampling(1.0, seed=8), position) for position in range(50)]
    assert len(set(again)) > 20


def test_the_random_numbers_are_the_same_on_every_machine():
    assert [uniform(0, 0), uniform(1, 2), uniform(2**63 - 1, 4096)] == [
        0.011546754286331562,
        0.4082618259872465,
        0.09060387643162549,
    ]


def test_greedy_takes_the_best_and_ties_go_to_the_lower_id():
    row = np.array([1.0, 5.0, 5.0, -np.inf], dtype=np.float32)
    assert sample(row, Sampling(), 3) == 1
    assert sample(row, Sampling(2.0, top_k=1), 3) == 1
    assert sample(logits(3), Sampling(1e-9), 3) == int(np.argmax(logits(3)))


def test_a_token_that_is_ruled_out_is_never_drawn():
    row = np.array([-np.inf, 0.0, -np.inf, 0.0, -np.inf], dtype=np.float32)
    assert {sample(row, Sampling(1.0), position) for position in range(100)} == {1, 3}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_engine_failure(bad):
    row = logits(1, 8)
    row[5] = bad
    for sampling in (Sampling(), Sampling(1.0, top_k=2), Sampling(1.0)):
        with pytest.raises(EngineFailed, match="1 logits of 8 that are no numbers at position 9"):
            sample(row, sampling, 9)
    with pytest.raises(EngineFailed, match="8 logits of 8"):
        sample(np.full(8, -np.inf, dtype=np.float32), Sampling(), 9)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (Sampling(-0.1), "temperature must lie in 0 .* found -0.1"),
        (Sampling(float("inf")), "found inf"),
        (Sampling(top_k=-1), "top_k must be .* found -1"),
        (Sampling(top_k=1.5), "top_k must be"),
        (Sampling(top_p=0), "top_p must lie above 0"),
        (Sampling(top_p=1.01), "found 1.01"),
        (Sampling(seed=-1), "seed must be .* found -1"),
        (Sampling(seed=2**63), "seed must be"),
    ],
)
def test_wrong_parameters_are_refused(sampling, words):
    with pytest.raises(RequestRefused, match=words):
        check_sampling(sampling)
    check_sampling(Sampling(0.5, 40, 0.9, 2**63 - 1))
