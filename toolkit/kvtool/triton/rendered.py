"""Whether rendered repositories can serve: what Triton reads, and what prefill and decode must have alike.

Files may have been edited, copied or rendered from another spec, so they are held against each other and against the
manifests, not against what `render` would write. Each fault names the file and the key in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvtool.config.fault import Fault
from kvtool.config.gpus import Facts, Role
from kvtool.config.spec import Spec
from kvtool.engine.manifest import Manifest
from kvtool.engine.trtllm.connector import ConnectorSettings, read_settings
from kvtool.engine.trtllm.directory import llm_findings
from kvtool.errors import KvtoolError, Missing

STREAMING = ("kvtool", "prefill", "prefill_engine", "decode", "decode_engine", "context", "generation")
"""Models that a request streams through; where one is decoupled and another is not, Triton refuses or keeps silent."""
BOTH = ("backend", "max_tokens_in_buffer", "kv_transfer_timeout_ms", "transceiver_runtime")


def config_faults(out: Path) -> Iterator[Fault]:
    """Every config.pbtxt below `out`, by Triton's own message format."""
    paths = sorted(out.glob("*/*/config.pbtxt"))
    if not paths:
        yield Fault(
            str(out), "wanted repositories with models, found none; render them: kvtool deploy render SPEC -o DIR"
        )
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if "${" in text:
            yield Fault(f"{path}", "a placeholder ${...} was not filled, which Triton reads as text; render it again")
        try:
            config = parse(text)
        except ValueError as error:
            yield Fault(f"{path}", f"wanted a model configuration, found {error}; render it again")
            continue
        if config.name != path.parent.name:
            yield Fault(f"{path}: name", f"wanted {path.parent.name!r}, its folder, found {config.name!r}")
        if path.parent.name in STREAMING and not config.model_transaction_policy.decoupled:
            yield Fault(
                f"{path}: model_transaction_policy.decoupled",
                "wanted true, as every model that a stream goes through has it, found false; render it again",
            )
        for step in config.ensemble_scheduling.step:
            if not (path.parents[1] / step.model_name / "config.pbtxt").is_file():
                yield Fault(
                    f"{path}: ensemble_scheduling",
                    f"step {step.model_name!r} is no model of this repository; render again",
                )
        if config.backend == "tensorrtllm":
            yield from _reuse_faults(path, config)


def parse(text: str) -> Any:
    """A ModelConfig. Raises ValueError: with line and column; Missing: tritonclient is not installed."""
    try:
        text_format: Any = importlib.import_module("google.protobuf.text_format")  # it has no types
        from tritonclient.grpc.model_config_pb2 import ModelConfig
    except ModuleNotFoundError:
        raise Missing("checking model configurations needs tritonclient; run: pip install 'kvtool[serve]'") from None
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise ValueError(str(error)) from None


def _reuse_faults(path: Path, config: Any) -> Iterator[Fault]:
    if "enable_kv_cache_reuse" not in config.parameters:
        yield Fault(
            f"{path}: parameters.enable_kv_cache_reuse",
            "wanted true or false, found nothing; without it blocks are not reused and cache metrics are missing",
        )
    ranks = config.parameters["participant_ids"].string_value.replace(";", ",").split(",")
    gpus = config.parameters["gpu_device_ids"].string_value.replace(";", ",").split(",")
    if len(ranks) != len(gpus):
        yield Fault(
            f"{path}: parameters.participant_ids",
            f"wanted an MPI rank for each of {len(gpus)} GPUs (gpu_device_ids), found {len(ranks)}; render it again",
        )
    if "0" in ranks:
        yield Fault(f"{path}: parameters.participant_ids", "rank 0 is the orchestrator and has no GPU; render it again")


def role_faults(out: Path, spec: Spec, facts: Facts, manifests: Mapping[str, Manifest]) -> Iterator[Fault]:
    """llm.yaml and connector.yaml of both roles over the PyTorch backend."""
    args: dict[str, dict[str, Any]] = {}
    settings: dict[str, ConnectorSettings] = {}
    for role in facts.roles:
        folder = out / role.name / f"{role.name}_engine" / "1"
        try:
            args[role.name] = found = _table(folder / "llm.yaml")
            if found.get("kv_connector_config"):
                settings[role.name] = read_settings(folder / "connector.yaml")
        except KvtoolError as error:
            yield Fault(str(folder), str(error))
            continue
        for key, says in llm_findings(found, manifests[role.name], facts.able.version, str(folder / "llm.yaml")):
            yield Fault(key, says)
        yield from _transfer_faults(folder / "llm.yaml", spec, facts, found, role)
    if len(args) == 2:
        yield from _pair_faults(out, args)
    yield from _settings_faults(out, facts, manifests, settings)


