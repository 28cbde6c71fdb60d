"""Write a package `tensorrt_llm` that keeps the recorded contract of one version, for tests on hosts without a GPU.

    python -m tests.contract.generate --version 1.2.1 DIRECTORY

`DIRECTORY` on PYTHONPATH then answers `import tensorrt_llm` and `importlib.metadata.version("tensorrt_llm")`. Classes,
fields, defaults and module paths come from api.json, not from kvtool's adapters: what one reads into the record, the
other may not. Behind them runs `runtime/`: a model whose every answer depends on every KV byte that it reads, and an
executor that calls a KV cache connector in the recorded order.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
API = HERE.parents[1] / "toolkit/kvtool/engine/trtllm/api.json"
VERSIONS = ("1.1.0", "1.2.1", "1.3.0rc27", "1.4.0rc1")
_OLD, _NEW = "_torch/pyexecutor", "_torch/pyexecutor/connectors"
_CONNECTOR = "KvCacheConnectorScheduler KvCacheConnectorWorker RequestData SchedulerOutput"
_ARGS = "BaseLlmArgs TorchLlmArgs KvCacheConfig CacheTransceiverConfig KvCacheConnectorConfig SchedulerConfig LlmArgs"
_ENGINE = {  # until 1.2.x
    "builder": "BuildConfig EngineConfig Engine get_engine_version",
    "plugin/__init__": "PluginConfig",
    "plugin/plugin": "PluginConfig",
    "llmapi/build_cache": "BuildCacheConfig",
}
_MODULES = {  # module -> names, all of them from _fake
    "version": "__version__",
    "_utils": "mpi_rank mpi_world_size local_mpi_rank mpi_comm mpi_barrier mpi_broadcast mpi_allgather",
    "mapping": "Mapping",
    "logger": "logger",
    "sampling_params": "SamplingParams GuidedDecodingParams",
    "scheduling_params": "SchedulingParams",
    "disaggregated_params": "DisaggregatedParams",
    "llmapi/llm": "LLM RequestOutput",
    "llmapi/llm_args": _ARGS + " get_model_format",
    "llmapi/__init__": _ARGS + " LLM SamplingParams GuidedDecodingParams DisaggregatedParams KvCacheRetentionConfig"
    " CudaGraphConfig RequestOutput CompletionOutput",
    "executor/__init__": "GenerationResult LoRARequest",
    "executor/request": "LoRARequest",
    "executor/result": "GenerationResult CompletionOutput",
    "bindings/__init__": "LlmRequestState",
    "bindings/executor": "KvCacheRetentionConfig FinishReason",
    "bindings/internal/batch_manager": "LlmRequest",
    "_torch/pyexecutor/llm_request": "LlmRequest LlmRequestState",
    "__init__": "__version__ LLM SamplingParams DisaggregatedParams logger",
}


def ordered(version: str) -> tuple[int, ...]:
    """1.3.0rc27 -> (1, 3, 0, 27), 1.3.0 -> (1, 3, 0, 10000): pre-releases come before the release."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:(?:rc|a|b)(\d*))?", version)
    if numbers is None:
        raise ValueError(f"{version!r} is no version of TensorRT-LLM, such as {', '.join(VERSIONS)}")
    major, minor, patch, candidate = numbers.groups()
    return int(major), int(minor), int(patch or 0), 10_000 if candidate is None else int(candidate or 0)


def _since(text: str | None) -> tuple[int, ...]:
    """When a field came. "newer" and "after 1.2" are taken for 1.3; all pre-releases of a version have its fields."""
    if not text:
        return (0,)
    found = re.search(r"\d+\.\d+(?:\.\d+)?(?:rc\d*)?", text)
    if found is None or text.startswith("after 1.2"):
        return (1, 3, 0, 0)
    first = found.group()
    return ordered(first) if "rc" in first else (*ordered(first)[:3], 0)


