"""Whether a request can run here at all: refused with the numbers, before anything is taken for it."""

from __future__ import annotations

from typing import Protocol

from kvtool.engine.base import Engine
from kvtool.engine.sampling import check_sampling
from kvtool.errors import RequestRefused
from kvtool.serve.request import Request

STOP_MAX = 16
STOP_CHARS_MAX = 1000


class Window(Protocol):
    """Of an engine, what any request is held against."""

    @property
    def context_tokens_max(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def check_request(request: Request, engine: Window) -> None:
    """Raises RequestRefused: empty or too long a prompt, ids outside the vocabulary, max_tokens < 1, bad sampling."""
    prompt, context = len(request.tokens), engine.context_tokens_max
    if not request.request_id:
        raise RequestRefused("a request needs an id, found an empty one")
    if prompt == 0:
        raise RequestRefused(f"{request.request_id}: the prompt is empty; at least 1 token is needed")
    if prompt + 1 > context:
        raise RequestRefused(
            f"{request.request_id}: the prompt has {prompt} tokens; with 1 to generate the context window of {context} "
            f"holds at most {context - 1}"
        )
    if request.max_tokens < 1:
        raise RequestRefused(f"{request.request_id}: max_tokens must be at least 1, found {request.max_tokens}")
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or high >= engine.vocab_size:
        bad = low if low < 0 else high
        raise RequestRefused(f"{request.request_id}: token {bad} is outside the vocabulary of {engine.vocab_size}")
    if not request.deadline_s > 0:
        raise RequestRefused(f"{request.request_id}: deadline_s must be positive, found {request.deadline_s}")
    if not 0 <= request.priority <= 100:
        raise RequestRefused(f"{request.request_id}: priority must lie in 0 to 100, found {request.priority}")
    if len(request.stop) > STOP_MAX or any(not 0 < len(text) <= STOP_CHARS_MAX for text in request.stop):
        raise RequestRefused(
            f"{request.request_id}: at most {STOP_MAX} stop strings of 1 to {STOP_CHARS_MAX} characters, found "
            f"{len(request.stop)} of {[len(text) for text in request.stop[:STOP_MAX]]} characters"
        )
    check_sampling(request.sampling)


def capacity_tokens(request: Request, engine: Engine) -> int:
    """Positions that the request can fill: prompt and all of max_tokens, capped by the context window."""
    return min(len(request.tokens) + request.max_tokens, engine.context_tokens_max)


def check_room(request: Request, engine: Engine, tokens: int) -> None:
    """Raises RequestRefused: `tokens` would not fit into this engine's KV memory even if it were empty."""
    block = engine.layout.block_tokens
    wanted = -(-tokens // block)
    if wanted > engine.blocks_total:
        raise RequestRefused(
            f"{request.request_id}: {tokens} tokens need {wanted} KV blocks of {block}, this engine has "
            f"{engine.blocks_total}; lower max_tokens, or raise kv_blocks of this role"
        )
