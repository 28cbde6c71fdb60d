"""A generation request, what comes back while it runs, and what it used. Free of Triton's types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvtool.engine.sampling import Sampling as Sampling
from kvtool.errors import KvtoolError


@dataclass(frozen=True)
class Request:
    """`tokens`: the prompt. `deadline_s`: seconds from arrival until the request may be given up, with a clear error.
    `priority`: 0 to 100, higher first. `salt`: of the tenant, set by the server side. `publish`: may its KV go to the
    pool; that of a canary may not."""

    request_id: str
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    deadline_s: float = 600.0
    priority: int = 50
    salt: str = ""
    ignore_eos: bool = False
    publish: bool = True


class Finish(str, Enum):
    STOP = "stop"
    """EOS or a stop string."""
    LENGTH = "length"
    """max_tokens, or the end of the context window."""
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass
class Usage:
    """Token counts of one request. prompt_tokens = sum(hit_tokens.values()) + computed_tokens.

    `hit_tokens` by tier ("dram", "file"); `path_bytes` by path ("shm", "ucx", ...) what this stage read from the pool.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    put_blocks: int = 0
    path_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: queue, fetch, prefill, put, ttft, ..."""


@dataclass(frozen=True)
class Event:
    """One step of a stream. `tokens` may hold several ids: they are held back while the text ends inside a character
    or inside what may become a stop string. The text of the step is

        decode(context + tokens)[len(decode(context)):], without its last `cut_chars` characters

    so a stateless postprocessing step can write it. `index`: how many tokens were sent before. The last event has
    `finish`, `usage`, and for ERROR the `error`."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    context: tuple[int, ...] = ()
    cut_chars: int = 0
    finish: Finish | None = None
    usage: Usage | None = None
    error: KvtoolError | None = None


OnEvent = Callable[[Event], None]
"""Called from the worker's thread, in order; must not block. After an event with `finish` there is no other."""
