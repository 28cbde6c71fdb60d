"""Pages of one rank: memory that a connector is handed, who holds which page, and what is reused.

A page that is given back is poisoned before the next use that the contract allows: after the next metadata is bound and
before its loads start. A gather that is late reads poison, a scatter that is late is found in it.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from . import layout as described
from .model import Group, Model

GUARD = 0xA5
PAD = 64


class Memory:
    """A layer group's pages on one rank. `words(layer)`: [pages, kv_factor, heads, tokens, lanes], a view."""

    def __init__(self, model: Model, group: Group, heads: int, pages: int, *, v2: bool, split: bool = False) -> None:
        self.model, self.group, self.heads, self.pages = model, group, heads, pages
        self.buffer = heads * model.block_tokens * model.lanes * 8  # bytes of K or V of a layer's page
        runs = [group.layers[: (len(group.layers) + 1) // 2], group.layers[(len(group.layers) + 1) // 2 :]]
        self.runs = [run for run in (runs if split and v2 else [group.layers]) if run]
        self.at: dict[int, int] = {}
        offset = 0
        for run in self.runs:
            for layer in run:
                self.at[layer] = offset
                offset += self.buffer * model.kv_factor
            offset += PAD if v2 else 0
        self.stride = offset
        noise = np.random.default_rng(7).integers(0, 256, (pages, self.stride), dtype=np.uint8)
        self.memory = torch.from_numpy(noise)
        for run in self.runs if v2 else ():
            end = self.at[run[-1]] + self.buffer * model.kv_factor
            self.memory[:, end : end + PAD] = GUARD
        self.base = described.hold(self.memory) if v2 else 0
        self._views = {layer: self._view(layer) for layer in group.layers}

    def _view(self, layer: int) -> Any:
        model, at = self.model, self.at[layer]
        raw = self.memory.numpy()[:, at : at + self.buffer * model.kv_factor].view(np.uint64)
        return raw.reshape(self.pages, model.kv_factor, self.heads, model.block_tokens, model.lanes)

    def words(self, layer: int) -> Any:
        return self._views[layer]

    def tensor(self) -> torch.Tensor:
        """V1's pool: [pages, layers, kv_factor, heads * tokens * head_dim]."""
        model = self.model
        typed = self.memory.view(getattr(torch, model.dtype))
        return typed.view(self.pages, len(self.group.layers), model.kv_factor, -1)

    def layout(self, group_id: int) -> described.KvCacheLayerGroupLayout:
        roles = ("key", "value")[: self.model.kv_factor]
        regions = tuple(
            described.KvCacheRegion(
                base=self.base + self.at[run[0]],
                size=len(run) * self.buffer * self.model.kv_factor,
                stride=self.stride,
                num_slots=self.pages,
                buffers=tuple(described.KvCacheBufferRef(layer, role) for layer in run for role in roles),
            )
            for run in self.runs
        )
        return described.KvCacheLayerGroupLayout(group_id, self.group.layers, self.group.window, regions)

    def poison(self, page: int) -> None:
        for layer in self.group.layers:
            self.words(layer)[page] = np.uint64(0xDEADDEADDEADDEAD) ^ np.uint64(page)

    def poisoned(self, page: int) -> bool:
        what = np.uint64(0xDEADDEADDEADDEAD) ^ np.uint64(page)
        return all(bool((self.words(layer)[page] == what).all()) for layer in self.group.layers)

    def guarded(self) -> bool:
        """Whether nobody wrote between the regions."""
        if not self.base:
            return True
        ends = [self.at[run[-1]] + self.buffer * self.model.kv_factor for run in self.runs]
        return all(bool((self.memory[:, end : end + PAD] == GUARD).all()) for end in ends)

    def close(self) -> None:
        if self.base:
            described.drop(self.base)


class Pages:
    """Which page ids of a group are free, held and kept for reuse. Every rank decides the same.

    `dirty`: given back and not yet poisoned. `clean`: free since, so nothing may have written to them.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._random = random.Random(seed)
        self.free = list(range(count))
        self._random.shuffle(self.free)
        self.refs: dict[int, int] = {}
        self.kept: OrderedDict[bytes, int] = OrderedDict()
        self.key_of: dict[int, bytes] = {}
        self.dirty: list[int] = []
        self.clean: set[int] = set()

    @property
    def room(self) -> int:
        return len(self.free) + sum(page not in self.refs for page in self.kept.values())

    def take(self) -> int | None:
        """A page, the one given back last as often as any other; None where every page is held."""
        if self.free:
            at = -1 if self._random.random() < 0.5 else self._random.randrange(len(self.free))
            page = self.free.pop(at)
        else:
            found = next((key for key, page in self.kept.items() if page not in self.refs), None)
            if found is None:
                return None
            page = self.kept.pop(found)
            del self.key_of[page]
            self.dirty.append(page)
        self.refs[page] = 1
        return page

    def share(self, key: bytes) -> int | None:
        page = self.kept.get(key)
        if page is not None:
            self.kept.move_to_end(key)
            self.refs[page] = self.refs.get(page, 0) + 1
        return page

    def keep(self, key: bytes, page: int) -> None:
        """Let later requests find `page` by `key`; the first of two equal ones stays."""
        if key not in self.kept and page not in self.key_of:
            self.kept[key], self.key_of[page] = page, key

    def give_back(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] == 0:
            del self.refs[page]
            if page not in self.key_of:
                self.free.append(page)
                self.dirty.append(page)

    def forget_all(self) -> None:
        for page in self.kept.values():
            del self.key_of[page]
            if page not in self.refs:
                self.free.append(page)
                self.dirty.append(page)
        self.kept.clear()
