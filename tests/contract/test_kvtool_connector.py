"""kvtool's connector pair under the executor: right on every schedule, with a pool that works, fails and lies."""

from __future__ import annotations

import importlib
import random
from types import SimpleNamespace
from typing import Any

import adversary
import pytest
import yaml

from kvtool.kv.layout import KVLayout
from kvtool.kv.shard import shard_count, shard_key, stored_layout
from kvtool.pool.embedded import EmbeddedPool

NEEDED = ("1.2.1", "1.4.0rc1")


class Ours:
    """Settings, pool and classes of one run. Workers of all ranks share the pool, as ranks of a host do."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, setup: Any, tp: int, *, stored: int = 0, **changes: Any
    ):
        model = setup.model
        kv = {
            "layers": model.layers,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "block_tokens": model.block_tokens,
            "dtype": model.dtype,
            "kv_factor": model.kv_factor,
        }
        self.kv, self.stored = KVLayout(**kv), stored or tp
        settings = {
            "pool_state": "in this process",
            "model_digest": model.name,
            "kv": {**kv, "order": "L2HTD"},
            "tensor_parallel": tp,
            "stored_parallel": self.stored,
            "staging_bytes": 1 << 20,
            "claim_budget_s": 5.0,
            "control": str(tmp_path / "control.sock"),
            "lora": {"7": "adapter seven"},
            **changes,
        }
        path = tmp_path / "connector.yaml"
        path.write_text(yaml.safe_dump(settings))
        monkeypatch.setenv("KVTOOL_CONNECTOR", str(path))
        for name in ("KVTOOL_POOL", "KVTOOL_CONNECTOR_CONTROL"):
            monkeypatch.delenv(name, raising=False)
        self.pool = EmbeddedPool(stored_layout(self.kv, self.stored), 4 << 20)
        self.workers: list[Any] = []
        worker = importlib.import_module("kvtool_trtllm.worker")
        monkeypatch.setattr(worker, "open_pool", lambda settings, rank: Shared(self.pool))
        module = importlib.import_module("kvtool_trtllm.connector")
        module = importlib.reload(module)
        self.classes = (module.KvtoolConnectorWorker, module.KvtoolConnectorScheduler)
        self.llm_args = SimpleNamespace(tensor_parallel_size=tp)


class Shared:
    """One pool for several clients: closing one leaves it open."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def close(self) -> None:
        pass


def play(seed: int, ours: Ours, setup: Any, tp: int, count: int = 14, cancels: float = 0.15) -> Any:
    rng = random.Random(seed)
    adversary.setup_of(rng, v2=setup.v2, tp=tp)  # draws what the set-up drew, so that requests are its
    requests = adversary.requests_of(rng, setup, count)
    work = adversary.Work(seed, requests, cancels=cancels)
    return adversary.play(setup, work, ours.classes, tp=tp, llm_args=ours.llm_args, what=f"seed {seed}")


def connectors(played: Any) -> tuple[list[Any], Any]:
    managers = [one.manager for one in played.executors]
    return [manager.worker.substance for manager in managers], managers[0].scheduler.substance


def check_pool(played: Any, ours: Ours, setup: Any) -> int:
    """Every block that the pool has for any request's tokens, byte for byte; how many there are."""
    from kvtool.engine.trtllm.connector import read_settings
    from kvtool_trtllm.keys import keys_of, seed_of

    request, settings, found = adversary.fake("request"), read_settings(), 0
    count = shard_count(ours.kv, ours.stored)
    for given in played.work.given.values():
        made = given.tokens + played.answers[given.request_id]
        face = request.LlmRequest(request.State(given, list(made), len(given.tokens)))
        seed = seed_of(face, settings)
        if seed is None:
            continue
        for index, key in enumerate(keys_of(seed, made, setup.model.block_tokens)):
            for at, group in enumerate(setup.model.layer_groups):
                for shard in range(count):
                    heads = setup.model.heads(shard, count)
                    right = setup.model.block(given, made, index, group.layers, heads)
                    buffer = bytearray(len(right))
                    got = ours.pool.get_into([shard_key(key, count, shard, at)], [buffer])
                    if got.count:
                        found += 1
                        assert bytes(buffer) == right, f"block {index} of request {given.request_id}, shard {shard}"
    return found


@pytest.mark.parametrize("version", NEEDED)
@pytest.mark.parametrize("seed", range(6))
def test_every_schedule_gives_the_answers_of_the_model(trtllm, monkeypatch, tmp_path, version, seed):
    trtllm(version)
    v2, tp = version >= "1.3" and seed % 3 != 0, 1 + seed % 2
    setup = adversary.setup_of(random.Random(seed), v2=v2, tp=tp)
    ours = Ours(monkeypatch, tmp_path, setup, tp)
    played = play(seed, ours, setup, tp)
    assert check_pool(played, ours, setup) > 5
    workers, scheduler = connectors(played)
    assert scheduler.audit() == [] and all(worker.audit() == [] for worker in workers)
