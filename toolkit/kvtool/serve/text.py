"""From tokens to text as it grows: whole characters, stop strings, nothing that must be taken back.

A token may end inside a character, and text may end inside what will become a stop string. Such tokens are held back
until it is clear what they are. What is sent is described by token ids and a count of characters to cut (see
`serve.request.Event`), so that a stateless step elsewhere can write the text; `Step.text` is that text.

The concatenation of all texts equals decode(all tokens), cut where the first stop string begins. This holds for
decoders that map tokens to bytes one by one (byte-level BPE), with U+FFFD for bytes that are no character, and as long
as all bytes form characters also for byte fallback and SentencePiece's leading space.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_UNFINISHED = "\ufffd"
_UNFINISHED_MAX = 3  # bytes of a character that has not ended, each of which some decoders show as U+FFFD
_CONTEXT_TOKENS = 4


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Step:
    """Tokens to send now. Their text is decode(context + tokens)[len(decode(context)):] less `cut_chars` at its end."""

    tokens: tuple[int, ...]
    context: tuple[int, ...]
    cut_chars: int
    text: str
    stopped: bool = False


class TextStream:
    """One request's text. Without a `decoder` every token is sent at once and the text is empty."""

    def __init__(self, decoder: Decoder | None, stop: Sequence[str] = ()) -> None:
        assert decoder is not None or not stop, "stop strings need a decoder"
        self._decoder, self._stop = decoder, tuple(stop)
        self._held: list[int] = []
        self._sent: deque[int] = deque()  # a few tokens of context; starts where a step started
        self._steps: deque[tuple[int, int]] = deque()  # their steps: tokens, characters

    @property
    def held(self) -> int:
        return len(self._held)

    def push(self, token: int) -> Step | None:
        """The step that `token` sets free, None while it is held back. After a step with `stopped` comes nothing."""
        self._held.append(token)
        if self._decoder is None:
            return self._send(1, "", 0)
        text = self._pending(len(self._held))
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            return self._send(len(self._held), text[: min(found)], len(text) - min(found), stopped=True)
        return self._part(text, self._unclear_from(text))

    def flush(self) -> Step:
        """What is still held, as it is: the end of the stream. May be empty."""
        text = self._pending(len(self._held)) if self._decoder is not None and self._held else ""
        return self._send(len(self._held), text, 0)

    def _pending(self, count: int) -> str:
        """The text of the first `count` held tokens behind the context."""
        assert self._decoder is not None
        context = list(self._sent)
        start = len(self._decoder.decode(context)) if context else 0
        return self._decoder.decode([*context, *self._held[:count]])[start:]

    def _unclear_from(self, text: str) -> int:
        """Where the longest end of `text` begins that may grow into a stop string; len(text) if none."""
        reach = max(map(len, self._stop), default=0) + _UNFINISHED_MAX
        for at in range(max(0, len(text) - reach), len(text)):
            tail = text[at:].rstrip(_UNFINISHED)  # an unfinished character may become the stop string's next one
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stop):
                return at
        return len(text)

    def _part(self, text: str, unclear: int) -> Step | None:
        """Send the leading tokens whose text lies before `unclear` and cannot be changed by a later byte."""
        for count in range(len(self._held), 0, -1) if unclear or not text else ():
            part = self._pending(count)
            if len(part) <= unclear and text.startswith(part) and _final(part, text[len(part) :]):
                return self._send(count, part, 0)
        return None

    def _send(self, count: int, text: str, cut: int, stopped: bool = False) -> Step:
        tokens, context = tuple(self._held[:count]), tuple(self._sent) if self._decoder is not None else ()
        del self._held[:count]
        if self._decoder is not None and tokens:
            self._sent.extend(tokens)
            self._steps.append((count, len(text)))
            self._forget()
        return Step(tokens, context, cut, text, stopped)

    def _forget(self) -> None:
        """Keep a few tokens of context, and some text in it: a first token may be shown in another way."""
        while True:
            (oldest, _), *others = self._steps
            if len(self._sent) - oldest < _CONTEXT_TOKENS or not any(chars for _, chars in others):
                return
            self._steps.popleft()
            for _ in range(oldest):
                self._sent.popleft()


def _final(part: str, rest: str) -> bool:
    """Whether `part` stands whatever comes: it ends with a whole character, or with bytes that are none for certain."""
    return not part.endswith(_UNFINISHED) or rest.strip(_UNFINISHED) != "" or len(rest) > _UNFINISHED_MAX
