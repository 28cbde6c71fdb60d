"""How much of a trace a cache of so many blocks would have served, under each policy.

One shared cache; a prompt's blocks are in it as soon as the prompt is done, and prompts are done in the order of the
trace. So this measures policies, not systems: no prefill time, no ranks, no leases. A request first looks (which is no
use), then touches or brings in each of its blocks: `fwd` from the first on, `rev` from the last.

Both ratios have one denominator, the blocks asked for, partial ones included. *prefix hits* count the leading run that
was there, which is what an engine can skip; *block hits* count every block that was there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtool.kv.block import BlockKey
from kvtool.kv.policy.base import K
from kvtool.kv.policy.mini import MiniCache
from kvtool.sim.trace import BLOCK_TOKENS, Request

Order = Literal["fwd", "rev"]


@dataclass(frozen=True)
class Hits:
    """Counts of blocks."""

    asked: int
    prefix_hits: int
    block_hits: int

    @property
    def prefix_ratio(self) -> float:
        return self.prefix_hits / self.asked if self.asked else 0.0

    @property
    def block_ratio(self) -> float:
        return self.block_hits / self.asked if self.asked else 0.0


def prompts(
    requests: Iterable[Request], tails: bool = True, block_tokens: int = BLOCK_TOKENS
) -> tuple[list[tuple[int, ...]], int]:
    """The blocks of each prompt, without the trailing partial one unless `tails`; and how many there are with it."""
    requests = list(requests)
    asked = sum(len(request.blocks) for request in requests)
    return [request.blocks if tails else request.whole(block_tokens) for request in requests], asked


def as_keys(prompts: Iterable[Sequence[int]]) -> list[list[BlockKey]]:
    """The same prompts with keys as a pool has them: shadows sample by the key."""
    keys: dict[int, BlockKey] = {}
    for block in (block for blocks in prompts for block in blocks if block not in keys):
        keys[block] = hashlib.blake2b(str(block).encode(), digest_size=32).digest()
    return [[keys[block] for block in blocks] for blocks in prompts]


def replay(prompts: Iterable[Sequence[K]], asked: int, cache: MiniCache[K], order: Order = "fwd") -> Hits:
    """What `cache` would have served of `prompts`.

    The turn of a prompt is one more than that of the prompt which brought in the last block of its cached prefix.
    """
    prefix_hits = block_hits = 0
    keys, access = cache.keys, cache.access
    born: dict[K, int] = {}
    for blocks in prompts:
        run = 0
        for block in blocks:
            if block not in keys:
                break
            run += 1
        turn = born[blocks[run - 1]] + 1 if run else 1
        prefix_hits += run
        block_hits += run + sum(block in keys for block in blocks[run:])
        for block in blocks if order == "fwd" else reversed(blocks):
            if not access(block, turn):
                born[block] = turn
    return Hits(asked, prefix_hits, block_hits)