def there(entry: dict[str, Any], version: str) -> bool:
    now = ordered(version)
    gone = entry.get("removed")
    return _since(entry.get("since")) <= now and not (gone and _since(gone) <= now)


def reduced(record: dict[str, Any], version: str) -> dict[str, Any]:
    """`record` of one class, with the fields and methods of `version` only."""
    out = dict(record)
    for kind in ("fields", "methods"):
        held = record.get(kind)
        if not isinstance(held, list) or not all(isinstance(entry, dict) for entry in held):
            continue
        entries = {entry["name"]: entry for entry in held if there(entry, version)}
        if kind == "fields":
            for entry in (*record.get("added_later", ()), *record.get("changed_later", ())):
                if there(entry, version):
                    entries[entry["name"]] = {**entries.get(entry["name"], {"default": None}), **entry}
        out[kind] = list(entries.values())
    if record.get("kind") == "abstract_class":
        out["added"] = [entry for entry in record.get("added_later", ()) if there(entry, version)]
    return out


def write(directory: Path, version: str) -> Path:
    """The package of `version` in `directory`, which may hold others; returns `directory`."""
    api = json.loads(API.read_text(encoding="utf-8"))
    root = directory / "tensorrt_llm"
    for old in (root, *directory.glob("tensorrt_llm-*.dist-info")):
        shutil.rmtree(old, ignore_errors=True)
    shutil.copytree(HERE / "runtime", root / "_fake", ignore=shutil.ignore_patterns("__pycache__"))
    own = {name: reduced(record, version) for name, record in api.items() if isinstance(record, dict)}
    (root / "_fake/api.json").write_text(json.dumps({**own, "version": version}, indent=1), encoding="utf-8")
    new = ordered(version) >= (1, 3, 0, 0)
    modules = {**_MODULES, f"{_NEW if new else _OLD}/kv_cache_connector": _CONNECTOR + " KvCacheConnectorManager"}
    if new:
        layout = "KvCacheLayout KvCacheLayerGroupLayout KvCacheRegion KvCacheBufferRef valid_page_slots"
        modules[f"{_NEW}/kv_cache_layout"] = layout
    if requires(api, version).get("tensorrt"):
        modules.update(_ENGINE)
        modules["llmapi/llm_args"] += " TrtLlmArgs"
        for name, more in {"__init__": " BuildConfig", "llmapi/__init__": " BuildConfig BuildCacheConfig"}.items():
            modules[name] += more
    for module, names in modules.items():
        _module(root, module, names.split())
    _metadata(directory, version, requires(api, version))
    return directory


def requires(api: dict[str, Any], version: str) -> dict[str, str | None]:
    """Of the nearest recorded version that is not newer, else of the oldest."""
    recorded = sorted(api["_meta"]["requires"].items(), key=lambda item: ordered(item[0]))
    older = [needs for name, needs in recorded if ordered(name) <= ordered(version)]
    needs = (older or [recorded[0][1]])[-1]
    return {name: spec for name, spec in needs.items() if name not in ("released", "python")}


def _module(root: Path, module: str, names: list[str]) -> None:
    path = root / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    for parent in path.relative_to(root).parents:
        (root / parent / "__init__.py").touch()
    lines = f"from tensorrt_llm._fake import {', '.join(names)}\n\n__all__ = {sorted(names)!r}\n"
    path.write_text(lines, encoding="utf-8")


def _metadata(directory: Path, version: str, needs: dict[str, str | None]) -> None:
    info = directory / f"tensorrt_llm-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: tensorrt_llm", f"Version: {version}"]
    lines += [f"Requires-Dist: {name}{spec}" for name, spec in needs.items() if spec]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (info / "top_level.txt").write_text("tensorrt_llm\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="write a fake tensorrt_llm that keeps the recorded contract")
    parser.add_argument("--version", default="1.2.1", choices=VERSIONS)
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    print(write(given.directory, given.version))


if __name__ == "__main__":
    main()
