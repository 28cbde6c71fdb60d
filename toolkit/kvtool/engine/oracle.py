"""An engine whose next token is a function of every KV byte it reads: the proof of the path around it.

A wrong block in front of a real model may still give the right token. Here it cannot: `decode` digests every byte of
the KV of [0, position) from the sequence's own memory, so one flipped bit, one block of another prompt, one block in
the wrong place, or one byte left over from the sequence before changes the next token with near certainty, and all
tokens after it. Memory that is given back keeps its bytes, and new memory starts as noise, as on a real device.

The canonical KV of a position is a pseudo-random function of the tokens up to it. `prefill` taints what it computes
when the prefix in memory is not canonical, as attention would; the KV that `decode` makes for the token it feeds is
another function, so generated blocks that reach the pool without being recomputed by the prefill path are caught too.
Everything is vectorised: a thousand tokens of prefill cost about a millisecond, as does a decode step behind them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvtool.engine.base import DecodeStep, LayerHooks, SequenceKV
from kvtool.errors import EngineFull
from kvtool.kv.layout import DTYPE_SIZE, KVLayout

U64 = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(x: U64) -> U64:
    """SplitMix64's finaliser, a bijection of 64-bit words: distinct inputs stay distinct. Steele, Lea & Flood,
    "Fast splittable pseudorandom number generators" (OOPSLA 2014), figure 16."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass
class OracleSequence:
    blocks: list[int]
    block_tokens: int
    length: int = 0
    open: bool = True

    @property
    def capacity_tokens(self) -> int:
        return len(self.blocks) * self.block_tokens


def _live(sequence: SequenceKV) -> OracleSequence:
    assert isinstance(sequence, OracleSequence) and sequence.open, "a sequence that is closed, or another engine's"
    return sequence


