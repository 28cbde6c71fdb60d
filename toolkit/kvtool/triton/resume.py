"""Going on with an answer after the decode server that was writing it died.

Decoding is deterministic, so another instance given the same request writes the same tokens from the start. What the
client has already is dropped, and must be equal: an answer that changed half-way would be a wrong answer, so a
difference ends the request instead.
"""

from __future__ import annotations

from kvtool.errors import ProtocolError


class Resume:
    """What the client was sent, and how much of it the present attempt has repeated."""

    def __init__(self) -> None:
        self.sent_tokens: list[int] = []
        self._sent_text = ""
        self._tokens_seen = 0
        self._text_seen = ""

    def restart(self) -> None:
        """The next `take` is the first of a new attempt."""
        self._tokens_seen, self._text_seen = 0, ""

    def take(self, tokens: tuple[int, ...], text: str) -> tuple[tuple[int, ...], str]:
        """What of one step is new to the client.

        Raises:
            ProtocolError: the attempt differs from what was sent.
        """
        repeated = self.sent_tokens[self._tokens_seen : self._tokens_seen + len(tokens)]
        if repeated != list(tokens[: len(repeated)]):
            at = self._tokens_seen + next(i for i, token in enumerate(repeated) if token != tokens[i])
            raise ProtocolError(
                f"the answer cannot be continued: after a restart token {at} differs from the one already sent; "
                "send the request again"
            )
        self._tokens_seen += len(tokens)
        new_tokens = tokens[len(repeated) :]
        self.sent_tokens.extend(new_tokens)
        return new_tokens, self._new_text(text)

    def _new_text(self, text: str) -> str:
        """Text is compared as a whole: another attempt may hold back other characters at a step."""
        self._text_seen += text
        overlap = min(len(self._text_seen), len(self._sent_text))
        if self._text_seen[:overlap] != self._sent_text[:overlap]:
            raise ProtocolError(
                "the answer cannot be continued: after a restart its text differs from what was already sent; "
                "send the request again"
            )
        new = self._text_seen[len(self._sent_text) :]
        self._sent_text += new
        return new
