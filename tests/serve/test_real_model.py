"""A real model through both workers: cold, warm, over turns and in one process, token for token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from serving import DECODE, PREFILL, Stream, serving

from kvtool.engine.load import load_engine
from kvtool.engine.tokenizer import Tokenizer
from kvtool.pool.embedded import EmbeddedPool
from kvtool.serve.decode import DecodeWorker
from kvtool.serve.local import event_text, generate
from kvtool.serve.request import Finish, Request, Sampling

CHUNKS = {"prefill": replace(PREFILL, chunk_tokens=64), "decode": replace(DECODE, chunk_tokens=32)}
QUESTION = "Name the largest planet of the solar system."
STORY = "Once upon a time there was a lighthouse keeper who counted ships. " * 5


@pytest.fixture(scope="module")
def tokenizer(smollm2_engine):
    return Tokenizer(smollm2_engine)


@pytest.fixture(scope="module")
def engines(smollm2_engine):
    return [load_engine(smollm2_engine, threads=2, blocks=48) for _ in range(2)]


def alone(engine, tokens, max_tokens, sampling=None):
    worker, stream = DecodeWorker(engine, options=CHUNKS["decode"]), Stream()
    worker.submit(Request("alone", tuple(tokens), max_tokens, sampling or Sampling()), stream)
    answer = stream.wait().tokens
    assert stream.last.error is None
    worker.close()
    return answer


def test_answers_of_the_real_model_are_equal_cold_warm_and_alone(engines, tokenizer):
    chat = tokenizer.encode(tokenizer.chat([{"role": "user", "content": QUESTION}]))
    story = tokenizer.encode(STORY)
    asked = [
        (chat, Sampling()),
        (story[:65], Sampling()),
        (story[:64], Sampling(0.8, top_p=0.9, seed=3)),
        (chat[:1], Sampling()),
    ]
    expected = [alone(engines[0], tokens, 12, sampling) for tokens, sampling in asked]
    assert "largest planet" in tokenizer.decode(alone(engines[0], chat, 24))
    pool = EmbeddedPool(engines[0].layout, 64 << 20)
    handed = iter(engines)
    with serving(pool, engines=lambda: next(handed), **CHUNKS) as house:
        for temperature in ("cold", "warm"):
            for (tokens, sampling), answer in zip(asked, expected, strict=True):
                stream = house.ask(tokens, 12, sampling=sampling)
                assert stream.tokens == answer, temperature
                if temperature == "warm":
                    assert sum(stream.last.usage.hit_tokens.values()) == len(tokens) // 32 * 32
    assert pool.audit() == []
    pool.close()


def test_the_next_turn_of_a_chat_hits_what_was_generated_and_equals_a_cold_run(engines, tokenizer):
    history = tokenizer.encode(tokenizer.chat([{"role": "user", "content": QUESTION}]))
    pool = EmbeddedPool(engines[0].layout, 64 << 20)
    handed = iter(engines)
    with serving(pool, engines=lambda: next(handed), **CHUNKS) as house:
        first = house.ask(history, 40, ignore_eos=True).tokens
        longer = [*history, *first, *tokenizer.encode(" And the smallest?")]
        second = house.ask(longer, 12)
    assert second.last.usage.hit_tokens == {"dram": (len(history) + len(first)) // 32 * 32}
    assert second.tokens == alone(engines[0], longer, 12)
    pool.close()


def test_text_of_the_stream_is_the_text_of_the_tokens_up_to_the_stop_string(engines, tokenizer, smollm2_engine):
    prompt = tuple(tokenizer.encode("Here is a smiley 😀 and here are three more: 😀"))
    whole = tokenizer.decode(alone(engines[0], prompt, 30))
    stop = whole[len(whole) // 2 :][:3]
    worker, stream = DecodeWorker(engines[0], tokenizer), Stream()
    worker.submit(Request("r", prompt, 30, stop=(stop,)), stream)
    stream.wait()
    worker.close()
    text = "".join(event_text(tokenizer, event) for event in stream.events)
    assert text == whole[: whole.find(stop)] and stream.last.finish is Finish.STOP
    pieces = list(
        generate(smollm2_engine, "Here is a smiley 😀 and here are three more: 😀", max_tokens=30, stop=[stop])
    )
    assert "".join(piece.text for piece in pieces) == text
    assert pieces[-1].finish is Finish.STOP and pieces[-1].usage.prompt_tokens == len(prompt)
