"""What an engine may not be for this connector: refused at start, with the reason and what to set.

Settings are read from the engine's arguments by attribute, since their classes differ between releases. What a release
leaves open is refused here where it would give wrong or no reuse, rather than found out under load.
"""

from __future__ import annotations

from typing import Any

from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.engine.trtllm.version import Can
from kvtool.errors import EngineRefused


def check_engine(llm_args: Any, settings: ConnectorSettings, can: Can) -> None:
    """
    Raises:
        EngineRefused: one sentence for each misfit.
    """
    faults = [*_parallel(llm_args, settings, can), *_scheduling(llm_args), *_cache(llm_args, settings)]
    if faults:
        raise EngineRefused("kvtool's connector cannot serve this engine:\n" + "\n".join(faults))


def value_of(holder: Any, *names: str) -> Any:
    """The attribute path; None where any of it is absent."""
    for name in names:
        holder = getattr(holder, name, None)
    return holder


def world_of(llm_args: Any) -> int:
    return int(value_of(llm_args, "tensor_parallel_size") or 1)


def _parallel(llm_args: Any, settings: ConnectorSettings, can: Can) -> list[str]:
    faults = []
    for name, what in (("pipeline_parallel_size", "pipeline"), ("context_parallel_size", "context")):
        if (value_of(llm_args, name) or 1) > 1:
            faults.append(
                f"{name}: found {value_of(llm_args, name)}; TensorRT-LLM's connector calls know one {what} stage only, "
                "set 1"
            )
    tensor = world_of(llm_args)
    if tensor != settings.tensor_parallel:
        faults.append(
            f"tensor_parallel_size: found {tensor}, the connector's settings are for {settings.tensor_parallel}; build "
            "the bundle again"
        )
    if value_of(llm_args, "enable_attention_dp"):
        if not can.attention_dp_connector:
            faults.append(f"enable_attention_dp: TensorRT-LLM {can.version} has no connectors with it; set false")
        else:
            faults.append("enable_attention_dp: kvtool's connector matches on rank 0 for all ranks; set false")
    return faults


def _scheduling(llm_args: Any) -> list[str]:
    faults = []
    beam = value_of(llm_args, "max_beam_width")
    if beam is not None and beam > 1:
        faults.append(f"max_beam_width: found {beam}; beams share and copy pages behind a connector's back, set 1")
    policy = value_of(llm_args, "scheduler_config", "capacity_scheduler_policy")
    name = str(getattr(policy, "value", policy) or "GUARANTEED_NO_EVICT").rpartition(".")[2]
    if name != "GUARANTEED_NO_EVICT":
        faults.append(
            f"scheduler_config.capacity_scheduler_policy: found {name}; others take pages from requests whose blocks "
            "are on their way, set GUARANTEED_NO_EVICT"
        )
    if value_of(llm_args, "speculative_config") is not None:
        faults.append("speculative_config: drafted tokens are rejected after their KV was written; leave it out")
    return faults


def _cache(llm_args: Any, settings: ConnectorSettings) -> list[str]:
    cache, faults = value_of(llm_args, "kv_cache_config"), []
    block_tokens = value_of(cache, "tokens_per_block")
    if block_tokens is not None and block_tokens != settings.kv.block_tokens:
        faults.append(
            f"kv_cache_config.tokens_per_block: found {block_tokens}, the pool's blocks have "
            f"{settings.kv.block_tokens}; build the bundle again, or set it"
        )
    if value_of(cache, "enable_partial_reuse"):
        faults.append(
            "kv_cache_config.enable_partial_reuse: found true; a block that is reused in part cannot be loaded as a "
            "whole, set false"
        )
    if value_of(cache, "enable_block_reuse") is False and settings.pool_state is not None:
        faults.append(
            "kv_cache_config.enable_block_reuse: found false; TensorRT-LLM then takes none of the tokens that a "
            "connector has blocks for, set true"
        )
    windows = value_of(cache, "max_attention_window")
    if windows and len(set(windows)) > 1 and value_of(cache, "use_kv_cache_manager_v2") is not True:
        faults.append(
            f"kv_cache_config.max_attention_window: found {windows}; the V1 cache manager gives a connector one, "
            "set use_kv_cache_manager_v2 (1.3 and later), or one window"
        )
    return faults
