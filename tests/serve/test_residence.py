"""What the pool holds of a prompt, asked under the keys that the connector saves under."""

from types import SimpleNamespace

import pytest

from kvtool.engine.manifest import LayoutFields
from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.kv.block import block_keys
from kvtool.kv.shard import shard_count, shard_key, stored_layout
from kvtool.pool.base import Put
from kvtool.pool.embedded import EmbeddedPool
from kvtool.serve.residence import PoolResidence
from kvtool_trtllm.keys import seed_of

PROMPT = tuple(range(100, 170))


def _settings(heads=4, width=2, factor=2):
    kv = LayoutFields(layers=2, kv_heads=heads, head_dim=8, block_tokens=16, dtype="bfloat16", kv_factor=factor)
    return ConnectorSettings(model_digest="m", numerics="n", namespace="blue", kv=kv, stored_parallel=width)


@pytest.mark.parametrize(("heads", "width", "factor"), [(4, 1, 2), (4, 2, 2), (2, 4, 2), (1, 2, 1)])
def test_a_block_is_there_when_all_of_its_shards_are(heads, width, factor):
    settings = _settings(heads, width, factor)
    layout = stored_layout(settings.kv.layout(), width)
    count = shard_count(settings.kv.layout(), width)
    pool = EmbeddedPool(layout, 200 * (layout.block_size + 4096))
    residence = PoolResidence(settings, pool, 1.0)
    request = SimpleNamespace(cache_salt_id=None)
    chain = block_keys(seed_of(request, settings), PROMPT, 16)
    assert residence.blocks(PROMPT) == 0 and residence.blocks(PROMPT[:15]) == 0
    data = memoryview(bytes(layout.block_size))
    for at, key in enumerate(chain):
        for shard in range(count):
            assert residence.blocks(PROMPT) == at
            pool.write([Put(shard_key(key, count, shard), layout.block_size, None, data=data)])
    assert residence.blocks(PROMPT) == len(chain) == 4
    assert residence.blocks(tuple(reversed(PROMPT))) == 0
    residence.close()
