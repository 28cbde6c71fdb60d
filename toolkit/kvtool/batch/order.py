"""In which order requests run: prompts that begin alike follow each other.

The path of a prompt is the chain of its blocks' keys, cut to eight bytes each, so two paths agree as far as the prompts
do. Sorted paths are the leaves of the radix tree over all prompts, depth first: what a request shares with the one
before it was computed just now, and a pool that holds one path and what is in flight loses nothing, however large the
job (BlendServe, arXiv 2411.16102, section 4, orders by such a tree too). Sorting is out of core, since the store does
it on disk; a cut key that collides costs an order, never an answer.

Trees that share nothing may go in any order. Those with long answers go first, so that the end of the job is not one
long answer alone (longest processing time first: Graham, SIAM J. Appl. Math. 17(2), 1969).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvtool.kv.block import BlockKey

STEP = 8
"""Bytes of a path for each block."""


def path_of(keys: Sequence[BlockKey]) -> bytes:
    return b"".join(key[:STEP] for key in keys)


def shared_blocks(one: bytes, other: bytes) -> int:
    """How many leading blocks two paths have in common."""
    if one == other:
        return len(one) // STEP
    low, high = 0, min(len(one), len(other)) // STEP
    while low < high:  # chains: they agree up to a point and never again behind it
        middle = (low + high + 1) // 2
        if one[(middle - 1) * STEP : middle * STEP] == other[(middle - 1) * STEP : middle * STEP]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True)
class Leaf:
    """One request of the sorted sequence. `tokens_out`: the most that it may generate."""

    number: int
    path: bytes
    tokens_in: int
    tokens_out: int


@dataclass(frozen=True)
class Placed:
    """`shared`: leading blocks that the one before it in the order has too. `tree`: those of one number share at least
    their first block."""

    leaf: Leaf
    shared: int
    tree: int


def placed(leaves: Iterable[Leaf]) -> Iterator[Placed]:
    """`leaves` sorted by path. One pass, nothing is kept."""
    before, tree = b"", -1
    for leaf in leaves:
        shared = shared_blocks(before, leaf.path)
        if tree < 0 or shared == 0:
            tree += 1
        yield Placed(leaf, shared, tree)
        before = leaf.path


@dataclass
class Plan:
    """What an order comes to. `reused`: prompt tokens that need not be computed, as far as the pool holds a path and
    what is in flight."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out_max: int = 0
    reused: int = 0
    trees: int = 0
    longest_path: int = 0
    """Blocks."""

    def add(self, one: Placed, block_tokens: int, pool_blocks: int) -> None:
        blocks = len(one.leaf.path) // STEP
        self.requests += 1
        self.tokens_in += one.leaf.tokens_in
        self.tokens_out_max += one.leaf.tokens_out
        self.reused += min(one.shared, pool_blocks) * block_tokens
        self.trees = one.tree + 1
        self.longest_path = max(self.longest_path, blocks)


class Gate:
    """Whether a request may start now, or should wait for one in flight that computes what both begin with.

    Two requests that share a prefix and start together would compute it twice. `published` are those whose prompts are
    in the pool; the last `remembered` of them are known by path, older ones may have been evicted anyway.
    """

    def __init__(self, remembered: int = 256) -> None:
        self._computing: dict[int, bytes] = {}
        self._published: OrderedDict[int, bytes] = OrderedDict()
        self._remembered = remembered

    def may_start(self, path: bytes) -> bool:
        wanted = max((shared_blocks(path, other) for other in self._computing.values()), default=0)
        if wanted == 0:
            return True
        return any(shared_blocks(path, other) >= wanted for other in self._published.values())

    def started(self, number: int, path: bytes) -> None:
        self._computing[number] = path

    def published(self, number: int) -> None:
        """Its prompt is in the pool, or will never be. Again is a no-op."""
        path = self._computing.pop(number, None)
        if path is not None:
            self._published[number] = path
            while len(self._published) > self._remembered:
                self._published.popitem(last=False)

    def failed(self, number: int) -> None:
        """It ended without; nobody waits for it any more."""
        self._computing.pop(number, None)
