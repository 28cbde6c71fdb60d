"""What is refused before anything starts: settings that do not fit the model, the version, the GPU or each other.

Each refusal names the setting, what was found and what would be right. TensorRT-LLM finds most of these too, but after
minutes of loading, in an assert, or not at all (a reuse that silently never happens, a KV dtype taken from elsewhere).
"""

from __future__ import annotations

from kvtool.engine.manifest import Manifest
from kvtool.engine.trtllm.gpus import GPUS, Gpu, gpu
from kvtool.engine.trtllm.settings import TrtllmSettings
from kvtool.engine.trtllm.source import Source
from kvtool.engine.trtllm.version import Can, adapter_for, installed, tensorrt_installed
from kvtool.errors import EngineRefused

ENGINE_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
}
"""Architectures of TensorRT engines -> whose convert_checkpoint.py reads them."""

LEAST_SM = {"fp8": (89, "Ada"), "fp8_block_scales": (90, "Hopper"), "nvfp4": (100, "Blackwell")}
"""Formats -> the compute capability from which a GPU multiplies them."""


def check(source: Source, settings: TrtllmSettings, block_tokens: int, able: Can) -> None:
    """Refuse what cannot be built or served.

    Raises:
        EngineRefused: the first thing that does not fit.
    """
    _check_block(block_tokens)
    _check_tokens(source, settings, block_tokens)
    _check_parallel(source, settings)
    card = gpu(settings.gpu)
    _check_gpu(settings, card)
    _check_dtypes(source, settings, able)
    check_plugins(settings.plugins, able)
    if able.engine_build:
        _check_engine_path(source, settings)
    elif source.kind != "huggingface":
        what = "a TensorRT engine" if source.kind == "engine" else "a TensorRT-LLM checkpoint"
        raise EngineRefused(
            f"{source.name}: {what}; the PyTorch backend reads Hugging Face checkpoints. Give it the one that this was "
            "made of, or choose backend: tensorrt"
        )


def check_plugins(plugins: tuple[str, ...], able: Can) -> None:
    """Refuse plugins that the runtime could not load.

    Raises:
        EngineRefused: Python plugins, or plugins where there is no TensorRT engine.
    """
    for path in plugins:
        if not able.engine_build:
            raise EngineRefused(
                f"plugins: {path}: TensorRT plugins are for TensorRT engines; the PyTorch backend loads none. "
                "For KV offload use the connector, which needs no plugin"
            )
        if not path.endswith(".so"):
            raise EngineRefused(
                f"plugins: {path}: wanted a compiled library (.so). A plugin whose body is Python builds, and then "
                "crashes the C++ runtime that loads the engine; compile it, or use tensorrt.plugin.aot_impl"
            )


def check_paged_reuse(reuse: bool, plugin_config: dict[str, object]) -> None:
    """Refuse reuse of blocks on an engine that could not read them: TensorRT-LLM then silently reuses nothing.

    Raises:
        EngineRefused: naming the plugin setting.
    """
    for key in ("use_paged_context_fmha", "paged_kv_cache") if reuse else ():
        if not plugin_config.get(key):
            raise EngineRefused(
                f"plugin_config.{key}: found {plugin_config.get(key)!r}, block reuse needs it; build the engine with "
                f"it, or set block_reuse: false"
            )


