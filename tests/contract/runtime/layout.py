"""The V2 cache manager's description of its memory: layer groups, regions, page slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

_memory: dict[int, torch.Tensor] = {}
"""Address -> uint8 tensor that starts there, since a torch tensor cannot be made of an address alone."""


def hold(memory: torch.Tensor) -> int:
    """Register uint8 `memory` [slots, stride]; returns its address, which stays good until `drop`."""
    _memory[memory.data_ptr()] = memory
    return memory.data_ptr()


def drop(base: int) -> None:
    _memory.pop(base, None)


def valid_page_slots(page_indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    return ((ordinal, slot) for ordinal, slot in enumerate(page_indices) if slot >= 0)


@dataclass(frozen=True)
class KvCacheBufferRef:
    layer_id: int
    role: str
    expansion: int = 1


@dataclass(frozen=True)
class KvCacheRegion:
    """`size` bytes at `base + stride * slot`."""

    base: int
    size: int
    stride: int
    num_slots: int
    buffers: tuple[KvCacheBufferRef, ...]

    def address_of(self, slot_id: int) -> int:
        if not 0 <= slot_id < self.num_slots:
            raise IndexError(f"slot_id {slot_id} out of range [0, {self.num_slots})")
        return self.base + self.stride * slot_id

    def as_tensor(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """A strided view [num_slots, size / itemsize]."""
        start, whole = max((at, memory) for at, memory in _memory.items() if at <= self.base)
        itemsize = torch.empty((), dtype=dtype).element_size()
        if self.size % itemsize or self.stride % itemsize:
            raise ValueError(f"size {self.size} and stride {self.stride} are no multiples of {itemsize}")
        flat = whole.view(-1)[self.base - start :]
        rows = flat.as_strided((self.num_slots, self.size), (self.stride, 1))
        return rows if itemsize == 1 else rows.view(dtype)

    def slot_tensor(self, slot_id: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        self.address_of(slot_id)
        return self.as_tensor(dtype)[slot_id]


@dataclass(frozen=True)
class KvCacheLayerGroupLayout:
    layer_group_id: int
    layer_ids: tuple[int, ...]
    window_size: int | None
    regions: tuple[KvCacheRegion, ...]

    @property
    def bytes_per_page(self) -> int:
        return sum(region.size for region in self.regions)


@dataclass(frozen=True)
class KvCacheLayout:
    tokens_per_block: int
    groups: tuple[KvCacheLayerGroupLayout, ...]
    dtype: torch.dtype = torch.uint8

    def group(self, layer_group_id: int) -> KvCacheLayerGroupLayout:
        return next(group for group in self.groups if group.layer_group_id == layer_group_id)

    def group_of_layer(self, layer_id: int) -> KvCacheLayerGroupLayout:
        return next(group for group in self.groups if layer_id in group.layer_ids)

    def as_single_pool_tensor(self) -> Any:
        """[slots, layers, kv_factor, elements], or None where one tensor cannot say it."""
        if len(self.groups) != 1 or len(self.groups[0].regions) != 1:
            return None
        group, region = self.groups[0], self.groups[0].regions[0]
        kv_factor = len(region.buffers) // len(group.layer_ids)
        tensor = region.as_tensor(self.dtype)
        return tensor.unflatten(1, (len(group.layer_ids), kv_factor, tensor.shape[1] // len(region.buffers)))
