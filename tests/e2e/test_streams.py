"""Many at once, clients that leave, and requests that are wrong: afterwards nobody holds anything."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from deployed import Deployed, kvtool, until
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


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        ("word " * 9000, {}, r"prompt"),
        ("", {}, r"empty"),
        (b"caf\xe9 \xff", {}, r"UTF-8"),
        ("hello", {"max_tokens": 0}, r"max_tokens"),
        ("hello", {"temperature": -1.0}, r"temperature"),
        ("hello", {"deadline_ms": 0}, r"deadline"),
        ("hello", {"priority": 101}, r"priority"),
    ],
)
def test_wrong_requests_are_refused_with_a_sentence(
    deployment: Deployed, prompt: str | bytes, options: dict[str, float], said: str
) -> None:
    answer = deployment.ask(prompt, **options)  # type: ignore[arg-type]
    assert said in answer.error, answer
    assert "Traceback" not in answer.error and 'File "' not in answer.error
    assert not answer.tokens
    assert deployment.ask("hello", 2).finish, "and the next one is served"


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


def test_generate_stream_over_http_gives_the_same_text(deployment: Deployed) -> None:
    port = deployment.server("front-0")["http_port"]
    body = json.dumps({"text_input": "The capital of France is", "max_tokens": 8}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/kvtool/generate_stream", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [json.loads(line[5:]) for line in response.read().decode().splitlines() if line.startswith("data:")]
    text = "".join(event["text_output"] for event in events)
    assert text == deployment.ask("The capital of France is", 8).text
    assert events[-1]["finish_reason"] == "length"


def test_the_command_line_streams_the_same_text(deployment: Deployed) -> None:
    prompt = "The capital of France is"
    said = kvtool(
        "generate", "--run-dir", str(deployment.run_dir), "--prompt", "The capital of France is", "--max-tokens", "8"
    )
    assert said.stdout.strip() == deployment.ask(prompt, 8).text.strip()
