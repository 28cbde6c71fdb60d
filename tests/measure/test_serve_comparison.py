"""The comparison on fakes whose times are known, so that its arithmetic can be checked to the digit."""

from __future__ import annotations

import pytest

from kvtool.measure.serve import Answer, compare, made_prompt
from kvtool.measure.stats import Ratio


class Fake:
    """Answers from a script of (TTFT, gap): the first time a prompt is seen it is cold, afterwards warm."""

    def __init__(self, cold: tuple[float, float], warm: tuple[float, float], log: list[str], name: str) -> None:
        self.cold, self.warm, self.log, self.name, self.seen = cold, warm, log, name, set[str]()

    def __call__(self, prompt: str, max_tokens: int) -> Answer:
        hit = prompt in self.seen
        self.seen.add(prompt)
        ttft_s, gap_s = self.warm if hit else self.cold
        self.log.append(self.name)
        times = tuple(ttft_s + gap_s * index for index in range(max_tokens))
        return Answer(tuple(range(max_tokens)), times, prompt_tokens=64, hit_tokens=63 if hit else 0)


def test_runs_take_turns_and_the_ratios_are_of_neighbours() -> None:
    log: list[str] = []
    deployment = Fake((2.2, 0.010), (0.1, 0.011), log, "A")
    alone = Fake((2.0, 0.010), (2.0, 0.010), log, "B")
    found = compare(
        deployment, alone, prompts=lambda index: f"p{index}", rounds=2, max_tokens=5, settle=lambda: log.append("-")
    )
    assert "".join(log) == "-A-B-A" * 2
    assert found.same_tokens
    ratios = {name: round(each.median, 6) for name, each in found.ratios().items()}
    assert ratios == {
        "TTFT, one process cold / full hit": 20.0,
        "TTFT, deployment cold / full hit": 22.0,
        "TTFT, deployment cold / one process cold": 1.1,
        "TBT, deployment / one process": 1.1,
    }
    assert found.stream_overhead_ms().median == pytest.approx(1.0)
    summary, hit = found.raw()["TTFT ms, deployment, full hit"]
    assert (summary.count, round(summary.max, 6), hit) == (2, 100.0, 63 / 64)
    assert found.raw()["TTFT ms, deployment, cold"][1] == 0.0
    assert Ratio(**found.to_json()["ratios"]["TBT, deployment / one process"]).low == pytest.approx(1.1)


def test_an_answer_that_differs_is_seen() -> None:
    def other(prompt: str, max_tokens: int) -> Answer:
        return Answer((9,) * max_tokens, tuple(float(at) for at in range(1, max_tokens + 1)), 64)

    fake = Fake((1.0, 0.01), (1.0, 0.01), [], "A")
    found = compare(fake, other, prompts=str, rounds=1, max_tokens=2, settle=lambda: None)
    assert not found.same_tokens


def test_nothing_to_measure_is_refused() -> None:
    fake = Fake((1.0, 0.01), (1.0, 0.01), [], "A")
    with pytest.raises(ValueError, match="got 0 of 2"):
        compare(fake, fake, prompts=str, rounds=0, max_tokens=2, settle=lambda: None)
    with pytest.raises(ValueError, match="got 1 of 1"):
        compare(fake, fake, prompts=str, rounds=1, max_tokens=1, settle=lambda: None)


def test_made_prompts_have_the_length_and_differ_from_their_first_word() -> None:
    def count(text: str) -> int:
        return sum(1 + len(word) // 5 for word in text.split())

    prompts = [made_prompt(3, index, 500, count) for index in range(4)]
    assert [count(prompt) for prompt in prompts] == [500] * 4
    assert len({prompt.split()[0] for prompt in prompts}) == 4
    assert prompts[1] == made_prompt(3, 1, 500, count)
    assert prompts[1] != made_prompt(4, 1, 500, count)
