"""Made-up conversations in the shape of the released traces: shared system prompts, turns that grow, long one-offs.

For tests, examples and first looks. Results for a deployment want a trace of that deployment.
"""

from __future__ import annotations

import heapq
import itertools
import math
from random import Random

from kvtool.sim.trace import BLOCK_TOKENS, Request

SYSTEM_BLOCKS = (1, 3, 6)
"""Whole blocks of the system prompts that conversations begin with."""
CONTINUES = (0.35, 0.5, 0.6, 0.7, 0.75)
"""How likely a conversation goes on after its n-th turn; the last holds for all later ones."""


def conversations(count: int, rate: float = 1.0, seed: int = 0, block_tokens: int = BLOCK_TOKENS) -> list[Request]:
    """The requests of `count` conversations that begin at `rate` a second, by time. The same for the same arguments."""
    rng, fresh = Random(seed), itertools.count()
    systems = [[next(fresh) for _ in range(blocks)] for blocks in SYSTEM_BLOCKS]
    due: list[tuple[float, int, int, list[int], int]] = []  # (time, conversation, turn, whole blocks, tokens)
    at_s = 0.0
    for number in range(count):
        at_s += _exponential(rng, 1 / rate)
        system = systems[min(int(rng.random() * 4), 2)]
        due.append((at_s, number, 0, list(system), len(system) * block_tokens))
    heapq.heapify(due)
    requests = []
    while due:
        at_s, number, turn, blocks, tokens = heapq.heappop(due)
        tokens += 20 + int(_exponential(rng, (8 if turn == 0 else 2) * block_tokens))
        blocks += [next(fresh) for _ in range(tokens // block_tokens - len(blocks))]
        output_tokens = 1 + int(_exponential(rng, block_tokens / 2))
        partial = [next(fresh)] if tokens % block_tokens else []
        requests.append(Request(at_s, tokens, output_tokens, (*blocks, *partial)))
        if rng.random() < CONTINUES[min(turn, len(CONTINUES) - 1)]:
            later_s = at_s + 5 + _exponential(rng, 60)
            heapq.heappush(due, (later_s, number, turn + 1, list(blocks), tokens + output_tokens))
    return requests


def _exponential(rng: Random, mean: float) -> float:
    return -math.log(1 - rng.random()) * mean
