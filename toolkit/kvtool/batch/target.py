"""Where requests run: an engine in this process, or a deployment. What the runner sees of either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtool.batch.line import Line
from kvtool.errors import KvtoolError


@dataclass(frozen=True)
class Ready:
    """One attempt at one request. `name` is new for every attempt; `tokens` are those of the prompt."""

    number: int
    name: str
    line: Line
    tokens: tuple[int, ...]
    max_tokens: int
    deadline_s: float


@dataclass(frozen=True)
class Published:
    """The prompt's blocks are in the pool; others that begin with them may start."""

    number: int
    name: str


@dataclass(frozen=True)
class Ended:
    """One attempt is over: with an answer, or with an error. `usage`: prompt_tokens, completion_tokens, hit_tokens, and
    prefill_s, the seconds that computing the rest of the prompt took."""

    number: int
    name: str
    text: str = ""
    finish: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: KvtoolError | None = None


Tell = Callable[[Published | Ended], None]
"""From any thread; must not block. `Ended` comes exactly once for each attempt."""


class Target(Protocol):
    slots_max: int
    """Attempts that may run at once."""

    def start(self, ready: Ready, tell: Tell) -> None:
        """Never raises for the request's faults: they are told."""
        ...

    def cancel(self, name: str) -> None:
        """It ends soon, with `Cancelled`, or with what it had become by then."""
        ...

    def trouble(self) -> str:
        """Why nothing can run here any more, for the job to stop; "" while something can."""
        ...

    def close(self) -> None: ...
