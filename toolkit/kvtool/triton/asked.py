"""What a client asked the front for, held against the deployment's limits before anything is taken for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvtool.errors import RequestRefused
from kvtool.triton.wire import Ask


@dataclass(frozen=True)
class Limits:
    max_tokens_default: int
    max_tokens_max: int
    deadline_s: float
    concurrent_max: int


@dataclass(frozen=True)
class Asked:
    """One request as it came; None where the client said nothing. `text` is raw UTF-8, with `chat` a JSON list of
    messages. Empty `request_id`: the front makes one."""

    text: bytes
    request_id: str = ""
    chat: bool = False
    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[bytes, ...] = ()
    priority: int = 50
    deadline_ms: int | None = None
    ignore_eos: bool = False

    @property
    def deadline_s(self) -> float:
        assert self.deadline_ms is not None, "checked() fills it"
        return self.deadline_ms / 1e3

    def named(self, request_id: str) -> Asked:
        return replace(self, request_id=request_id)

    def checked(self, limits: Limits) -> Asked:
        """The request with every default filled in.

        Raises:
            RequestRefused: text that is not UTF-8, or a value outside the limits.
        """
        utf8("text_input", self.text)
        for text in self.stop:
            utf8("stop", text)
        max_tokens = limits.max_tokens_default if self.max_tokens is None else self.max_tokens
        if not 1 <= max_tokens <= limits.max_tokens_max:
            raise RequestRefused(f"max_tokens must lie in 1 to {limits.max_tokens_max}, found {max_tokens}")
        deadline_ms = math.ceil(limits.deadline_s * 1e3) if self.deadline_ms is None else self.deadline_ms
        if not 1 <= deadline_ms <= limits.deadline_s * 1e3:
            raise RequestRefused(f"deadline_ms must lie in 1 to {limits.deadline_s * 1e3:.0f}, found {deadline_ms}")
        if "~" in self.request_id or len(self.request_id) > 128:
            raise RequestRefused(f"a request id has at most 128 characters and no ~, found {self.request_id[:140]!r}")
        return replace(self, max_tokens=max_tokens, deadline_ms=deadline_ms)

    def ask(self, request_id: str, left_s: float) -> Ask:
        """For one attempt at an engine, with what is left of the deadline."""
        assert self.max_tokens is not None, "checked() fills it"
        return Ask(
            request_id=request_id,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(text.decode() for text in self.stop),
            deadline_s=max(left_s, 1e-3),
            priority=self.priority,
            ignore_eos=self.ignore_eos,
            chat=self.chat,
        )


def utf8(name: str, raw: bytes) -> str:
    """Raises RequestRefused: `raw` is not UTF-8; says where."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise RequestRefused(
            f"{name}: wanted UTF-8, found byte 0x{raw[error.start]:02x} at offset {error.start} that is none"
        ) from None
