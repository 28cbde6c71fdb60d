"""One line of an OpenAI batch file: what it asks for, or why it cannot be done.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}

What would change an answer if it were ignored (tools, logit_bias, several choices) is refused; what would not (user,
metadata) is let through. Only what can be told without the model's tokenizer is checked here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
CUSTOM_ID_MAX = 512
LINE_SIZE_MAX = 64 << 20
"""Bytes of one line; a longer one is no line but another kind of file."""

IGNORED = frozenset(
    [
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "stream",
        "n",
        "best_of",
        "echo",
        "safety_identifier",
        "prompt_cache_key",
        "parallel_tool_calls",
    ]
)
"""Keys of a body that do not change our answer, given that those in `_NEUTRAL` have the value that says nothing."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "stream": (None, False),
    "echo": (None, False),
    "logprobs": (None, False),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
}
_OURS = frozenset(
    [
        "messages",
        "prompt",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "ignore_eos",
    ]
)


class BadLine(ValueError):
    """`code` is for programs, as in OpenAI's error files; the message is for people. `custom_id` is set where the line
    got as far as having one."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


@dataclass(frozen=True)
class Line:
    """One request. `prompt`: text, token ids, or chat messages. None: the job's or the deployment's default."""

    custom_id: str
    url: str
    prompt: str | tuple[int, ...] | list[dict[str, Any]]
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


def read_line(raw: bytes) -> Line:
    """
    Raises:
        BadLine: what was wanted and what was found.
    """
    if len(raw) > LINE_SIZE_MAX:
        raise BadLine("line_too_long", f"wanted at most {LINE_SIZE_MAX} bytes in a line, found {len(raw)}")
    try:
        return read_request(json.loads(raw.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        raise BadLine("invalid_json", f"wanted UTF-8, found byte 0x{raw[error.start]:02x}") from None
    except RecursionError:
        raise BadLine(
            "invalid_json", "wanted one JSON object, found lists or objects within each other too deep"
        ) from None
    except BadLine:
        raise
    except ValueError as error:
        raise BadLine("invalid_json", f"wanted one JSON object, found no JSON ({error})") from None


def read_request(found: Any) -> Line:
    """As `read_line`, of a line that is JSON."""
    if not isinstance(found, dict):
        raise BadLine("invalid_json", f"wanted one JSON object, found {_kind(found)}")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_MAX:
        said = "none" if custom_id is None else f"{custom_id!r:.60}"
        raise BadLine("missing_custom_id", f"custom_id: wanted a text of 1 to {CUSTOM_ID_MAX} characters, found {said}")
    _whole_text(custom_id, "custom_id")
    try:
        return _request(custom_id, found)
    except BadLine as error:
        error.custom_id = custom_id
        raise


def _whole_text(value: Any, what: str) -> None:
    """JSON can write half of a surrogate pair, which is no character: no tokenizer, and no file in UTF-8, takes it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadLine("invalid_body", f"{what}: wanted text, found half a character ({value[error.start]!r})") from None


def _request(custom_id: str, found: dict[str, Any]) -> Line:
    unknown = sorted(set(found) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise BadLine("unknown_key", f"wanted custom_id, method, url and body, found {', '.join(unknown)} too")
    if found.get("method", "POST") != "POST":
        raise BadLine("invalid_method", f"method: wanted POST, found {found['method']!r:.40}")
    url = found.get("url")
    if url not in (CHAT_URL, TEXT_URL):
        raise BadLine("unknown_url", f"url: wanted {CHAT_URL} or {TEXT_URL}, found {url!r:.80}")
    body = found.get("body")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", f"body: wanted an object, found {_kind(body)}")
    _supported(body)
    return Line(
        custom_id=custom_id,
        url=url,
        prompt=_messages(body) if url == CHAT_URL else _prompt(body),
        max_tokens=_max_tokens(body),
        temperature=_number(body, "temperature", 0.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0, open_low=True),
        top_k=_whole(body, "top_k", 0, 0, 1 << 20),
        seed=_whole(body, "seed", 0, -(1 << 63), (1 << 63) - 1),
        stop=_stop(body),
        ignore_eos=_flag(body, "ignore_eos"),
    )


def _supported(body: dict[str, Any]) -> None:
    for key, value in body.items():
        neutral = _NEUTRAL.get(key)
        if neutral is not None:
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
                raise BadLine("unsupported", f"body.{key}: {value!r:.60} is not supported; leave it out")
        elif key not in _OURS and key not in IGNORED:
            raise BadLine("unsupported", f"body.{key} is not supported; known: {', '.join(sorted(_OURS))}")


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    if "prompt" in body:
        raise BadLine("invalid_body", f"body.prompt belongs to {TEXT_URL}; give messages, or change the url")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadLine("invalid_body", f"body.messages: wanted a list of at least one message, found {_kind(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadLine("invalid_body", f"body.messages[{index}]: wanted role and content, found {_kind(message)}")
        if not isinstance(message.get("content"), str):
            found = _kind(message.get("content"))
            raise BadLine("invalid_body", f"body.messages[{index}].content: wanted text, found {found}")
        _whole_text(message["content"], f"body.messages[{index}].content")
        _whole_text(message["role"], f"body.messages[{index}].role")
    return messages


def _prompt(body: dict[str, Any]) -> str | tuple[int, ...]:
    if "messages" in body:
        raise BadLine("invalid_body", f"body.messages belongs to {CHAT_URL}; give a prompt, or change the url")
    prompt = body.get("prompt")
    if isinstance(prompt, str) and prompt:
        _whole_text(prompt, "body.prompt")
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return tuple(prompt)
    raise BadLine("invalid_body", f"body.prompt: wanted one text or one list of token ids, found {_kind(prompt)}")


def _max_tokens(body: dict[str, Any]) -> int | None:
    given = [body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None]
    if not given:
        return None
    if len(set(map(repr, given))) > 1:
        raise BadLine("invalid_body", f"body.max_tokens and max_completion_tokens differ: {given[0]!r}, {given[1]!r}")
    return _whole({"max_tokens": given[0]}, "max_tokens", 1, 1, 1 << 24)


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and 0 < len(text) <= 1000 for text in texts):
        raise BadLine("invalid_body", f"body.stop: wanted texts of 1 to 1000 characters, found {stop!r:.60}")
    if len(texts) > 16:
        raise BadLine("invalid_body", f"body.stop: wanted at most 16, found {len(texts)}")
    for text in texts:
        _whole_text(text, "body.stop")
    return tuple(texts)


def _number(
    body: Mapping[str, Any], key: str, default: float, low: float, high: float, open_low: bool = False
) -> float:
    value = body.get(key)
    if value is None:
        return default
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not fits or (open_low and value == low):
        span = f"from {'above ' if open_low else ''}{low:g} to {high:g}"
        raise BadLine("invalid_body", f"body.{key}: wanted a number {span}, found {value!r:.40}")
    return float(value)


def _whole(body: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = body.get(key)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise BadLine("invalid_body", f"body.{key}: wanted a whole number from {low} to {high}, found {value!r:.40}")
    return value


def _flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadLine("invalid_body", f"body.{key}: wanted true or false, found {value!r:.40}")
    return bool(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing"}
    if isinstance(value, list) and not value:
        return "an empty list"
    if value == "":
        return "an empty text"
    return names.get(type(value), "a number")
