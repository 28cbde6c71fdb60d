"""Functions of the record that read a directory: what kind of model lies there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def get_model_format(model_dir: str, trust_remote_code: bool = False) -> str:
    """TLLM_ENGINE, TLLM_CKPT or HF, by the keys of config.json."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"Failed to infer model format because no config.json exists in {model_dir}")
    keys = json.loads(path.read_text(encoding="utf-8"))
    if "pretrained_config" in keys and "build_config" in keys:
        return "TLLM_ENGINE"
    return "TLLM_CKPT" if "architecture" in keys and "dtype" in keys else "HF"


def get_engine_version(engine_dir: str) -> str | None:
    held = json.loads((Path(engine_dir) / "config.json").read_text(encoding="utf-8"))
    return str(held["version"]) if "version" in held else None


class EngineConfig:
    def __init__(self, pretrained_config: Any, build_config: Any, version: str) -> None:
        self.pretrained_config, self.build_config, self.version = pretrained_config, build_config, version


class Engine:
    def __init__(self, config: EngineConfig, engine: Any, managed_weights: Any = None) -> None:
        self.config, self.engine, self.managed_weights = config, engine, managed_weights
