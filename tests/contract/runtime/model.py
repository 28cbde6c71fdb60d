"""A model whose next token depends on every KV byte that it reads, and whose right KV is known without running it.

The KV words of position p are a pseudo-random function of all tokens up to p, and of what else decides real KV bytes:
adapter and image digests. The tenant's salt is hashed in too: real KV does not depend on it, but a block that crosses a
salt is then a wrong one. Every forward pass compares each word that attention would read with what it must be; a
difference taints all that comes after it, KV and tokens, as attention would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from .request import Given

U64 = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
DTYPE_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}


def mix(x: U64) -> U64:
    """A bijection of 64-bit words (SplitMix64's finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True)
class Group:
    """Layers that share page ids. `window`: how many tokens a query reads, its own included; None: all."""

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class Model:
    """The whole model. A head's bytes a token must be whole 8-byte words."""

    layers: int = 4
    kv_heads: int = 4
    head_dim: int = 4
    block_tokens: int = 4
    dtype: str = "bfloat16"
    kv_factor: int = 2
    vocab_size: int = 997
    name: str = "fake"
    groups: tuple[Group, ...] = ()

    @property
    def lanes(self) -> int:
        return self.head_dim * DTYPE_SIZE[self.dtype] // 8

    @property
    def layer_groups(self) -> tuple[Group, ...]:
        return self.groups or (Group(tuple(range(self.layers))),)

    def heads(self, rank: int, size: int) -> range:
        """Heads of `rank` of `size`: split where there are enough, else replicated."""
        if self.kv_heads >= size:
            share = self.kv_heads // size
            return range(rank * share, (rank + 1) * share)
        return range(rank * self.kv_heads // size, rank * self.kv_heads // size + 1)

    def seed(self, given: Given) -> int:
        what = repr((self.name, given.salt, given.lora, given.multimodal))
        return int.from_bytes(blake3(what.encode()).digest(8), "little")

    @staticmethod
    def after(state: int, token: int) -> int:
        """The state of a position: a chain over the tokens up to it."""
        return mix_int(state + (token + 1) * _GOLDEN & _MASK)

    def token(self, state: int, taint: int = 0) -> int:
        return mix_int(state ^ taint ^ 0x746F6B656E) % self.vocab_size

    def states(self, given: Given, tokens: Sequence[int]) -> list[int]:
        state, states = self.seed(given), []
        for token in tokens:
            states.append(state := self.after(state, token))
        return states

    def words(self, states: Sequence[int], heads: range) -> U64:
        """KV of the positions with `states`: [layers, kv_factor, heads, positions, lanes]."""
        shape = (self.layers, self.kv_factor, self.kv_heads, self.lanes)
        lane = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64).reshape(shape)[:, :, heads.start : heads.stop]
        at = np.asarray(states, dtype=np.uint64)
        return mix(at[None, None, None, :, None] + lane[:, :, :, None, :] * np.uint64(_GOLDEN))

    def answer(self, given: Given) -> list[int]:
        """The tokens that `given` must get, whatever pool, chunks, batches and faults did."""
        tokens = [*given.tokens, *given.first_tokens]
        state, made = self.seed(given), list(given.first_tokens)
        for token in tokens:
            state = self.after(state, token)
        while len(made) < given.max_tokens:
            made.append(token := self.token(state))
            if token == given.end_id:
                break
            state = self.after(state, token)
        return made

    def block(self, given: Given, tokens: Sequence[int], index: int, layers: Sequence[int], heads: range) -> bytes:
        """Bytes of whole block `index` of `tokens` as [layers, kv_factor, heads, tokens, head_dim]."""
        first = index * self.block_tokens
        states = self.states(given, tokens[: first + self.block_tokens])[first:]
        return bytes(np.ascontiguousarray(self.words(states, heads)[list(layers)]).view(np.uint8))


def fold(diff: U64, place: int) -> int:
    """64 bits of a difference; never 0 where there is one."""
    return mix_int(int(np.bitwise_xor.reduce(mix(diff + np.uint64(place)), axis=None)) | 1)


def as_words(memory: Any) -> U64:
    """uint8 torch memory as a numpy array of the same bytes."""
    array: U64 = memory.numpy()
    return array
