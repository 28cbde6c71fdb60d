"""A running deployment, asked as `measure.serve` asks: by gRPC, with the time of each token at the client."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtool.measure.serve import Answer, Prompt
from kvtool.triton.client import stream
from kvtool.triton.state import front_url, read_state


class Deployed:
    """The deployment whose run directory is `run_dir`.

    Raises:
        Unavailable: none runs there.
    """

    def __init__(self, run_dir: Path, *, ignore_eos: bool = False, timeout_s: float = 600.0) -> None:
        self.url = front_url(run_dir)
        state = read_state(run_dir) or {}
        self.id, self.supervisor = str(state["deployment"]), int(state["supervisor"]["pid"])
        self.ignore_eos, self._timeout_s = ignore_eos, timeout_s
        self.usage: dict[str, Any] = {}
        """Of the last answer."""

    def __call__(self, prompt: Prompt, max_tokens: int, on_text: Callable[[str], None] | None = None) -> Answer:
        """Raises KvtoolError: as the front says."""
        tokens: list[int] = []
        token_at_s: list[float] = []
        began_s = time.perf_counter()
        pieces = stream(self.url, prompt, max_tokens=max_tokens, ignore_eos=self.ignore_eos, timeout_s=self._timeout_s)
        for piece in pieces:
            token_at_s.extend([time.perf_counter() - began_s] * len(piece.tokens))
            tokens.extend(piece.tokens)
            if on_text is not None and piece.text:
                on_text(piece.text)
            if piece.finish_reason:
                self.usage = dict(piece.usage)
        pool = self.usage.get("pool", {})
        return Answer(
            tuple(tokens),
            tuple(token_at_s),
            prompt_tokens=int(self.usage.get("prompt_tokens", 0)),
            hit_tokens=sum(self.usage.get("hit_tokens", {}).values()),
            path_bytes=dict(pool.get("path_bytes", {})),
            blocks_put=int(pool.get("blocks_put", 0)),
        )
