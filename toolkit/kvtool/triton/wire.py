"""What front, prefill and decode tell each other in JSON tensors, and how errors cross a server that knows only text.

REQUEST carries an `Ask`, or {"op": "cancel" | "canary" | "status"}; EVENT and HANDOFF carry the answers. Errors of the
workers travel inside those, with their kind. Only what Triton itself reports (a model that is gone, a refused text)
comes as plain text; kvtool's own text begins with the kind, "RequestRefused: ...", so that the far side can raise it
again.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from kvtool import errors
from kvtool.errors import KvtoolError, Overloaded, ProtocolError, RequestRefused, Unavailable
from kvtool.serve.request import Event, Request, Sampling, Usage

_KINDS: dict[str, type[KvtoolError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, KvtoolError)
}
_SPOKEN = re.compile(rf"\b({'|'.join(sorted(_KINDS, key=len, reverse=True))}): (.*)", re.DOTALL)
_RETRY = re.compile(r"retry after ([0-9.]+) s")
_STUB_GONE = ("is not healthy", "Stub process", "Failed to process the request(s) for model instance")


@dataclass(frozen=True)
class Ask:
    """One request on its way from the front to an engine; all but the tokens. `chat`: the text is JSON messages.
    `deadline_s`: what is left of it now."""

    request_id: str
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    deadline_s: float = 600.0
    priority: int = 50
    ignore_eos: bool = False
    chat: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Ask:
        """Raises RequestRefused: `text` is not an ask."""
        raw = _object(text, "REQUEST")
        try:
            return cls(**{**raw, "stop": tuple(raw.get("stop", ()))})
        except TypeError as error:
            raise RequestRefused(f"REQUEST: {error}") from None

    def request(self, tokens: tuple[int, ...]) -> Request:
        return Request(
            request_id=self.request_id,
            tokens=tokens,
            max_tokens=self.max_tokens,
            sampling=Sampling(self.temperature, self.top_k, self.top_p, self.seed),
            stop=self.stop,
            deadline_s=self.deadline_s,
            priority=self.priority,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Step:
    """One response of the decode stage, as the front sees it. The last has `finish`."""

    tokens: tuple[int, ...]
    text: str
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: KvtoolError | None = None


def read_op(text: str) -> dict[str, Any] | None:
    """The operation in a REQUEST, or None when it is an `Ask`."""
    raw = _object(text, "REQUEST")
    return raw if "op" in raw else None


def op_json(op: dict[str, Any]) -> str:
    return json.dumps(op, separators=(",", ":"))


def event_json(event: Event) -> str:
    """EVENT of a decode step; tokens and context travel as tensors."""
    said: dict[str, Any] = {"index": event.index, "cut_chars": event.cut_chars}
    if event.finish is not None:
        said["finish"] = event.finish.value
    if event.usage is not None:
        said["usage"] = asdict(event.usage)
    if event.error is not None:
        said["error"] = error_fields(event.error)
    return json.dumps(said, separators=(",", ":"))


def step(tokens: tuple[int, ...], text: str, event: str) -> Step:
    """Raises ProtocolError: `event` is not an EVENT."""
    raw = _object(event, "EVENT", ProtocolError)
    error = error_from_fields(raw["error"]) if raw.get("error") else None
    return Step(tokens, text, str(raw.get("finish") or ""), dict(raw.get("usage") or {}), error)


def handoff_json(handoff: str | None, usage: Usage, error: KvtoolError | None) -> str:
    """HANDOFF of the prefill stage: `handoff` is serve.handoff's own JSON, carried through unread."""
    said = {"handoff": handoff, "usage": asdict(usage), "error": error_fields(error) if error else None}
    return json.dumps(said, separators=(",", ":"))


def read_handoff(text: str) -> tuple[str, dict[str, Any]]:
    """The hand-off to pass on to decode, and the prefill stage's usage. Raises the error that it carries."""
    raw = _object(text, "HANDOFF", ProtocolError)
    if raw.get("error"):
        raise error_from_fields(raw["error"])
    return str(raw.get("handoff") or ""), dict(raw.get("usage") or {})


def error_fields(error: KvtoolError) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, Overloaded):
        fields["retry_after_s"] = error.retry_after_s
    return fields


def error_from_fields(fields: dict[str, Any]) -> KvtoolError:
    kind, message = _KINDS.get(str(fields.get("kind")), KvtoolError), str(fields.get("message", ""))
    if kind is Overloaded:
        return Overloaded(message, float(fields.get("retry_after_s", 1.0)))
    return kind(message)


def error_text(error: KvtoolError) -> str:
    """An error as text for a client: kind, sentence, and when to come back."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, Overloaded) and not _RETRY.search(text):
        text += f"; retry after {error.retry_after_s:.1f} s"
    return text


def error_from_text(text: str) -> KvtoolError:
    """The error behind what Triton said: kvtool's own again, and a dead stub as `Unavailable`."""
    spoken = _SPOKEN.search(text)
    if spoken:
        retry = _RETRY.search(spoken[2])
        retry_after_s = float(retry[1].rstrip(".")) if retry else 1.0
        return error_from_fields({"kind": spoken[1], "message": spoken[2], "retry_after_s": retry_after_s})
    if any(sign in text for sign in _STUB_GONE):
        return Unavailable(f"a model's process is gone: {text.strip()}")
    return KvtoolError(text.strip())


def is_ours(text: str) -> bool:
    """Whether kvtool said it, and not Triton."""
    return bool(_SPOKEN.search(text))


def _object(text: str, name: str, kind: type[KvtoolError] = RequestRefused) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise kind(f"{name}: wanted a JSON object, found {text[:200]!r} ({error})") from None
    if not isinstance(raw, dict):
        raise kind(f"{name}: wanted a JSON object, found {text[:200]!r}")
    return raw
