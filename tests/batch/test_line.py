"""What a line of the input may say, and the sentence for each thing that it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtool.batch.line import CHAT_URL, LINE_SIZE_MAX, TEXT_URL, BadLine, read_line

HELLO = [{"role": "user", "content": "hello"}]


def line(**changes: Any) -> dict[str, Any]:
    made = {"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": {"messages": HELLO}}
    return {key: value for key, value in {**made, **changes}.items() if value is not ...}


def body(**given: Any) -> dict[str, Any]:
    return line(body={"messages": HELLO, **given})


def text(**given: Any) -> dict[str, Any]:
    return line(url=TEXT_URL, body=given)


def test_a_chat_with_every_setting() -> None:
    given = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": -4, "stop": ["x", "y"]}
    read = read_line(json.dumps(body(**given, ignore_eos=True, model="any", user="me", n=1)).encode())
    assert read.prompt == HELLO and read.max_tokens == 7 and read.temperature == 0.5 and read.top_p == 0.9
    assert read.top_k == 3 and read.seed == -4 and read.stop == ("x", "y") and read.ignore_eos


def test_a_text_prompt_and_one_of_token_ids() -> None:
    assert read_line(json.dumps(text(prompt="once", stop="x")).encode()).stop == ("x",)
    assert read_line(json.dumps(text(prompt=[1, 2])).encode()).prompt == (1, 2)


def test_method_may_be_left_out_and_completion_tokens_are_tokens() -> None:
    assert read_line(json.dumps(line(method=...)).encode()).max_tokens is None
    assert read_line(json.dumps(body(max_completion_tokens=5)).encode()).max_tokens == 5
    assert read_line(json.dumps(body(max_completion_tokens=5, max_tokens=5)).encode()).max_tokens == 5


BAD: list[tuple[Any, str, str]] = [
    ("nonsense", "invalid_json", "wanted one JSON object, found a text"),
    ([1], "invalid_json", "found a list"),
    (line(custom_id=...), "missing_custom_id", "found none"),
    (line(custom_id=""), "missing_custom_id", "1 to 512 characters"),
    (line(custom_id=3), "missing_custom_id", "found 3"),
    (line(custom_id="x" * 513), "missing_custom_id", "1 to 512"),
    (line(extra=1), "unknown_key", "found extra too"),
    (line(method="GET"), "invalid_method", "wanted POST, found 'GET'"),
    (line(url=...), "unknown_url", "found None"),
    (line(url="/v1/embeddings"), "unknown_url", "found '/v1/embeddings'"),
    (line(body=...), "invalid_body", "body: wanted an object, found nothing"),
    (body(messages=[]), "invalid_body", "found an empty list"),
    (body(messages="hi"), "invalid_body", "found a text"),
    (body(messages=[{"role": "user"}]), "invalid_body", r"messages\[0\].content: wanted text, found nothing"),
    (body(messages=[{"content": "x"}]), "invalid_body", "wanted role and content"),
    (body(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "invalid_body", "found a list"),
    (body(prompt="x"), "invalid_body", "belongs to /v1/completions"),
    (text(messages=HELLO), "invalid_body", "belongs to /v1/chat/completions"),
    (text(prompt=""), "invalid_body", "found an empty text"),
    (text(prompt=["a", "b"]), "invalid_body", "one text or one list of token ids"),
    (text(prompt=[True]), "invalid_body", "token ids"),
    (text(prompt=[-1]), "invalid_body", "token ids"),
    (body(max_tokens=0), "invalid_body", "max_tokens: wanted a whole number from 1"),
    (body(max_tokens=1.5), "invalid_body", "found 1.5"),
    (body(max_tokens=True), "invalid_body", "found True"),
    (body(max_tokens=1, max_completion_tokens=2), "invalid_body", "differ: 1, 2"),
    (body(temperature=-1), "invalid_body", "temperature: wanted a number from 0 to 2"),
    (body(temperature="hot"), "invalid_body", "found 'hot'"),
    (body(temperature=True), "invalid_body", "found True"),
    (body(top_p=0), "invalid_body", "from above 0 to 1"),
    (body(top_k=-1), "invalid_body", "top_k"),
    (body(seed="x"), "invalid_body", "seed"),
    (body(stop=[""]), "invalid_body", "1 to 1000 characters"),
    (body(stop=["x"] * 17), "invalid_body", "at most 16, found 17"),
    (body(ignore_eos=1), "invalid_body", "true or false"),
    (body(n=2), "unsupported", "body.n: 2 is not supported"),
    (body(n=True), "unsupported", "body.n"),
    (body(stream=True), "unsupported", "body.stream"),
    (body(tools=[{}]), "unsupported", "body.tools"),
    (body(logprobs=True), "unsupported", "body.logprobs"),
    (body(response_format={"type": "json_object"}), "unsupported", "body.response_format"),
    (body(invented=1), "unsupported", "body.invented is not supported; known: "),
]


@pytest.mark.parametrize(("given", "code", "said"), BAD, ids=[f"{code}-{at}" for at, (_, code, _) in enumerate(BAD)])
def test_what_cannot_be_done_is_refused(given: Any, code: str, said: str) -> None:
    with pytest.raises(BadLine, match=said) as caught:
        read_line(json.dumps(given).encode())
    assert caught.value.code == code
    named = isinstance(given, dict) and given.get("custom_id") == "a"
    assert caught.value.custom_id == ("a" if named else None)


@pytest.mark.parametrize("raw", [b"{", b"\xff\xfe{}", b"[" * 100_000, b"nul", b'{"a": 1} x'])
def test_what_is_no_json_is_refused(raw: bytes) -> None:
    with pytest.raises(BadLine) as caught:
        read_line(raw)
    assert caught.value.code == "invalid_json"


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(BadLine, match="wanted at most"):
        read_line(b" " * (LINE_SIZE_MAX + 1))
