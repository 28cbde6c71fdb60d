"""The blocks of a run: chains of keys with shared beginnings, and bytes that are a function of the key."""

from __future__ import annotations

from functools import cache

from blake3 import blake3

from kvtool.kv.block import BlockKey, block_keys

BLOCK_TOKENS = 4
CHAINS, LENGTH = 24, 10
NEW_KEY = blake3(b"simulated pool: a block that nobody put before").digest()


@cache
def chains() -> list[list[BlockKey]]:
    """`CHAINS` prompts of `LENGTH` blocks. Each shares a beginning with the others of its family of four."""
    found = []
    for number in range(CHAINS):
        family = number // 4
        shared = [family * 1000 + at for at in range(3 * BLOCK_TOKENS)]
        own = [10**6 + number * 1000 + at for at in range((LENGTH - 3) * BLOCK_TOKENS)]
        found.append(block_keys(b"simulated pool".ljust(32, b"\0"), shared + own, BLOCK_TOKENS))
    return found


@cache
def content(key: BlockKey, size: int) -> bytes:
    """What block `key` holds; nothing else may ever be read under it."""
    return blake3(key).digest(length=size)


def short(key: BlockKey) -> str:
    return key.hex()[:8]