def check_installed(manifest: Manifest, where: str, version: str | None = None) -> None:
    """Compare a manifest with the TensorRT-LLM that would serve it: `version`, or what is installed here.

    Raises:
        EngineRefused: another adapter; or, for an engine, another TensorRT or TensorRT-LLM than wrote it.
    """
    fields = manifest.tensorrt_llm
    if fields is None:
        raise EngineRefused(f"{where}: an engine for {manifest.target}, not for tensorrt_llm")
    here = version or installed()
    if here is None:
        raise EngineRefused(
            f"{where}: built for TensorRT-LLM {fields.version}; none is installed here, so nothing can be compared"
        )
    backend = "tensorrt" if fields.adapter == "engine-1.2" else "pytorch"
    if adapter_for(here, backend).value != fields.adapter:
        raise EngineRefused(
            f"{where}: built for TensorRT-LLM {fields.version} ({fields.adapter}), found {here} "
            f"({adapter_for(here, backend).value}); build it again for {here}"
        )
    if backend == "pytorch":
        return
    if here != fields.version:
        raise EngineRefused(
            f"{where}: an engine of TensorRT-LLM {fields.version}, found {here}; an engine loads only in the release "
            "that built it: build it again"
        )
    tensorrt = tensorrt_installed()
    if version is None and tensorrt != fields.tensorrt_version:
        raise EngineRefused(
            f"{where}: built with TensorRT {fields.tensorrt_version}, found {tensorrt or 'none'}; an engine is "
            "bound to the exact TensorRT: install that one, or build it again"
        )


def check_gpu_arch(manifest: Manifest, where: str, arch: str) -> None:
    """Refuse an engine on GPUs of another architecture than it was built on.

    Raises:
        EngineRefused: with both.
    """
    fields = manifest.tensorrt_llm
    if fields is not None and fields.gpu_arch not in (None, arch):
        raise EngineRefused(
            f"{where}: built for {fields.gpu_arch}, this GPU is {arch}; build it again here"
            + (", or point the spec at GPUs of that kind" if fields.adapter == "engine-1.2" else "")
        )


def _check_block(block_tokens: int) -> None:
    if block_tokens < 2 or block_tokens & (block_tokens - 1):
        raise EngineRefused(
            f"block_tokens: wanted a power of two above 1 (TensorRT-LLM's tokens_per_block), found {block_tokens}"
        )


def _check_tokens(source: Source, settings: TrtllmSettings, block_tokens: int) -> None:
    if settings.max_num_tokens % block_tokens:
        raise EngineRefused(
            f"max_num_tokens: wanted a multiple of block_tokens ({block_tokens}), since prompts are computed in chunks "
            f"of whole blocks, found {settings.max_num_tokens}"
        )
    if settings.max_num_tokens < settings.max_batch_size:
        raise EngineRefused(
            f"max_num_tokens: wanted at least max_batch_size ({settings.max_batch_size}), a token for each sequence of "
            f"a step, found {settings.max_num_tokens}"
        )
    if settings.max_num_tokens > settings.max_seq_len * settings.max_batch_size:
        raise EngineRefused(
            f"max_num_tokens: wanted at most max_seq_len x max_batch_size "
            f"({settings.max_seq_len * settings.max_batch_size}), more never meet in a step, found "
            f"{settings.max_num_tokens}"
        )
    if settings.max_seq_len > source.facts.context:
        raise EngineRefused(
            f"max_seq_len: wanted at most the model's context ({source.facts.context}), found {settings.max_seq_len}"
        )


def _check_parallel(source: Source, settings: TrtllmSettings) -> None:
    facts, tp, ep = source.facts, settings.tensor_parallel, settings.expert_parallel
    if facts.heads % tp:
        raise EngineRefused(f"tensor_parallel: wanted a divisor of the {facts.heads} attention heads, found {tp}")
    if facts.latent is None and facts.kv_heads % tp and tp % facts.kv_heads:
        raise EngineRefused(
            f"tensor_parallel: wanted a divisor or a multiple of the {facts.kv_heads} KV heads, found {tp}"
        )
    if ep > 1 and facts.experts is None:
        raise EngineRefused(f"expert_parallel: {facts.architecture} has no experts, found {ep}; set it to 1")
    if tp % ep or (facts.experts and facts.experts.count % ep):
        count = facts.experts.count if facts.experts else 0
        raise EngineRefused(
            f"expert_parallel: wanted a divisor of tensor_parallel ({tp}) and of the {count} experts, found {ep}"
        )
    if facts.layers < settings.pipeline_parallel:
        raise EngineRefused(
            f"pipeline_parallel: wanted at most the {facts.layers} layers, found {settings.pipeline_parallel}"
        )
    if source.kind != "huggingface":
        split = (source.tensor_parallel, source.pipeline_parallel, source.context_parallel)
        wanted = (tp, settings.pipeline_parallel, settings.context_parallel)
        if split != wanted:
            raise EngineRefused(
                f"{source.name}: split for tensor, pipeline, context parallel {split}, the settings say {wanted}; "
                "convert the Hugging Face checkpoint again, or set them so"
            )


