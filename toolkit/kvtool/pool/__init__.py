"""The pool: the rules of `kv` on real memory, files, sockets and clocks; and its clients.

A pool in this process, for a first try; a block is bytes under a key that names a whole prefix of tokens:

>>> import numpy as np
>>> from kvtool.kv.block import KeySeed, block_keys
>>> from kvtool.kv.layout import KVLayout
>>> from kvtool.pool import EmbeddedPool
>>> layout = KVLayout(layers=2, kv_heads=1, head_dim=64, block_tokens=32)
>>> seed = KeySeed("docs", "model", layout.fingerprint).digest()
>>> keys = block_keys(seed, np.arange(4 * 32), 32)           # of 128 tokens: four blocks
>>> blocks = np.arange(4 * layout.block_size, dtype=np.uint8).reshape(4, -1)
>>> pool = EmbeddedPool(layout, dram_size=8 * 2**20)
>>> [result.outcome.value for result in pool.put_from(keys[:3], blocks[:3])]
['stored', 'stored', 'stored']
>>> pool.match(keys), pool.exists(keys)
(3, [True, True, True, False])
>>> with pool.read(keys) as read:                             # in place, under a lease
...     total, whole = sum(int(block.data[0]) for block in read.blocks), read.whole()
>>> whole
3
>>> out = np.zeros_like(blocks)
>>> result = pool.get_into(keys, out)                         # copied into buffers of yours, and checked
>>> result.count, result.blocks[3].reason, bool((out[:3] == blocks[:3]).all())
(3, 'absent', True)
>>> pool.delete(keys[:1]), pool.get_into(keys, out, leading=False).hits
(1, 2)
>>> pool.close()

The same calls on a pool of ranks (`kvtool pool up`), by its run directory; the layout is the pool's own:

>>> from kvtool.pool import connect
>>> with connect(run_dir) as pool:
...     stored = pool.put_from(keys, blocks)
...     result = pool.get_into(keys, out, budget_s=1.0)
>>> result.count, pool.counts().hit_rate
(4, 1.0)

And for asyncio, where cancelling a task gives back all that its call held:

>>> import asyncio
>>> from kvtool.pool import connect_async
>>> async def fetch():
...     async with connect_async(run_dir) as pool:
...         return await asyncio.wait_for(pool.get_into(keys, out), timeout=5)
>>> asyncio.run(fetch()).count
4

No call raises for a rank that is missing, slow or dead: what could not be had within `budget_s` is a miss with its
reason (`Got.reason`, `PoolCounts.misses`).

To read in order: `base` (what a pool is to its callers), `memory` and `tiers` (slots and moves), `embedded` (all of it
in one process); a rank: `wire`, `loop`, `service`, `dial`, `membership`, `meeting`, `rank`; who starts it again:
`keeper`, `keeping`, `resize`; a client: `outside`, `line`, `requests`, `link`, `access`, `ranks`, a call: `driver`,
`asking`, `questions`, `fetching`, `putting`, `here`, `calls`, and its two shells: `client`, `aio`; and `joining`,
`config`, `state`, `rundir`, `launch` (starting and stopping).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.errors import KvtoolError, PoolUnavailable, Refused
    from kvtool.kv.retention import Pin, Retention
    from kvtool.pool.aio import AsyncPoolClient
    from kvtool.pool.base import (
        BlockView,
        Cancel,
        GetResult,
        Got,
        Outcome,
        Path,
        Pool,
        PoolCounts,
        Put,
        PutResult,
        Tier,
    )
    from kvtool.pool.client import PoolClient
    from kvtool.pool.embedded import EmbeddedPool
    from kvtool.pool.joining import connect, connect_async

_HOMES = {
    "kvtool.errors": ("KvtoolError", "PoolUnavailable", "Refused"),
    "kvtool.kv.retention": ("Pin", "Retention"),
    "kvtool.pool.aio": ("AsyncPoolClient",),
    "kvtool.pool.base": (
        *("BlockView", "Cancel", "GetResult", "Got", "Outcome", "Path"),
        *("Pool", "PoolCounts", "Put", "PutResult", "Tier"),
    ),
    "kvtool.pool.client": ("PoolClient",),
    "kvtool.pool.joining": ("connect", "connect_async"),
    "kvtool.pool.embedded": ("EmbeddedPool",),
}

__all__ = [
    "AsyncPoolClient",
    "BlockView",
    "Cancel",
    "EmbeddedPool",
    "GetResult",
    "Got",
    "KvtoolError",
    "Outcome",
    "Path",
    "Pin",
    "Pool",
    "PoolClient",
    "PoolCounts",
    "PoolUnavailable",
    "Put",
    "PutResult",
    "Refused",
    "Retention",
    "Tier",
    "connect",
    "connect_async",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            import importlib

            value = globals()[name] = getattr(importlib.import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
