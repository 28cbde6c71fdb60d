"""The commands that make a TensorRT engine: conversion or quantisation of the checkpoint, then trtllm-build.

`trtllm-build` takes its configuration as a file, and plugin settings as flags too; which of the two wins changed
between releases, so both say the same. Every flag is looked up in the recorded list of the version.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.engine.trtllm.check import ENGINE_ARCHITECTURES
from kvtool.engine.trtllm.settings import TrtllmSettings
from kvtool.engine.trtllm.signatures import check_flags, flags
from kvtool.engine.trtllm.source import Source

EXAMPLES_ENV = "KVTOOL_TRTLLM_EXAMPLES"
EXAMPLES = "/app/tensorrt_llm/examples"
"""Where NVIDIA's release container has TensorRT-LLM's example scripts, which convert and quantise checkpoints."""
QFORMAT = {"none": "full_prec", "fp8": "fp8", "w4a16_awq": "int4_awq", "nvfp4": "nvfp4"}
CALIBRATION_SAMPLES = 512


@dataclass(frozen=True)
class Command:
    """`makes`: files that must be in `directory` afterwards, one for each rank: "rank{}.engine"."""

    title: str
    argv: list[str]
    directory: Path
    makes: str
    ranks: int


def commands(
    source: Source,
    settings: TrtllmSettings,
    plugins: dict[str, Any],
    version: str,
    *,
    config: Path,
    converted: Path,
    engine: Path,
    examples: Path,
) -> list[Command]:
    """What is run, in order. An engine directory needs nothing, a TensorRT-LLM checkpoint no conversion.

    Raises:
        EngineRefused: a flag that the version does not take.
    """
    if source.kind == "engine":
        return []
    steps = []
    if source.kind == "huggingface":
        quantised = settings.quantisation != "none" or settings.kv_dtype != source.dtype
        make = _quantise if quantised else _convert
        steps.append(make(source, settings, version, converted, examples))
    checkpoint = converted if source.kind == "huggingface" else source.path
    known = flags("trtllm-build", version)
    argv = ["trtllm-build", "--checkpoint_dir", str(checkpoint), "--build_config", str(config)]
    argv += ["--output_dir", str(engine), "--workers", str(_workers(settings)), "--log_level", "info"]
    for key, value in plugins.items():
        if f"--{key}" in known and key != "paged_kv_cache":
            argv += [f"--{key}", _word(value)]
    check_flags("trtllm-build", argv[1:], version)
    return [*steps, Command("trtllm-build", argv, engine, "rank{}.engine", settings.world_size)]


def _convert(source: Source, settings: TrtllmSettings, version: str, converted: Path, examples: Path) -> Command:
    family = ENGINE_ARCHITECTURES[source.facts.architecture]
    script = examples / "models" / "core" / family / "convert_checkpoint.py"
    argv = ["python3", str(script), "--model_dir", source.name, "--output_dir", str(converted)]
    argv += ["--dtype", source.dtype, *_parallel(settings)]
    if source.facts.experts is not None:
        argv += ["--moe_tp_size", str(settings.tensor_parallel // settings.expert_parallel)]
        argv += ["--moe_ep_size", str(settings.expert_parallel)]
    argv += ["--workers", str(_workers(settings))]
    check_flags(f"convert_checkpoint.py {family}", argv[2:], version)
    return Command("convert_checkpoint", argv, converted, "rank{}.safetensors", settings.world_size)


def _quantise(source: Source, settings: TrtllmSettings, version: str, converted: Path, examples: Path) -> Command:
    script = examples / "quantization" / "quantize.py"
    argv = ["python3", str(script), "--model_dir", source.name, "--output_dir", str(converted)]
    argv += ["--dtype", source.dtype, "--qformat", QFORMAT[settings.quantisation]]
    if settings.kv_dtype != source.dtype:
        argv += ["--kv_cache_dtype", settings.kv_dtype]
    argv += ["--calib_size", str(CALIBRATION_SAMPLES), *_parallel(settings)]
    check_flags("quantize.py", argv[2:], version)
    return Command("quantize", argv, converted, "rank{}.safetensors", settings.world_size)


def _parallel(settings: TrtllmSettings) -> list[str]:
    sizes = {"tp": settings.tensor_parallel, "pp": settings.pipeline_parallel, "cp": settings.context_parallel}
    return [word for key, size in sizes.items() for word in (f"--{key}_size", str(size))]


def _workers(settings: TrtllmSettings) -> int:
    """Ranks built at a time: one a GPU of the node."""
    return min(settings.world_size, settings.node.gpus)


def _word(value: Any) -> str:
    """As trtllm-build takes a plugin setting on its command line."""
    if value is None or value is False:
        return "disable"
    return "enable" if value is True else str(value)
