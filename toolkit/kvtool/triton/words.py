"""Text to tokens and back, for the preprocessing and postprocessing models. Stateless; free of Triton's types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvtool.engine.tokenizer import Tokenizer
from kvtool.errors import ProtocolError, RequestRefused
from kvtool.serve.local import event_text
from kvtool.serve.request import Event
from kvtool.triton.asked import utf8
from kvtool.triton.wire import Ask


class Words:
    def __init__(self, engine: Path) -> None:
        self._tokenizer = Tokenizer(engine)

    def tokens(self, text: bytes, request: str) -> list[int]:
        """Prompt tokens of `text`, or of the chat messages in it when the ask says `chat`.

        Raises:
            RequestRefused: no UTF-8, no messages, an empty prompt.
        """
        prompt = utf8("text_input", text)
        if Ask.from_json(request).chat:
            prompt = self._tokenizer.chat(_messages(prompt))
        tokens = self._tokenizer.encode(prompt)
        if not tokens:
            raise RequestRefused("the prompt is empty; at least 1 token is needed")
        return tokens

    def text(self, tokens: Sequence[int], context: Sequence[int], event: str) -> str:
        """The text that a step adds (see serve.request.Event). Raises ProtocolError: `event` is not an EVENT."""
        if not tokens:
            return ""
        try:
            cut_chars = int(json.loads(event).get("cut_chars", 0))
        except (ValueError, TypeError, AttributeError) as error:
            raise ProtocolError(f"EVENT: {error}") from None
        return event_text(self._tokenizer, Event("", 0, tuple(tokens), tuple(context), cut_chars))


def _messages(text: str) -> list[dict[str, str]]:
    try:
        messages = json.loads(text)
    except ValueError as error:
        raise RequestRefused(f"chat: wanted JSON messages in text_input, found no JSON ({error})") from None
    fits = isinstance(messages, list) and messages and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
        for message in messages
    )  # fmt: skip
    if not fits:
        raise RequestRefused('chat: wanted [{"role": "user", "content": "..."}, ...] in text_input')
    return list(messages)