def _table(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Missing(f"{path}: wanted LLM arguments, found none ({error}); render it again") from None
    if not isinstance(found, dict):
        raise Missing(f"{path}: wanted a table of LLM arguments, found {type(found).__name__}; render it again")
    return found


def _transfer_faults(path: Path, spec: Spec, facts: Facts, args: Mapping[str, Any], role: Role) -> Iterator[Fault]:
    """The transceiver of one side: explicit, of this version, large and patient enough."""
    config, connector = args.get("cache_transceiver_config"), args.get("kv_connector_config")
    if spec.tensorrt_llm.handoff == "transceiver" and not config:
        yield Fault(
            f"{path}: cache_transceiver_config", "wanted one with handoff: transceiver, found none; render again"
        )
    if spec.tensorrt_llm.handoff == "pool" and not connector:
        yield Fault(f"{path}: kv_connector_config", "wanted kvtool's with handoff: pool, found none; render it again")
    if not isinstance(config, Mapping):
        return
    where = f"{path}: cache_transceiver_config"
    if connector and not facts.able.transceiver_with_connector:
        yield Fault(where, f"stands beside a connector, which TensorRT-LLM {facts.able.version} is not trusted with")
    backend, block = config.get("backend"), role.kv.block_tokens
    if backend in (None, "DEFAULT", "MPI"):
        yield Fault(f"{where}.backend", f"wanted NIXL or UCX said outright, found {backend!r}; render it again")
    tokens = config.get("max_tokens_in_buffer")
    if not isinstance(tokens, int) or tokens % block or tokens < facts.longest:
        yield Fault(
            f"{where}.max_tokens_in_buffer",
            f"wanted a multiple of tokens_per_block ({block}) and at least the longest sequence ({facts.longest} "
            f"tokens), found {tokens!r}; render it again",
        )
    least_ms = 1000 * facts.longest * role.kv.token_size / max(1, spec.tensorrt_llm.transceiver.bandwidth)
    timeout = config.get("kv_transfer_timeout_ms")
    if not isinstance(timeout, int) or timeout < least_ms:
        yield Fault(
            f"{where}.kv_transfer_timeout_ms",
            f"wanted at least {least_ms:.0f}, what the longest sequence takes, found {timeout!r}; render it again",
        )
    if role.name == "prefill" and not args.get("disable_overlap_scheduler"):
        yield Fault(
            f"{path}: disable_overlap_scheduler",
            "wanted true on the prefill side of a transceiver, found false; render it again",
        )


def _pair_faults(out: Path, args: Mapping[str, Mapping[str, Any]]) -> Iterator[Fault]:
    where = out / "decode" / "decode_engine" / "1" / "llm.yaml"

    def values(key: str, table: str) -> tuple[Any, Any]:
        prefill, decode = ((args[role].get(table) or {}).get(key) for role in ("prefill", "decode"))
        return prefill, decode

    keys = [(key, "kv_cache_config") for key in ("tokens_per_block", "dtype", "enable_block_reuse")]
    keys += [(key, "cache_transceiver_config") for key in BOTH]
    for key, table in keys:
        prefill, decode = values(key, table)
        if prefill != decode:
            yield Fault(
                f"{where}: {table}.{key}",
                f"wanted what prefill has, {prefill!r}, found {decode!r}; KV that one sends the other cannot read: "
                "render both from one spec",
            )


def _settings_faults(
    out: Path, facts: Facts, manifests: Mapping[str, Manifest], settings: Mapping[str, ConnectorSettings]
) -> Iterator[Fault]:
    widths = [role.built.tensor_parallel for role in facts.roles]
    for role, found in settings.items():
        where = f"{out / role / f'{role}_engine' / '1' / 'connector.yaml'}"
        uneven = [width for width in widths if found.stored_parallel % width]
        if uneven:
            yield Fault(
                f"{where}: stored_parallel",
                f"wanted a multiple of every tensor_parallel ({widths}), found {found.stored_parallel}; render it "
                "again",
            )
        if found.model_digest != manifests[role].model_digest:
            yield Fault(
                f"{where}: model_digest",
                f"wanted {manifests[role].model_digest[:12]} as the engine has it, found {found.model_digest[:12]}",
            )
    if len(settings) == 2:
        for key in ("namespace", "stored_parallel", "numerics", "kv"):
            prefill, decode = getattr(settings["prefill"], key), getattr(settings["decode"], key)
            if prefill != decode:
                yield Fault(
                    f"{out / 'decode/decode_engine/1/connector.yaml'}: {key}",
                    f"wanted what prefill has, {prefill!r}, found {decode!r}; the two would never meet in the pool: "
                    "render both from one spec, build both for one kind of GPU",
                )
