"""The files that a build writes beside weights: LLM arguments, connector settings, build configuration.

Each is made as plain values and checked against the recorded signatures before it is written.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from kvtool.engine.manifest import LayoutFields
from kvtool.engine.trtllm.check import check_paged_reuse
from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.engine.trtllm.settings import LAYOUT_DTYPE, TrtllmSettings
from kvtool.engine.trtllm.signatures import check_keywords, fields
from kvtool.engine.trtllm.source import Source
from kvtool.engine.trtllm.version import Adapter
from kvtool.kv.layout import KVLayout

BUILD_FILE = "build_config.json"
NOT_JSON = ("speculative_decoding_mode", "lora_config", "auto_parallel_config")
"""Fields of BuildConfig that a JSON file does not carry as it should (an enum's flag, classes): left at their defaults,
which are off."""


def layout_of(source: Source, settings: TrtllmSettings, block_tokens: int) -> KVLayout:
    """Of the whole model, all heads of all ranks."""
    return source.facts.kv_layout(block_tokens, LAYOUT_DTYPE[settings.kv_dtype])


def layout_fields(layout: KVLayout) -> LayoutFields:
    return LayoutFields(
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_tokens=layout.block_tokens,
        dtype=layout.dtype,
        kv_factor=layout.kv_factor,
    )


def kv_word(settings: TrtllmSettings) -> str:
    """TensorRT-LLM's word for the KV dtype: the model's own is auto."""
    return "auto" if settings.kv_dtype in ("bfloat16", "float16") else settings.kv_dtype


def numerics(adapter: Adapter, arch: str, settings: TrtllmSettings) -> str:
    """What else than weights and layout decides the bytes of KV; blocks of two engines meet only where it is equal."""
    return f"{adapter.value}/{arch}/{settings.quantisation}/{settings.kv_dtype}"


def llm_yaml(source: Source, settings: TrtllmSettings, block_tokens: int, version: str) -> str:
    """llm.yaml: what holds in every role.

    Raises:
        EngineRefused: a keyword that the version does not take.
    """
    args: dict[str, Any] = {
        "model": source.name,
        "trust_remote_code": False,
        "dtype": source.dtype,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": settings.pipeline_parallel,
        "context_parallel_size": settings.context_parallel,
        "max_batch_size": settings.max_batch_size,
        "max_num_tokens": settings.max_num_tokens,
        "max_seq_len": settings.max_seq_len,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "kv_cache_config": {
            "enable_block_reuse": settings.block_reuse,
            "enable_partial_reuse": False,
            "copy_on_partial_reuse": False,
            "tokens_per_block": block_tokens,
            "dtype": kv_word(settings),
            "free_gpu_memory_fraction": settings.memory_fraction,
        },
    }
    if source.facts.experts is not None:
        args["moe_expert_parallel_size"] = settings.expert_parallel
        args["moe_tensor_parallel_size"] = settings.tensor_parallel // settings.expert_parallel
    check_keywords("LLM", args, version, "llm.yaml")
    head = f"# Arguments of tensorrt_llm.LLM for TensorRT-LLM {version}, written by kvtool build.\n"
    return head + yaml.safe_dump(args, sort_keys=False)


def connector_yaml(
    source: Source, settings: TrtllmSettings, layout: KVLayout, model_digest: str, rounding: str, stored_parallel: int
) -> str:
    """connector.yaml: every setting of the connector spelled out."""
    made = ConnectorSettings(
        model_digest=model_digest,
        numerics=rounding,
        kv=layout_fields(layout),
        tensor_parallel=settings.tensor_parallel,
        stored_parallel=stored_parallel,
    )
    head = "# What kvtool's KV-offload connector is told; KVTOOL_CONNECTOR names this file. Written by kvtool build.\n"
    return head + yaml.safe_dump(made.model_dump(), sort_keys=False)


def build_config(source: Source, settings: TrtllmSettings, block_tokens: int, version: str) -> dict[str, Any]:
    """Every field of TensorRT-LLM's BuildConfig that JSON carries, PluginConfig within.

    Raises:
        EngineRefused: a field that the version does not take, or reuse without paged context FMHA.
    """
    made = _defaults("BuildConfig", version)
    made |= {
        "max_input_len": settings.max_seq_len - 1,
        "max_seq_len": settings.max_seq_len,
        "opt_batch_size": min(8, settings.max_batch_size),
        "max_batch_size": settings.max_batch_size,
        "max_beam_width": 1,
        "max_num_tokens": settings.max_num_tokens,
        "kv_cache_type": "PAGED",
        "plugin_config": plugin_config(source, settings, block_tokens, version),
    }
    check_keywords("BuildConfig", made, version, BUILD_FILE)
    return made


def plugin_config(source: Source, settings: TrtllmSettings, block_tokens: int, version: str) -> dict[str, Any]:
    """Every field of PluginConfig. TensorRT-LLM ignores a key that it does not know, so it is refused here.

    Raises:
        EngineRefused: a field that the version does not take, or reuse without paged context FMHA.
    """
    fp8 = settings.quantisation == "fp8" and settings.kv_dtype == "fp8"
    made = _defaults("PluginConfig", version) | {
        "dtype": source.dtype,
        "gpt_attention_plugin": "auto",
        "gemm_plugin": None if settings.quantisation in ("fp8", "nvfp4") else "auto",
        "nccl_plugin": "auto" if settings.world_size > 1 else None,
        "moe_plugin": "auto" if source.facts.experts is not None else None,
        "context_fmha": True,
        "paged_kv_cache": True,
        "remove_input_padding": True,
        "tokens_per_block": block_tokens,
        "use_paged_context_fmha": True,  # chunked prompts need it, whether or not blocks are reused
        "use_fp8_context_fmha": fp8,
    }
    check_keywords("PluginConfig", made, version, f"{BUILD_FILE}: plugin_config")
    check_paged_reuse(settings.block_reuse, made)
    return made


def as_json(table: dict[str, Any]) -> str:
    return json.dumps(table, indent=2) + "\n"


def _defaults(name: str, version: str) -> dict[str, Any]:
    known = fields(name, version)
    return {
        key: field.default
        for key, field in known.items()
        if key not in NOT_JSON and not str(field.default).endswith("()")
    }
