"""One forward pass on the stream: write the KV of the scheduled positions, read what attention reads, sample.

All of `Forward`'s methods but the constructor run on the stream, so a page's bytes are what they are at that moment.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .model import Model, fold, mix
from .pages import Memory
from .ranks import Rank
from .request import State


@dataclass
class Item:
    """`state`'s positions [start, end); `pages` by group as they were scheduled; `sample`: end is a token's place."""

    state: State
    start: int
    end: int
    pages: list[list[int]]
    sample: bool


@dataclass
class Known:
    """What the device keeps of a request: states and right KV words by position."""

    states: list[int] = field(default_factory=list)
    words: Any = None

    def grow(self, model: Model, heads: range, state: State, end: int) -> None:
        begin = len(self.states)
        chain = self.states[-1] if self.states else model.seed(state.given)
        for token in state.device[begin:end]:
            self.states.append(chain := model.after(chain, token))
        if end > begin:
            fresh = model.words(self.states[begin:end], heads)
            self.words = fresh if self.words is None else np.concatenate([self.words, fresh], axis=3)


class Forward:
    def __init__(
        self, model: Model, memories: list[Memory], rank: Rank, items: list[Item], known: dict[int, Known]
    ) -> None:
        self.model, self.memories, self.rank, self.items, self.known = model, memories, rank, items, known
        self.heads = model.heads(rank.rank, rank.size)
        self.taints = [0] * len(items)
        self.tokens: dict[int, int] = {}
        self.wrong: list[str] = []
        self.done = threading.Event()
        self._memory_of = {layer: (at, memory) for at, memory in enumerate(memories) for layer in memory.group.layers}

    def begin(self) -> None:
        for item in self.items:
            self.known.setdefault(item.state.request_id, Known()).grow(self.model, self.heads, item.state, item.end)

    def layer(self, layer: int) -> None:
        group, memory = self._memory_of[layer]
        for at, item in enumerate(self.items):
            self._write(memory, layer, group, item, self.taints[at])
            self._read(memory, layer, group, at)

    def _write(self, memory: Memory, layer: int, group: int, item: Item, taint: int) -> None:
        size, words = self.model.block_tokens, memory.words(layer)
        right = self.known[item.state.request_id].words[layer][:, :, item.start : item.end]
        fresh = mix(right ^ np.uint64(taint)) if taint else right
        for block in range(item.start // size, -(-item.end // size)):
            low, high = max(item.start, block * size), min(item.end, (block + 1) * size)
            page = item.pages[group][block]
            assert page >= 0, f"no page for block {block} that is computed now"
            words[page][:, :, low - block * size : high - block * size] = fresh[
                :, :, low - item.start : high - item.start
            ]

    def _read(self, memory: Memory, layer: int, group: int, at: int) -> None:
        item, size, window = self.items[at], self.model.block_tokens, memory.group.window
        low = 0 if window is None else max(0, item.start - window + 1)
        first, last = low // size, -(-item.end // size)
        pages = item.pages[group][first:last]
        assert min(pages) >= 0, f"request {item.state.request_id}: attention reads a block that has no page: {pages}"
        held = memory.words(layer)[pages]  # [blocks, kv_factor, heads, tokens, lanes]
        seen = np.concatenate(list(held), axis=2)[:, :, low - first * size : item.end - first * size]
        right = self.known[item.state.request_id].words[layer][:, :, low : item.end]
        if np.array_equal(seen, right):
            return
        where = np.unique(np.nonzero((seen != right).any(axis=(0, 1, 3)))[0] + low).tolist()
        of = sorted({item.pages[group][position // size] for position in where})
        self.wrong.append(
            f"rank {self.rank.rank}, request {item.state.request_id}, layer {layer}: wrong KV at positions {where} "
            f"(pages {of}), read by the pass over [{item.start}, {item.end})"
        )
        self.taints[at] = fold(seen - right, layer) ^ self.taints[at]

    def finish(self) -> None:
        """Combine over ranks, and sample."""
        every = self.rank.device.allgather(self.taints)
        for at, item in enumerate(self.items):
            if not item.sample:
                continue
            taint = 0
            for taints in every:
                taint = taint * 3 + taints[at]
            state = self.known[item.state.request_id].states[item.end - 1]
            token = self.model.token(state, taint & ((1 << 64) - 1))
            del item.state.device[item.end :]
            item.state.device.append(token)
            self.tokens[item.state.request_id] = token
        self.done.set()
