"""Blocks for tests of the pool: bytes that follow from the key, so that any process can check them."""

from __future__ import annotations

import zlib

import numpy as np

from kvtool.kv.block import KeySeed, block_keys
from kvtool.kv.layout import KVLayout
from kvtool.pool.base import Put
from kvtool.pool.directory import segment_size

LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=64, block_tokens=32)
SEED = KeySeed("test", "model", LAYOUT.fingerprint).digest()
KEYS = block_keys(SEED, np.arange(32 * 400), 32)


def payload(key: bytes) -> bytes:
    return np.random.default_rng(zlib.crc32(key)).bytes(LAYOUT.block_size)


def fill_of(key: bytes):
    def fill(room: memoryview) -> None:
        room[:] = payload(key)

    return fill


def puts(keys, first_parent=None, transient_s=None):
    parents = [first_parent, *keys[:-1]]
    return [
        Put(key, LAYOUT.block_size, fill_of(key), parent, transient_s)
        for key, parent in zip(keys, parents, strict=True)
    ]


def room_for(blocks: int) -> int:
    return segment_size(blocks, LAYOUT.block_size, 100)
