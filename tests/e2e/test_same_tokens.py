"""The first promise: whether a prompt's KV came from the pool or was computed never changes a token."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from deployed import Deployed, until
from prompts import thirty

from kvtool.engine.load import load_engine
from kvtool.engine.manifest import read_manifest
from kvtool.engine.tokenizer import Tokenizer
from kvtool.serve.decode import DecodeWorker
from kvtool.serve.request import Event, Request

pytestmark = pytest.mark.real

MAX_TOKENS = 6
CHUNK = 512


@pytest.fixture(scope="module")
def prompts(smollm2_engine: Path) -> list[tuple[str, str]]:
    tokenizer = Tokenizer(smollm2_engine)
    return thirty(read_manifest(smollm2_engine).layout.block_tokens, CHUNK, tokenizer.encode, tokenizer.decode)


def answer_alone(worker: DecodeWorker, name: str, tokens: list[int]) -> list[int]:
    """What `worker`, without servers and pool, answers to a prompt."""
    answer, over = list[int](), threading.Event()

    def take(event: Event) -> None:
        answer.extend(event.tokens)
        if event.finish:
            assert event.error is None, event.error
            over.set()

    worker.submit(Request(name, tuple(tokens), MAX_TOKENS), take)
    assert over.wait(60), f"{name}: no answer"
    return answer


@pytest.fixture(scope="module")
def alone(smollm2_engine: Path, prompts: list[tuple[str, str]]) -> dict[str, list[int]]:
    """What one process without servers and pool answers."""
    tokenizer = Tokenizer(smollm2_engine)
    worker = DecodeWorker(load_engine(smollm2_engine, threads=2, blocks=64), tokenizer)
    try:
        return {name: answer_alone(worker, name, tokenizer.encode(text)) for name, text in prompts}
    finally:
        worker.close()


def test_cold_warm_and_one_process_give_the_same_tokens(
    deployment: Deployed, prompts: list[tuple[str, str]], alone: dict[str, list[int]]
) -> None:
    assert len(prompts) == 30
    cold = {name: deployment.ask(text, MAX_TOKENS) for name, text in prompts}
    warm = {name: deployment.ask(text, MAX_TOKENS) for name, text in prompts}
    for name, text in prompts:
        assert not cold[name].error and not warm[name].error, (name, cold[name].error, warm[name].error)
        assert cold[name].tokens == alone[name], f"cold, {name}: {text[:80]!r}"
        assert warm[name].tokens == alone[name], f"warm, {name}: {text[:80]!r}"
        assert cold[name].text == warm[name].text
        usage = warm[name].usage
        whole = usage["prompt_tokens"] // 32 * 32
        assert sum(usage["hit_tokens"].values()) == whole, (
            f"{name}: every whole block is a hit the second time: {usage}"
        )
        assert usage["prompt_tokens"] == whole + usage["computed_tokens"]
    total = sum(sum(answer.usage["hit_tokens"].values()) for answer in warm.values())
    assert total > 3000, "the warm pass is about hits"


def test_the_next_turn_hits_generated_tokens_and_answers_like_a_cold_run(
    deployment: Deployed, smollm2_engine: Path
) -> None:
    """What decode made comes back as a hit, in the form that prefill would have computed."""
    tokenizer = Tokenizer(smollm2_engine)
    prompt = "List the months of the year and say something about the weather of each. " * 4
    first = deployment.ask(prompt, 80, ignore_eos=True)
    assert len(first.tokens) == 80, first
    held = len(tokenizer.encode(prompt)) + 80
    second = prompt + first.text + " Thank you. And now the days of the week:"
    assert tokenizer.encode(second)[: held - 8] == [*tokenizer.encode(prompt), *first.tokens][: held - 8]
    until("the first turn's blocks to be put", lambda: not deployment.held())
    answer = deployment.ask(second, MAX_TOKENS)
    assert sum(answer.usage["hit_tokens"].values()) >= (held - 8) // 32 * 32 - 32, answer.usage

    worker = DecodeWorker(load_engine(smollm2_engine, threads=2, blocks=64), tokenizer)
    try:
        assert answer.tokens == answer_alone(worker, "cold", tokenizer.encode(second))
    finally:
        worker.close()
