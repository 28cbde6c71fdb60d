"""Which blocks a prompt needs before its first token, and under which keys.

Decoding starts by feeding the last prompt token at position n - 1, so what must be there is the KV of [0, n - 1): all
whole blocks, and of the trailing partial block what lies before its last token. A trailing block of one token holds
only position n - 1 and is neither computed nor moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtool.engine.base import Engine
from kvtool.kv.block import BlockKey, KeySeed, block_keys, partial_key
from kvtool.serve.request import Request


@dataclass(frozen=True)
class PromptKeys:
    """`keys`: of the whole blocks. `tail`: of the trailing partial block of `tail_tokens` tokens, None where none is
    needed. `seed`: the seed's digest."""

    seed: bytes
    block_tokens: int
    prompt_tokens: int
    keys: tuple[BlockKey, ...]
    tail: BlockKey | None
    tail_tokens: int

    @property
    def all(self) -> list[BlockKey]:
        return [*self.keys, self.tail] if self.tail is not None else list(self.keys)

    @property
    def end(self) -> int:
        """Positions [0, end) are what prefill computes and moves."""
        return len(self.keys) * self.block_tokens + self.tail_tokens

    def covered(self, blocks: int) -> int:
        """Positions that the leading `blocks` of `all` cover."""
        return min(blocks * self.block_tokens, self.end)

    def parent(self, index: int) -> BlockKey | None:
        return self.keys[index - 1] if index else None


def seed_digest(request: Request, engine: Engine, namespace: str) -> bytes:
    return KeySeed(
        namespace=namespace,
        model=engine.model_digest,
        layout=engine.layout.fingerprint,
        numerics=engine.numerics,
        salt=request.salt,
    ).digest()


def prompt_keys(request: Request, engine: Engine, namespace: str) -> PromptKeys:
    """About 1 us a block."""
    seed, step = seed_digest(request, engine, namespace), engine.layout.block_tokens
    keys = tuple(block_keys(seed, request.tokens, step))
    tail: Sequence[int] = request.tokens[len(keys) * step :]
    if len(tail) < 2:
        tail = ()
    return PromptKeys(seed, step, len(request.tokens), keys, partial_key(seed, keys, tail) if tail else None, len(tail))
