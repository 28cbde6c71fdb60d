"""What a read hands out: verified blocks under leases, and how long they stay whole. And what a client counted."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvtool.pool.base import ONE_BLOCK, BlockView, Got, Outcome, Path, PoolCounts, PutResult, Tier


@dataclass
class Held:
    """A lease as its reader knows it. `deadline_s`, on `now_s`'s clock, is never later than the owner's: it counts from
    before the request was sent."""

    deadline_s: float
    now_s: Callable[[], float]
    generations: npt.NDArray[np.uint64] | None
    """The owner's live generations, for blocks that are read in place; None when the blocks are copies."""
    release: Callable[[], None]


@dataclass
class Placed:
    """Where one block of a read is: in `slot` under `generation`, as long as `held` is."""

    held: Held
    slot: int = -1
    generation: int = 0

    def whole(self) -> bool:
        if self.held.generations is None:
            return True  # a copy, checked after it was made
        if int(self.held.generations[self.slot]) != self.generation:
            return False
        return self.held.now_s() < self.held.deadline_s


class PoolRead:
    """A `pool.base.Read`. Releasing ends every lease once; views in place must not be used after it."""

    def __init__(self, blocks: Sequence[BlockView], placed: Sequence[Placed], held: Sequence[Held]) -> None:
        self.blocks = blocks
        self._placed = placed
        self._held = list(held)
        self._lock = threading.Lock()
        self._whole: int | None = None

    def whole(self) -> int:
        """How many leading blocks were whole all along, asked after the last byte was used.

        Once the leases are released the answer is the one from that moment: what came later is not vouched for.
        """
        if self._whole is not None:
            return self._whole
        for at, placed in enumerate(self._placed):
            if not placed.whole():
                return at
        return len(self._placed)

    def release(self) -> None:
        with self._lock:
            held, self._held = self._held, []
            if self._whole is None:
                self._whole = self.whole()
        for lease in held:
            lease.release()

    def __enter__(self) -> PoolRead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Counting:
    """Thread-safe counts of one client. Every block that a read asks for is counted once: a hit, or a miss."""

    def __init__(self, tokens_per_block: int = 0) -> None:
        self._lock = threading.Lock()
        self._counts = PoolCounts(tokens_per_block=tokens_per_block)

    def read(self, blocks: Sequence[BlockView], wanted: int, reason: str) -> None:
        """A leading run of `wanted` keys ended after `blocks`, for `reason`."""
        with self._lock:
            for block in blocks:
                self._hit(block.tier, block.path, len(block.data))
            self._miss_behind(reason, wanted - len(blocks))

    def got(self, result: Sequence[Got]) -> None:
        with self._lock:
            for got in result:
                if got.tier is not None and got.path is not None:
                    self._hit(got.tier, got.path, got.size)
                else:
                    self._miss(got.reason, 1)

    def _hit(self, tier: Tier, path: Path, size: int) -> None:
        name = _NAMES[tier, path]
        _add(self._counts.blocks_read, name, 1)
        _add(self._counts.bytes_read, name, size)
        _add(self._counts.hits, tier.value, 1)
        self._counts.blocks_asked += 1

    def _miss(self, reason: str, count: int) -> None:
        if count > 0:
            _add(self._counts.misses, reason, count)
            self._counts.blocks_asked += count

    def _miss_behind(self, reason: str, missed: int) -> None:
        alone = min(missed, 1) if reason in ONE_BLOCK else missed
        self._miss(reason, alone)
        self._miss("absent", missed - alone)

    def put(self, results: Sequence[PutResult], sizes: Sequence[int], path: Path) -> None:
        with self._lock:
            for result, size in zip(results, sizes, strict=True):
                _add(self._counts.blocks_put, result.outcome.value, 1)
                if result.outcome is Outcome.STORED:
                    name = f"stored/{(result.path or path).value}"
                    _add(self._counts.blocks_put, name, 1)
                    _add(self._counts.bytes_put, name, size)

    def snapshot(self) -> PoolCounts:
        with self._lock:
            return copy.deepcopy(self._counts)


_NAMES = {(tier, path): f"{tier.value}/{path.value}" for tier in Tier for path in Path}


def _add(counts: dict[str, int], name: str, value: int) -> None:
    counts[name] = counts.get(name, 0) + value