def _check_gpu(settings: TrtllmSettings, card: Gpu) -> None:
    wanted = {settings.quantisation, settings.kv_dtype} & set(LEAST_SM)
    for name in sorted(wanted):
        least, family = LEAST_SM[name]
        if card.sm < least:
            key = "quantisation" if name == settings.quantisation else "kv_dtype"
            able = [one.name for one in GPUS.values() if one.sm >= least]
            raise EngineRefused(
                f"{key}: {name} needs a GPU from {family} on (sm_{least}), {card.title} is {card.arch}; "
                f"choose another {key}, or a GPU such as {', '.join(able[:3])}"
            )


def _check_dtypes(source: Source, settings: TrtllmSettings, able: Can) -> None:
    kv = settings.kv_dtype
    if kv in ("bfloat16", "float16"):
        if kv != source.dtype:
            raise EngineRefused(
                f"kv_dtype: wanted the model's {source.dtype} or {', '.join(able.quantised_kv)}, found {kv}; "
                "TensorRT-LLM keeps KV in the model's dtype unless it is quantised"
            )
        if source.kv_dtype is not None:
            raise EngineRefused(
                f"kv_dtype: found {kv}, but the checkpoint carries scales for {source.kv_dtype} KV, which TensorRT-LLM "
                f"then uses; set kv_dtype: {source.kv_dtype}"
            )
    else:
        able.need_value("quantised_kv", kv, "kv_dtype")
        if source.kv_dtype not in (None, kv):
            raise EngineRefused(f"kv_dtype: the checkpoint carries scales for {source.kv_dtype}, found {kv}")
    if not able.engine_build and settings.quantisation != source.quantisation:
        raise EngineRefused(
            f"quantisation: the settings say {settings.quantisation}, the checkpoint has {source.quantisation}; the "
            "PyTorch backend takes weights as they are: set it so, or give a checkpoint that is quantised like that"
        )


def _check_engine_path(source: Source, settings: TrtllmSettings) -> None:
    facts = source.facts
    if facts.architecture not in ENGINE_ARCHITECTURES:
        raise EngineRefused(
            f"{source.name}: kvtool builds no TensorRT engines of {facts.architecture} (only of "
            f"{', '.join(ENGINE_ARCHITECTURES)}); choose backend: pytorch"
        )
    if source.kind != "huggingface":
        if settings.quantisation != source.quantisation:
            raise EngineRefused(
                f"quantisation: {source.name} was converted with {source.quantisation}, the settings say "
                f"{settings.quantisation}; set it so, or convert again"
            )
        if settings.kv_dtype not in (source.dtype, source.kv_dtype):
            raise EngineRefused(
                f"kv_dtype: {source.name} has no scales for {settings.kv_dtype} KV; it was converted for "
                f"{source.kv_dtype or source.dtype}"
            )
        return
    if source.quantisation != "none":
        raise EngineRefused(
            f"{source.name}: quantised already ({source.quantisation}); the engine path quantises by itself: give it "
            "the float checkpoint and set quantisation, or choose backend: pytorch"
        )
    if settings.quantisation == "fp8_block_scales":
        raise EngineRefused("quantisation: fp8_block_scales is for the PyTorch backend; TensorRT engines take fp8")
    if settings.expert_parallel > 1 and (settings.quantisation != "none" or settings.kv_dtype != source.dtype):
        raise EngineRefused(
            f"expert_parallel: {settings.expert_parallel} with quantisation: TensorRT-LLM's quantize.py splits no "
            "experts over ranks; set expert_parallel: 1, or choose backend: pytorch"
        )
