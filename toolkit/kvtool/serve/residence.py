"""What the pool holds of a prompt that TensorRT-LLM's connector saves: asked under the connector's own keys.

A block lies in the pool as stored shards, one for each part that a rank of the widest engine has (`kv.shard`); it is
there when all of them are. Engines with several layer groups save one more set for each; the first is asked for, since
how many there are is the engine's matter. What is missing of the others is computed.
"""

from __future__ import annotations

from pathlib import Path

from kvtool.engine.trtllm.connector import ConnectorSettings, read_settings
from kvtool.kv.block import block_keys
from kvtool.kv.shard import shard_count, shard_key, stored_layout
from kvtool.pool.base import Pool


class PoolResidence:
    """`serve.trtllm_prefill.Residence` over a pool."""

    def __init__(self, settings: ConnectorSettings, pool: Pool, match_budget_s: float) -> None:
        self._pool, self._budget_s = pool, match_budget_s
        self._seed, self._block_tokens = settings.seed().digest(), settings.kv.block_tokens
        self._shards = shard_count(settings.kv.layout(), settings.stored_parallel)

    def blocks(self, tokens: tuple[int, ...]) -> int:
        """How many leading blocks are there, all of their shards."""
        chain = block_keys(self._seed, tokens, self._block_tokens)
        keys = [shard_key(key, self._shards, shard) for key in chain for shard in range(self._shards)]
        return self._pool.match(keys, self._budget_s) // self._shards if keys else 0

    def close(self) -> None:
        self._pool.close()


def open_residence(connector_file: Path, pool_state: Path, name: str, match_budget_s: float) -> PoolResidence:
    """Over the running pool whose state file is `pool_state`; none that answers is no error.

    Raises:
        EngineRefused: the connector's settings cannot be read.
    """
    from kvtool.pool.client import PoolClient

    settings = read_settings(connector_file)
    layout = stored_layout(settings.kv.layout(), settings.stored_parallel)
    pool = PoolClient(
        pool_state, layout, path=settings.pool_path, client_name=f"{name} asks", namespace=settings.namespace
    )
    return PoolResidence(settings, pool, match_budget_s)
