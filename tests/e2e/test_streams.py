"""Many at once, clients that leave, and requests that are wrong: afterwards nobody holds anything."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from deployed import Deployed, until
from prompts import prose
from stream import Answer

pytestmark = pytest.mark.real


def test_eight_streams_half_of_them_cancelled_leave_nothing_behind(deployment: Deployed) -> None:
    shared = prose(150, 7)
    prompts = [f"{shared} number {n}" for n in range(8)]
    want = [deployment.ask(prompt, 24, ignore_eos=True).tokens for prompt in prompts[::2]]
    streams = [
        deployment.stream(prompt, 24 if n % 2 == 0 else 400, ignore_eos=True) for n, prompt in enumerate(prompts)
    ]
    for n, stream in enumerate(streams):
        stream.take(1 + n // 2)
    for stream in streams[1::2]:
        stream.cancel()
    answers = [stream.rest() for stream in streams[::2]]
    assert [answer.tokens for answer in answers] == want
    assert all(answer.finish == "length" for answer in answers)
    until("everything to be given back", lambda: not deployment.held(), 15)
    counts = deployment.worker("decode-0")["counts"]
    assert counts["cancelled"] >= 4, counts


def test_a_client_that_leaves_during_prefill_frees_prefill(deployment: Deployed) -> None:
    stream = deployment.stream(prose(4000, 9), 8)
    until("prefill to be at work", lambda: deployment.worker("prefill-0")["requests"] > 0, 15)
    stream.cancel()
    until("everything to be given back", lambda: not deployment.held(), 10)


def test_requests_that_come_together_share_their_prefix(deployment: Deployed) -> None:
    shared = prose(260, 11)

    def ask(n: int) -> Answer:
        return deployment.ask(f"{shared} {n}", 4)

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(6)))
    assert all(answer.finish for answer in answers)
    again = ask(0)
    assert sum(again.usage["hit_tokens"].values()) >= again.usage["prompt_tokens"] // 32 * 32


def test_a_deadline_ends_a_stream_with_its_reason(deployment: Deployed) -> None:
    answer = deployment.ask("Tell me everything.", 2000, deadline_ms=1500, ignore_eos=True)
    assert "deadline" in answer.error, answer
    assert 1.0 < answer.seconds < 4.0
    until("everything to be given back", lambda: not deployment.held(), 10)


def test_seeded_sampling_is_the_same_alone_and_in_company(deployment: Deployed) -> None:
    def ask(seed: int) -> Answer:
        return deployment.ask("Once upon a time", 24, temperature=0.9, seed=seed, ignore_eos=True)

    one = ask(7)
    with ThreadPoolExecutor(4) as threads:
        many = list(threads.map(ask, [7, 8, 9, 10]))
    assert many[0].tokens == one.tokens
    assert len({tuple(answer.tokens) for answer in many}) == 4
