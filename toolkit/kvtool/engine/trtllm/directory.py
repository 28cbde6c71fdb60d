"""Whether the files of an engine directory for TensorRT-LLM say what its manifest says.

TensorRT-LLM finds most of this after minutes, by an assert, or not at all. Each finding names the file and its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtool.engine.facts import facts_of
from kvtool.engine.manifest import Manifest, TensorRTLLMFields
from kvtool.engine.trtllm.bundle import CONNECTOR_FILE, LLM_FILE
from kvtool.engine.trtllm.check import check_plugins
from kvtool.engine.trtllm.connector import read_settings
from kvtool.engine.trtllm.llm import read_llm_args
from kvtool.engine.trtllm.settings import LAYOUT_DTYPE, TrtllmSettings
from kvtool.engine.trtllm.signatures import check_keywords
from kvtool.engine.trtllm.sizing import fit
from kvtool.engine.trtllm.source import kind_of, read_source, read_table
from kvtool.engine.trtllm.version import Adapter, can
from kvtool.errors import KvtoolError

Finding = tuple[str, str]
"""(file and key, what is wrong with it)"""


def findings(directory: Path, manifest: Manifest) -> Iterator[Finding]:
    """Everything that does not fit. `manifest`: of `directory`, with a tensorrt_llm section."""
    fields = manifest.tensorrt_llm
    assert fields is not None
    try:
        check_plugins(tuple(manifest.plugins), can(fields.version, Adapter(fields.adapter).backend))
    except KvtoolError as error:
        yield f"{directory / 'engine.json'}: plugins", str(error)
    except ValueError:
        yield (
            f"{directory / 'engine.json'}: adapter",
            f"wanted one of {', '.join(a.value for a in Adapter)}, found {fields.adapter!r}; build it again",
        )
        return
    if fields.adapter == "engine-1.2":
        yield from _engine(directory, manifest, fields)
    else:
        yield from _bundle(directory, manifest, fields)


def sequences_that_fit(
    directory: Path, manifest: Manifest, gpu: str, fraction: float | None, max_batch_size: int | None
) -> int:
    """How many sequences of max_seq_len one rank's GPU holds, by sizing.py's arithmetic.

    Raises:
        KvtoolError: a GPU that is not known, or files that do not say what the model is.
    """
    fields = manifest.tensorrt_llm
    assert fields is not None
    words = {kvtool: theirs for theirs, kvtool in LAYOUT_DTYPE.items()}
    settings: dict[str, Any] = {
        "backend": Adapter(fields.adapter).backend,
        "version": fields.version,
        "gpu": gpu,
        "quantisation": fields.quantisation or "none",
        "kv_dtype": words[manifest.kv.dtype],
        "tensor_parallel": fields.tensor_parallel,
        "pipeline_parallel": fields.pipeline_parallel,
        "expert_parallel": fields.moe_expert_parallel or 1,
        "max_seq_len": fields.max_seq_len,
        "max_batch_size": max_batch_size or fields.max_batch_size,
        "max_num_tokens": fields.max_num_tokens,
    }
    if fraction is not None:
        settings["memory_fraction"] = fraction
    where = directory / "config.json"
    engine = fields.adapter == Adapter.ENGINE_1_2.value
    facts = read_source(directory).facts if engine else facts_of(read_table(where), str(where))
    return fit(facts, TrtllmSettings.model_validate(settings), manifest.kv.block_tokens).sequences


def _bundle(directory: Path, manifest: Manifest, fields: TensorRTLLMFields) -> Iterator[Finding]:
    path = directory / LLM_FILE
    try:
        args = read_llm_args(path)
    except KvtoolError as error:
        yield str(path), str(error)
        return
    yield from llm_findings(args, manifest, fields.version, str(path))
    try:
        settings = read_settings(directory / CONNECTOR_FILE)
    except KvtoolError as error:
        yield str(directory / CONNECTOR_FILE), str(error)
        return
    for key, found, wanted in (
        ("model_digest", settings.model_digest, manifest.model_digest),
        ("kv", settings.kv, manifest.kv),
        ("tensor_parallel", settings.tensor_parallel, fields.tensor_parallel),
    ):
        if found != wanted:
            yield (
                f"{directory / CONNECTOR_FILE}: {key}",
                f"wanted {wanted!r} as in engine.json, found {found!r}; build the engine again",
            )


def llm_findings(args: Mapping[str, Any], manifest: Manifest, version: str, where: str) -> Iterator[Finding]:
    """LLM arguments against the manifest of their engine and the signature of the version that takes them."""
    fields = manifest.tensorrt_llm
    assert fields is not None
    try:
        check_keywords("LLM", args, version, where)
    except KvtoolError as error:
        yield where, f"{str(error).removeprefix(f'{where}: ')}; build or render it again"
    cache = args.get("kv_cache_config")
    if not isinstance(cache, Mapping):
        yield f"{where}: kv_cache_config", f"wanted a table, found {cache!r}; build or render it again"
        return
    wanted = {
        "tensor_parallel_size": (args.get("tensor_parallel_size", 1), fields.tensor_parallel),
        "pipeline_parallel_size": (args.get("pipeline_parallel_size", 1), fields.pipeline_parallel),
        "max_seq_len": (args.get("max_seq_len"), fields.max_seq_len),
        "max_num_tokens": (args.get("max_num_tokens"), fields.max_num_tokens),
        "kv_cache_config.tokens_per_block": (cache.get("tokens_per_block"), manifest.kv.block_tokens),
        "kv_cache_config.dtype": (cache.get("dtype", "auto"), fields.kv_dtype),
        "kv_cache_config.enable_block_reuse": (cache.get("enable_block_reuse", True), fields.block_reuse),
    }
    for key, (found, there) in wanted.items():
        if found != there:
            yield f"{where}: {key}", f"wanted {there!r} as in engine.json, found {found!r}; build or render it again"
    if cache.get("enable_partial_reuse", True) and args.get("kv_connector_config"):
        yield (
            f"{where}: kv_cache_config.enable_partial_reuse",
            "wanted false with a connector, found true; parts of blocks were seen to be mixed up: set it to false",
        )
    if cache.get("event_buffer_max_size") and not cache.get("enable_block_reuse", True):
        yield (
            f"{where}: kv_cache_config.event_buffer_max_size",
            "events are of blocks that are reused, and enable_block_reuse is false; set it to 0, or switch reuse on",
        )


def _engine(directory: Path, manifest: Manifest, fields: TensorRTLLMFields) -> Iterator[Finding]:
    path = directory / "config.json"
    try:
        config = read_table(path)
        kind = kind_of(config)
    except KvtoolError as error:
        yield str(path), f"{str(error).removeprefix(f'{path}: ')}; build the engine again"
        return
    if kind != "engine":
        yield (
            f"{path}: pretrained_config, build_config",
            f"wanted both, as trtllm-build writes them, found {', '.join(sorted(config)[:6])}; build the engine again",
        )
        return
    for table in ("pretrained_config", "build_config"):
        if not isinstance(config[table], dict):
            yield f"{path}: {table}", f"wanted a table, found {type(config[table]).__name__}; build the engine again"
            return
    mapping, built = config["pretrained_config"].get("mapping") or {}, config["build_config"]
    plugins = built.get("plugin_config") or {}
    wanted: dict[str, tuple[Any, Any]] = {
        "version": (config.get("version"), fields.version),
        "pretrained_config.mapping.tp_size": (mapping.get("tp_size", 1), fields.tensor_parallel),
        "pretrained_config.mapping.pp_size": (mapping.get("pp_size", 1), fields.pipeline_parallel),
        "build_config.max_batch_size": (built.get("max_batch_size"), fields.max_batch_size),
        "build_config.max_num_tokens": (built.get("max_num_tokens"), fields.max_num_tokens),
        "build_config.max_seq_len": (built.get("max_seq_len"), fields.max_seq_len),
        "build_config.plugin_config.tokens_per_block": (plugins.get("tokens_per_block"), manifest.kv.block_tokens),
    }
    for key, (found, there) in wanted.items():
        if found != there:
            yield f"{path}: {key}", f"wanted {there!r} as in engine.json, found {found!r}; build the engine again"
    for key in ("use_paged_context_fmha", "paged_kv_cache") if fields.block_reuse else ():
        if not plugins.get(key):
            yield (
                f"{path}: build_config.plugin_config.{key}",
                f"wanted true, block reuse needs it, found {plugins.get(key)!r}; build the engine again with it",
            )
    for rank in range(fields.world_size):
        if not (directory / f"rank{rank}.engine").is_file():
            yield (
                str(directory / f"rank{rank}.engine"),
                f"wanted an engine for each of {fields.world_size} ranks, this one is missing; build the engine again",
            )