class OracleEngine:
    """Engine over `blocks` blocks of `layout`; see the module. Engines of equal `model` give equal answers."""

    def __init__(
        self,
        layout: KVLayout | None = None,
        *,
        blocks: int = 256,
        model: str = "oracle",
        numerics: str = "oracle-1",
        vocab_size: int = 512,
        context_tokens_max: int = 4096,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.layout = layout or KVLayout(layers=3, kv_heads=2, head_dim=4, block_tokens=8)
        if self.layout.token_size % 8:
            raise ValueError(
                f"an oracle needs tokens of whole 8-byte words, got {self.layout.token_size} bytes a token"
            )
        self.model_digest = blake3(b"oracle model\0" + model.encode()).hexdigest()
        self.numerics = numerics
        self.vocab_size = vocab_size
        self.context_tokens_max = context_tokens_max
        self.eos_token_ids = eos_token_ids
        self.blocks_total = blocks
        noise = np.random.default_rng(20240917)
        self._memory = noise.integers(0, 256, (blocks, self.layout.block_size), dtype=np.uint8)
        self._free = list(range(blocks - 1, -1, -1))
        self._seed = int.from_bytes(blake3(model.encode()).digest(8), "little")
        self._words = self.layout.token_size // 8
        self._head = self.layout.head_dim * DTYPE_SIZE[self.layout.dtype]

    @property
    def blocks_free(self) -> int:
        return len(self._free)

    def open(self, capacity_tokens: int) -> OracleSequence:
        wanted = -(-capacity_tokens // self.layout.block_tokens)
        if wanted > len(self._free):
            raise EngineFull(
                f"wanted {wanted} KV blocks for {capacity_tokens} tokens, {len(self._free)} of {self.blocks_total} "
                "are free; wait for a sequence to end, or start the engine with more blocks"
            )
        return OracleSequence([self._free.pop() for _ in range(wanted)], self.layout.block_tokens)

    def close(self, sequence: SequenceKV) -> None:
        assert isinstance(sequence, OracleSequence)
        if sequence.open:
            sequence.open = False
            self._free.extend(reversed(sequence.blocks))

    def prefill(
        self, sequence: SequenceKV, tokens: Sequence[int], start: int, end: int, hooks: LayerHooks | None = None
    ) -> None:
        sequence = _live(sequence)
        assert 0 <= start <= sequence.length, "prefill needs the KV of [0, start)"
        assert start <= end <= min(len(tokens), sequence.capacity_tokens), "prefill beyond the prompt or the memory"
        states = self._states(tokens[:end])
        kv = self._canonical(states)
        taint = self._digest(self._read(sequence, start)) ^ self._digest(kv[:start])
        if taint:
            kv[start:] = mix(kv[start:] ^ np.uint64(taint))
        for layer in range(self.layout.layers):
            if hooks and hooks.before:
                hooks.before(layer)
            self._store(sequence, start, kv[start:], layer)
            if hooks and hooks.after:
                hooks.after(layer)
        sequence.length = end

    def decode(self, batch: Sequence[DecodeStep]) -> npt.NDArray[np.float32]:
        return np.stack([self._step(step) for step in batch])

    def export_block(self, sequence: SequenceKV, index: int, out: memoryview) -> None:
        sequence = _live(sequence)
        there = min(max(sequence.length - index * self.layout.block_tokens, 0), self.layout.block_tokens)
        block = self._by_token(self._memory[sequence.blocks[index]]).copy()
        block[:, :, :, there:] = 0
        out[:] = block.tobytes()

    def import_block(self, sequence: SequenceKV, index: int, data: memoryview) -> None:
        sequence = _live(sequence)
        self._memory[sequence.blocks[index]] = np.frombuffer(data, dtype=np.uint8)

    def _step(self, step: DecodeStep) -> npt.NDArray[np.float32]:
        sequence = _live(step.sequence)
        assert step.position <= sequence.length, "decode needs the KV of [0, position)"
        seen = self._digest(self._read(sequence, step.position))
        state = _mix_int(seen ^ _mix_int(self._seed + (step.token + 1) * _GOLDEN & _MASK) ^ step.position)
        words = mix(np.arange(1, self.vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN) ^ np.uint64(state))
        own = mix(np.arange(self._words, dtype=np.uint64) + np.uint64(state ^ 0xDEC0DE))
        for layer in range(self.layout.layers):
            self._store(sequence, step.position, own[None], layer)
        sequence.length = step.position + 1
        return (words >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)  # 24 bits: exact in float32

    def _states(self, tokens: Sequence[int]) -> U64:
        """One 64-bit state a position, a chain over the tokens up to it."""
        chain = itertools.accumulate(tokens, lambda state, token: _mix_int(state + (token + 1) * _GOLDEN & _MASK),
                                     initial=self._seed)  # fmt: skip
        return np.fromiter(chain, dtype=np.uint64, count=len(tokens) + 1)[1:]

    def _canonical(self, states: U64) -> U64:
        """KV words of each position: [positions, words]."""
        lanes = np.arange(1, self._words + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return mix(states[:, None] + lanes[None, :])

    def _digest(self, kv: U64) -> int:
        """64 bits over every word of `kv` [positions, words] and where it stands; one changed word changes it."""
        at = np.arange(kv.size, dtype=np.uint64).reshape(kv.shape) * np.uint64(_GOLDEN)
        return int(np.add.reduce(mix(mix(kv) ^ at), axis=None, dtype=np.uint64))

    def _by_token(self, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A view of one block as [layers, 2, kv_heads, block_tokens, bytes of a head]."""
        layers, two, heads, tokens, _ = self.layout.shape
        return block.reshape(layers, two, heads, tokens, self._head)

    def _read(self, sequence: OracleSequence, end: int) -> U64:
        """KV words of [0, end) from memory: [end, words]."""
        used = -(-end // self.layout.block_tokens)
        layers, two, heads, tokens, _ = self.layout.shape
        raw = self._memory[sequence.blocks[:used]].reshape(used, layers, two, heads, tokens, self._head)
        rows = np.ascontiguousarray(raw.transpose(0, 4, 1, 2, 3, 5)).reshape(used * tokens, self.layout.token_size)
        return rows.view(np.uint64)[:end]

    def _store(self, sequence: OracleSequence, start: int, kv: U64, layer: int) -> None:
        """Write `layer`'s share of `kv` [positions, words] at positions from `start`."""
        layers, two, heads, tokens, _ = self.layout.shape
        rows = np.ascontiguousarray(kv).view(np.uint8).reshape(len(kv), layers, two, heads, self._head)[:, layer]
        done = 0
        while done < len(rows):
            index, offset = divmod(start + done, tokens)
            count = min(tokens - offset, len(rows) - done)
            block = self._by_token(self._memory[sequence.blocks[index]])
            block[layer, :, :, offset : offset + count] = rows[done : done + count].transpose(1, 2, 0, 3)
            done += count
