"""A deployment against one process: the same prompts, the same engine, in turns.

Per round one new prompt: cold through the deployment (A), cold in one process (B), and warm through the deployment. So
neighbours share the machine's mood, and every ratio is of neighbours. The prompt of a round is new from its first
token, so that "cold" is cold; the hit ratio that came back stands beside each speed, since a fast answer to a prompt
that was not cold proves nothing.

TTFT is from the client's send to its first response with a token; TBT is each gap between tokens after that, at the
client. Silent: callers print.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from kvtool.measure.stats import Ratio, Summary, ratio, summarise

WORDS = (
    "amber basin cedar delta ember fjord glade heron inlet jetty knoll larch maple north ocean pearl quarry ridge "
    "slate thorn umber vale willow yarrow zephyr anchor beacon canvas dapple easel ferry garnet harbor iron juniper"
)


@dataclass(frozen=True)
class Answer:
    """One answer. `token_at_s`: when each token reached the client, in seconds after the request was sent; several
    tokens of one response share their time. `hit_tokens`: prompt tokens that came from the pool."""

    tokens: tuple[int, ...]
    token_at_s: tuple[float, ...]
    prompt_tokens: int
    hit_tokens: int = 0
    path_bytes: dict[str, int] = field(default_factory=dict)
    blocks_put: int = 0

    @property
    def ttft_s(self) -> float:
        return self.token_at_s[0]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_at_s)]

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


Prompt = str | Sequence[Mapping[str, str]]
"""Text, or chat messages ({"role", "content"}) for the model's own template."""


class Asks(Protocol):
    def __call__(self, prompt: str, max_tokens: int) -> Answer: ...


@dataclass
class Round:
    """The answers to one prompt."""

    cold: Answer
    alone: Answer
    warm: Answer

    @property
    def same_tokens(self) -> bool:
        return self.cold.tokens == self.alone.tokens == self.warm.tokens


@dataclass
class Comparison:
    rounds: list[Round]

    @property
    def same_tokens(self) -> bool:
        return all(each.same_tokens for each in self.rounds)

    def ratios(self) -> dict[str, Ratio]:
        """Each is "more than 1 means the first takes longer"."""
        cold, alone, warm = self._ttfts("cold"), self._ttfts("alone"), self._ttfts("warm")
        return {
            "TTFT, one process cold / full hit": ratio(alone, warm),
            "TTFT, deployment cold / full hit": ratio(cold, warm),
            "TTFT, deployment cold / one process cold": ratio(cold, alone),
            "TBT, deployment / one process": ratio(self._median_gaps("warm"), self._median_gaps("alone")),
        }

    def raw(self) -> dict[str, tuple[Summary, float]]:
        """Milliseconds and the median hit ratio, by what was measured."""
        rows: dict[str, tuple[Summary, float]] = {}
        for label, name in (("deployment, cold", "cold"), ("deployment, full hit", "warm"), ("one process", "alone")):
            answers = self._answers(name)
            hit = summarise([answer.hit_ratio for answer in answers]).median
            rows[f"TTFT ms, {label}"] = summarise([answer.ttft_s * 1e3 for answer in answers]), hit
            gaps = [gap * 1e3 for answer in answers for gap in answer.gaps_s]
            if gaps:
                rows[f"TBT ms, {label}"] = summarise(gaps), hit
        return rows

    def stream_overhead_ms(self) -> Summary:
        """What front and servers add to each streamed token: how much longer a warm stream took than the same tokens in
        one process, a token, per round. Below zero where noise is larger than the overhead."""
        return summarise([_pace_ms(each.warm) - _pace_ms(each.alone) for each in self.rounds])

    def to_json(self) -> dict[str, Any]:
        return {
            "same_tokens": self.same_tokens,
            "ratios": {name: found.to_json() for name, found in self.ratios().items()},
            "raw": {name: {**found.to_json(), "hit_ratio": hit} for name, (found, hit) in self.raw().items()},
            "stream_overhead_ms": self.stream_overhead_ms().to_json(),
            "samples": [
                {
                    name: {
                        "prompt_tokens": answer.prompt_tokens,
                        "hit_tokens": answer.hit_tokens,
                        "token_at_s": [round(at_s, 6) for at_s in answer.token_at_s],
                    }
                    for name, answer in (("cold", each.cold), ("alone", each.alone), ("warm", each.warm))
                }
                for each in self.rounds
            ],
        }

    def _answers(self, name: str) -> list[Answer]:
        return [getattr(each, name) for each in self.rounds]

    def _ttfts(self, name: str) -> list[float]:
        return [answer.ttft_s for answer in self._answers(name)]

    def _median_gaps(self, name: str) -> list[float]:
        return [summarise(answer.gaps_s).median for answer in self._answers(name)]


def compare(
    deployment: Asks,
    alone: Asks,
    *,
    prompts: Callable[[int], str],
    rounds: int,
    max_tokens: int,
    settle: Callable[[], None],
    said: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Run `rounds` rounds. `settle` returns when background work (such as storing generated blocks) is over; it is
    called before every measurement. `max_tokens` of at least 2, else there is no gap to measure."""
    if rounds < 1 or max_tokens < 2:
        raise ValueError(f"at least 1 round of 2 tokens is needed, got {rounds} of {max_tokens}")
    found = Comparison([])
    for index in range(rounds):
        prompt = prompts(index)
        answers = []
        for ask in (deployment, alone, deployment):
            settle()
            answers.append(ask(prompt, max_tokens))
        found.rounds.append(Round(*answers))
        cold, once, warm = answers
        said(
            f"round {index + 1} of {rounds}: TTFT {cold.ttft_s * 1e3:.0f} ms cold, {once.ttft_s * 1e3:.0f} ms in one "
            f"process, {warm.ttft_s * 1e3:.0f} ms with {warm.hit_ratio:.0%} from the pool"
        )
    return found


def made_prompt(seed: int, index: int, tokens: int, count: Callable[[str], int]) -> str:
    """A text of exactly `tokens` tokens, by `count`, or a few less where the tokenizer cannot hit it; new from its
    first word for every (seed, index)."""
    rng, known = random.Random(f"{seed}/{index}"), WORDS.split()
    words = [f"{index}", *(rng.choice(known) for _ in range(tokens))]
    low, high = 1, len(words)
    while low < high:  # the longest run of words that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(" ".join(words[:middle])) <= tokens else (low, middle - 1)
    text = " ".join(words[:low])
    while count(text + " a") <= tokens:
        text += " a"
    return text


def _pace_ms(answer: Answer) -> float:
    """Milliseconds a token, from the first to the last."""
    return (answer.token_at_s[-1] - answer.token_at_s[0]) * 1e3 / max(1, len(answer.token_at_s) - 1)
