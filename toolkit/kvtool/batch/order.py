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

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    in the pool; the last `remembered` of them are known, older ones may have been evicted anyway. A step of a path
    stands for all of it up to there, so a question costs the logarithm of the path, however many are in flight.
    """

    def __init__(self, remembered: int = 256, steps_max: int = 1 << 18) -> None:
        self._computing: dict[int, bytes] = {}
        self._published: OrderedDict[int, bytes] = OrderedDict()
        self._remembered, self._steps_max = remembered, steps_max
        self._computing_steps: Counter[bytes] = Counter()
        self._published_steps: Counter[bytes] = Counter()

    def may_start(self, path: bytes) -> bool:
        wanted = _deepest(path, self._computing_steps)
        return wanted == 0 or path[(wanted - 1) * STEP : wanted * STEP] in self._published_steps

    def started(self, number: int, path: bytes) -> None:
        assert number not in self._computing, f"request {number} runs already"
        self._computing[number] = path
        self._computing_steps.update(_steps(path))

    def published(self, number: int) -> None:
        """Its prompt is in the pool, or will never be. Again is a no-op."""
        path = self.failed(number)
        if path is None:
            return
        _take_out(self._published_steps, self._published.pop(number, b""))
        self._published[number] = path
        self._published_steps.update(_steps(path))
        while len(self._published) > self._remembered or (
            len(self._published) > 1 and len(self._published_steps) > self._steps_max
        ):
            _take_out(self._published_steps, self._published.popitem(last=False)[1])

    def failed(self, number: int) -> bytes | None:
        """It ended without; nobody waits for it any more. Its path, if it was computing."""
        path = self._computing.pop(number, None)
        if path is not None:
            _take_out(self._computing_steps, path)
        return path


def _steps(path: bytes) -> list[bytes]:
    return [path[at : at + STEP] for at in range(0, len(path), STEP)]


def _take_out(steps: Counter[bytes], path: bytes) -> None:
    for step in _steps(path):
        if steps[step] > 1:
            steps[step] -= 1
        else:
            del steps[step]


def _deepest(path: bytes, steps: Mapping[bytes, int]) -> int:
    """How many leading blocks of `path` are among `steps`: all up to a point, and none behind it."""
    low, high = 0, len(path) // STEP
    while low < high:
        middle = (low + high + 1) // 2
        if path[(middle - 1) * STEP : middle * STEP] in steps:
            low = middle
        else:
            high = middle - 1
    return low
