"""Hints are bounded, end by the clock, and a wrong one is forgotten."""

from __future__ import annotations

from blocks import KEYS

from kvtool.kv.hot import Near
from kvtool.pool.hints import HINTS_MAX, Hints


def test_a_hint_lives_a_little_shorter_than_the_copy():
    hints = Hints()
    hints.learn(KEYS[:3], [Near(1, 4, 10.0), Near(7, 5, 10.0)], 100.0)
    assert len(hints) == 1 and hints.rank_near(KEYS[1], 108.9) == 4 and hints.rank_near(KEYS[0], 100.0) is None
    assert hints.rank_near(KEYS[1], 109.1) is None and not hints


def test_a_newer_hint_replaces_an_older_one_and_a_wrong_one_goes():
    hints = Hints()
    hints.learn(KEYS[:1], [Near(0, 4, 10.0)], 0.0)
    hints.learn(KEYS[:1], [Near(0, 5, 10.0)], 5.0)
    assert hints.rank_near(KEYS[0], 12.0) == 5
    hints.wrong(KEYS[:2])
    assert hints.rank_near(KEYS[0], 12.0) is None


def test_hints_are_bounded_and_the_oldest_go_first():
    hints = Hints()
    keys = [number.to_bytes(32, "big") for number in range(HINTS_MAX + 100)]
    hints.learn(keys, [Near(at, 1, 60.0) for at in range(len(keys))], 0.0)
    assert len(hints) == HINTS_MAX
    assert hints.rank_near(keys[99], 1.0) is None and hints.rank_near(keys[100], 1.0) == 1
