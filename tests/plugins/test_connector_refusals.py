"""What an engine may not be: each refused by the name of its setting, and all of them at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtool.engine.manifest import LayoutFields
from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.engine.trtllm.version import can
from kvtool.errors import EngineRefused
from kvtool_trtllm.refusals import check_engine

SETTINGS = ConnectorSettings(
    model_digest="m", kv=LayoutFields(layers=2, kv_heads=2, head_dim=4, block_tokens=32, dtype="bfloat16")
)


def engine(cache: dict[str, Any] | None = None, **changes: Any) -> Any:
    kv = {"tokens_per_block": 32, "enable_partial_reuse": False, "max_attention_window": None, **(cache or {})}
    policy = SimpleNamespace(capacity_scheduler_policy=SimpleNamespace(value="GUARANTEED_NO_EVICT"))
    made = {"tensor_parallel_size": 1, "scheduler_config": policy, "kv_cache_config": SimpleNamespace(**kv)}
    return SimpleNamespace(**{**made, **changes})


@pytest.mark.parametrize("version", ["1.1.0", "1.2.1", "1.3.0rc27", "1.4.0rc1"])
def test_a_plain_engine_is_served(version: str) -> None:
    check_engine(engine(), SETTINGS, can(version))
    check_engine(SimpleNamespace(), SETTINGS, can(version))
    one_window = engine({"max_attention_window": [4096, 4096]})
    check_engine(one_window, SETTINGS, can(version))
    check_engine(engine({"max_attention_window": [512, 4096], "use_kv_cache_manager_v2": True}), SETTINGS, can(version))


MAX_UTILIZATION = SimpleNamespace(capacity_scheduler_policy="CapacitySchedulerPolicy.MAX_UTILIZATION")
REFUSED: list[tuple[Any, str]] = [
    (engine(pipeline_parallel_size=2), "pipeline_parallel_size: found 2"),
    (engine(context_parallel_size=2), "context_parallel_size: found 2"),
    (engine(tensor_parallel_size=2), "tensor_parallel_size: found 2, the connector's settings are for 1"),
    (engine(enable_attention_dp=True), "enable_attention_dp: "),
    (engine(max_beam_width=4), "max_beam_width: found 4"),
    (engine(scheduler_config=MAX_UTILIZATION), "capacity_scheduler_policy: found MAX_UTILIZATION"),
    (engine(speculative_config=object()), "speculative_config"),
    (engine({"tokens_per_block": 64}), "tokens_per_block: found 64, the pool's blocks have 32"),
    (engine({"enable_partial_reuse": True}), "enable_partial_reuse: found true"),
    (engine({"max_attention_window": [512, 4096]}), r"max_attention_window: found \[512, 4096\]"),
]


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
@pytest.mark.parametrize(("made", "said"), REFUSED, ids=[said.split(":")[0] for _, said in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(made: Any, said: str, version: str) -> None:
    with pytest.raises(EngineRefused, match=said):
        check_engine(made, SETTINGS, can(version))


def test_a_pool_without_reuse_is_refused_since_nothing_of_it_would_be_taken() -> None:
    without = engine({"enable_block_reuse": False})
    check_engine(without, SETTINGS, can("1.2.1"))
    with pytest.raises(EngineRefused, match="enable_block_reuse: found false"):
        check_engine(without, SETTINGS.model_copy(update={"pool_state": "pool.json"}), can("1.2.1"))


def test_every_fault_is_listed_at_once() -> None:
    made = engine({"enable_partial_reuse": True}, pipeline_parallel_size=2, max_beam_width=2)
    with pytest.raises(EngineRefused) as caught:
        check_engine(made, SETTINGS, can("1.2.1"))
    assert len(str(caught.value).splitlines()) == 4
