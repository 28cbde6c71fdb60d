"""One process, no servers, no pool: the yardstick. The decode worker on the same engine, with the same threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtool.engine.tokenizer import Tokenizer
from kvtool.errors import DeadlinePassed
from kvtool.measure.serve import Answer, Prompt
from kvtool.serve.open import open_decode
from kvtool.serve.options import DecodeOptions
from kvtool.serve.request import Event, Request


class Alone:
    """Ask it like a deployment (`measure.serve.Asks`). Loads the engine once; `close()` lets it go."""

    def __init__(
        self, engine_dir: Path, options: DecodeOptions, *, ignore_eos: bool = False, deadline_s: float = 600.0
    ) -> None:
        self.tokenizer = Tokenizer(engine_dir)
        self._ignore_eos, self._deadline_s, self._asked = ignore_eos, deadline_s, 0
        self._worker = open_decode(engine_dir, None, options, name="alone")

    def __call__(
        self, prompt: Prompt, max_tokens: int, on_tokens: Callable[[tuple[int, ...]], None] | None = None
    ) -> Answer:
        """Ask once and wait for the end. Making tokens of the text is part of the time, as it is for a server.

        Raises:
            KvtoolError: what the worker says is wrong with the request.
            DeadlinePassed: no end within the deadline.
        """
        tokens: list[int] = []
        token_at_s: list[float] = []
        last: list[Event] = []
        over = threading.Event()
        began_s = time.perf_counter()

        def note(event: Event) -> None:
            token_at_s.extend([time.perf_counter() - began_s] * len(event.tokens))
            tokens.extend(event.tokens)
            if on_tokens is not None:
                on_tokens(event.tokens)
            if event.finish is not None:
                last.append(event)
                over.set()

        self._asked += 1
        text = prompt if isinstance(prompt, str) else self.tokenizer.chat(prompt)
        prompt_tokens = tuple(self.tokenizer.encode(text))
        self._worker.submit(
            Request(
                f"alone-{self._asked}", prompt_tokens, max_tokens, ignore_eos=self._ignore_eos,
                deadline_s=self._deadline_s,
            ),
            note,
        )  # fmt: skip
        if not over.wait(self._deadline_s + 5.0):
            raise DeadlinePassed(f"one process gave no answer within {self._deadline_s:.0f} s")
        if last[0].error is not None:
            raise last[0].error
        return Answer(tuple(tokens), tuple(token_at_s), prompt_tokens=len(prompt_tokens))

    def close(self) -> None:
        self._worker.close()
