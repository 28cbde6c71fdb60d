"""A bundle: what `kvtool build` makes for TensorRT-LLM's PyTorch backend, which builds nothing itself.

    engine.json            the manifest, with the tensorrt_llm section
    llm.yaml               arguments of tensorrt_llm.LLM that hold in every role; the checkpoint by its path
    connector.yaml         what the KV-offload connector is told
    config.json, tokenizer.json, ...    copies from the checkpoint, so that the front needs no weights

Weights stay where they are: a 70B checkpoint is not copied to say how it is served.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvtool.engine.manifest import Manifest, TensorRTLLMFields, read_manifest
from kvtool.engine.trtllm.connector import ConnectorSettings, read_settings
from kvtool.errors import EngineRefused

LLM_FILE = "llm.yaml"
CONNECTOR_FILE = "connector.yaml"


@dataclass(frozen=True)
class Bundle:
    directory: Path
    manifest: Manifest
    llm: dict[str, Any]
    connector: ConnectorSettings

    @property
    def fields(self) -> TensorRTLLMFields:
        assert self.manifest.tensorrt_llm is not None
        return self.manifest.tensorrt_llm


def read_bundle(directory: Path) -> Bundle:
    """The bundle in `directory`.

    Raises:
        EngineRefused: no engine there, one of another kind, or a file that says something else.
    """
    manifest = read_manifest(directory)
    fields = manifest.tensorrt_llm
    if fields is None or fields.adapter == "engine-1.2":
        kind = f"an engine for {manifest.target}" if fields is None else "a TensorRT engine"
        raise EngineRefused(
            f"{directory}: wanted a bundle for TensorRT-LLM's PyTorch backend, found {kind}; build one with: "
            "kvtool build --target tensorrt_llm"
        )
    path = directory / LLM_FILE
    try:
        llm: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise EngineRefused(f"{path}: no LLM arguments: {error}; build the engine again") from None
    if not isinstance(llm, dict):
        raise EngineRefused(f"{path}: wanted LLM arguments, found {type(llm).__name__}; build the engine again")
    return Bundle(directory, manifest, llm, read_settings(directory / CONNECTOR_FILE))
