"""Staging: memory of one rank for blocks between the pool and the engine.

One allocation of the host, pinned where there is a GPU, cut into slots of one packed block. Loads and saves each have a
share that the other cannot take, so that a burst of saves does not turn every hit into a miss, nor the other way round.
What does not fit is not waited for: a load claims fewer blocks, a save is dropped, and both are counted.

Every slot has an owner and a time, and is in `audit`. A staged load is given back by `keep(load_id, 0)` or when its
scatter is done; nothing here ends by the clock, since the scheduler may come back to a claim as long as it has not
given it back itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtool.errors import EngineFailed, EngineRefused
from kvtool.kv.block import BlockKey
from kvtool.kv.shard import shard_key
from kvtool.pool.base import Pool
from kvtool_trtllm.pages import EnginePages
from kvtool_trtllm.streams import Device

_PAGE = 4096


class Slots:
    """`memory`: uint8 [slots, slot size], rows a page apart from each other's ends. Thread-safe."""

    def __init__(
        self, device: Device, size: int, staging_bytes: int, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        pitch = -(-size // _PAGE) * _PAGE
        self.count = staging_bytes // pitch
        if self.count < 2:
            raise EngineRefused(
                f"staging_bytes: {staging_bytes} hold {self.count} blocks of {size} bytes; set at least {8 * pitch}"
            )
        self.memory = device.memory(self.count * pitch).view(self.count, pitch)[:, :size]
        self._now_s = now_s
        self._lock = threading.Lock()
        self._free = list(range(self.count))
        self._owners: dict[int, tuple[str, str, float]] = {}
        self._most = {"load": self.count - self.count // 4 or 1, "save": max(1, self.count // 2)}
        self._used = {"load": 0, "save": 0}
        self.dropped = {"load": 0, "save": 0}

    def take(self, wanted: int, kind: str, owner: str) -> list[int]:
        """Up to `wanted` slots; the rest is counted as dropped."""
        with self._lock:
            room = min(wanted, self._most[kind] - self._used[kind], len(self._free))
            self._free.sort()  # neighbours, so that copies are long
            taken = [self._free.pop(0) for _ in range(max(room, 0))]
            self._used[kind] += len(taken)
            self.dropped[kind] += wanted - len(taken)
            now_s = self._now_s()
            for slot in taken:
                self._owners[slot] = kind, owner, now_s
        return taken

    def give(self, slots: Sequence[int]) -> None:
        with self._lock:
            for slot in slots:
                kind, _, _ = self._owners.pop(slot)
                self._used[kind] -= 1
                self._free.append(slot)

    def audit(self) -> list[tuple[str, str, float]]:
        """(kind, owner, age in seconds) of every slot that is held."""
        now_s = self._now_s()
        with self._lock:
            return [(kind, owner, now_s - at_s) for kind, owner, at_s in self._owners.values()]


@dataclass(frozen=True)
class Part:
    """One stored shard of one layer group: the key's suffix, and where it lies in a slot."""

    count: int
    index: int
    group: int
    start: int
    end: int

    def key(self, key: BlockKey) -> BlockKey:
        return shard_key(key, self.count, self.index, self.group)


def parts_of(pages: EnginePages, shards: range) -> list[Part]:
    """Of every block: the stored shards in `shards` of this rank, group after group."""
    first = pages.shards.reads.start
    return [
        Part(
            pages.shards_total,
            shard,
            group.index,
            group.at + (shard - first) * group.shard_size,
            group.at + (shard - first + 1) * group.shard_size,
        )
        for group in pages.groups
        for shard in shards
    ]


class Staging:
    """A `control.Stager`: blocks that were copied from the pool, checked, and wait for their pages."""

    def __init__(self, slots: Slots, pages: EnginePages, pool: Pool) -> None:
        self._slots, self._pool = slots, pool
        self._parts = parts_of(pages, pages.shards.reads)
        self._rows: Any = slots.memory.numpy()
        self._lock = threading.Lock()
        self._held: dict[int, list[int]] = {}
        self.counts = {"asked": 0, "staged": 0}

    def stage(self, load_id: int, keys: Sequence[BlockKey], budget_s: float) -> int:
        """Every stored shard of a block must be there and pass its check for the block to count."""
        slots = self._slots.take(len(keys), "load", f"load {load_id}")
        try:
            held = self._read(keys[: len(slots)], slots, budget_s) if slots else 0
        except BaseException:
            self._slots.give(slots)
            raise
        self._slots.give(slots[held:])
        with self._lock:
            self.counts["asked"] += len(keys)
            self.counts["staged"] += held
            self._held[load_id] = slots[:held]
        return held

    def _read(self, keys: Sequence[BlockKey], slots: Sequence[int], budget_s: float) -> int:
        wanted = [part.key(key) for key in keys for part in self._parts]
        buffers = [self._rows[slot][part.start : part.end] for slot in slots for part in self._parts]
        result = self._pool.get_into(wanted, buffers, budget_s)
        whole = 0
        for got, buffer in zip(result.blocks, buffers, strict=True):
            if not got.hit or got.size != len(buffer):
                break
            whole += 1
        return whole // len(self._parts)

    def keep(self, load_id: int, blocks: int) -> None:
        with self._lock:
            slots = self._held.pop(load_id, [])
            if slots[:blocks]:
                self._held[load_id] = slots[:blocks]
        self._slots.give(slots[blocks:])

    def only(self, load_ids: Sequence[int]) -> None:
        with self._lock:
            over = [slots for load_id, slots in self._held.items() if load_id not in load_ids]
            self._held = {load_id: slots for load_id, slots in self._held.items() if load_id in load_ids}
        for slots in over:
            self._slots.give(slots)

    def take(self, load_id: int, blocks: int) -> list[int]:
        """The slots of a load whose turn it is; the caller gives them back. This rank may hold more than every rank
        does, and not have been told yet: what is over is given back here.

        Raises:
            EngineFailed: they are not there. The engine must not run over pages that nobody fills.
        """
        with self._lock:
            slots = self._held.pop(load_id, [])
        if len(slots) < blocks:
            self._slots.give(slots)
            raise EngineFailed(f"load {load_id}: wanted {blocks} staged blocks, found {len(slots)}")
        self._slots.give(slots[blocks:])
        return slots[:blocks]
