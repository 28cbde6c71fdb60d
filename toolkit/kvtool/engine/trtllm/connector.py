"""What the KV-offload connector is told: the file that `kvtool build` writes and `plugins/kvtool_trtllm` reads.

TensorRT-LLM's own configuration of a connector is three names, so the rest comes by a file that the environment
variable KVTOOL_CONNECTOR names. Every rank of an engine reads the same file. What differs between two starts (the
pool's state file, the control address) may come by the environment instead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtool.engine.manifest import LayoutFields
from kvtool.errors import EngineRefused
from kvtool.kv.block import KeySeed

SETTINGS_ENV = "KVTOOL_CONNECTOR"
POOL_ENV = "KVTOOL_POOL"
CONTROL_ENV = "KVTOOL_CONNECTOR_CONTROL"
MODULE = "kvtool_trtllm.connector"
SCHEDULER_CLASS = "KvtoolConnectorScheduler"
WORKER_CLASS = "KvtoolConnectorWorker"


class ConnectorSettings(BaseModel):
    """One engine's connector. Sizes in bytes and times in seconds: the file is written by kvtool."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, protected_namespaces=(), use_attribute_docstrings=True
    )

    version: int = 1
    """Of this file."""
    pool_state: str | None = None
    """State file of the pool; KVTOOL_POOL goes before it. None: no pool, nothing is matched or saved."""
    pool_path: Literal["auto", "shm", "ucx", "socket"] = "auto"
    """How blocks travel between pool and workers; auto takes the fastest that works."""
    namespace: str = "default"
    """Blocks of different namespaces do not meet."""
    model_digest: str
    """Over the weights; blocks of different models do not meet."""
    numerics: str = ""
    """What rounds differently has another one: adapter, GPU architecture and quantisation."""
    kv: LayoutFields
    """Of the whole model, all heads of all ranks: kv_heads 1 and kv_factor 1 for MLA."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks of the engine."""
    stored_parallel: int = Field(default=1, ge=1)
    """The width under which blocks lie in the pool: a multiple of the tensor_parallel of every engine that shares
    them, so that each rank's block is a whole number of stored ones."""
    load: Literal["async", "layerwise"] = "async"
    """async: requests wait beside the batch until their blocks are there. layerwise: they join at once and each layer
    waits for its part; eager forward passes only."""
    save: Literal["all", "prompt", "none"] = "all"
    """Which blocks go to the pool: all, those of prompts, or none."""
    claim_budget_s: float = Field(default=0.25, gt=0)
    """Longest that admission waits for blocks; what is not staged by then is computed."""
    lora: dict[str, str] = Field(default_factory=dict)
    """Adapter id -> digest of its weights. Ids are each server's own, so requests with an adapter that is not listed
    are neither matched nor saved."""
    save_budget_s: float = Field(default=2.0, gt=0)
    """Longest that one write to the pool may take; what does not get in by then is dropped and counted."""
    staging_bytes: int = Field(default=1 << 30, ge=1)
    """Pinned host memory of each rank, for blocks on their way in and out."""
    control: str | None = None
    """Where the scheduler listens for its workers: a Unix socket's path, or tcp://HOST:PORT with `key_file`.
    KVTOOL_CONNECTOR_CONTROL goes before it. None: a socket in a directory of the process's own, one rank only."""
    key_file: str | None = None
    """Mode 0600; workers and scheduler prove to each other that they know it. A Unix socket needs none."""

    @model_validator(mode="after")
    def _fits(self) -> ConnectorSettings:
        if self.stored_parallel % self.tensor_parallel:
            raise ValueError(
                f"stored_parallel {self.stored_parallel} is not a multiple of tensor_parallel {self.tensor_parallel}; "
                "set the least common multiple of the widths that share the pool"
            )
        return self

    def seed(self) -> KeySeed:
        """Where the chain of keys starts for a request without salt, adapter or images. Over the whole model's layout:
        how blocks are cut into stored shards comes in with each shard's key."""
        return KeySeed(
            namespace=self.namespace,
            model=self.model_digest,
            layout=self.kv.layout().fingerprint,
            numerics=self.numerics,
        )


def read_settings(path: Path | None = None) -> ConnectorSettings:
    """From `path`, or the file that KVTOOL_CONNECTOR names; the environment replaces pool_state and control.

    Raises:
        EngineRefused: no such file, or one that says something else.
    """
    named = os.environ.get(SETTINGS_ENV, "")
    if path is None and not named:
        raise EngineRefused(f"the connector needs {SETTINGS_ENV}=FILE in its environment: connector.yaml of the bundle")
    path = path or Path(named)
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        settings = ConnectorSettings.model_validate(raw)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, ValidationError) as error:
        raise EngineRefused(f"{path}: no connector settings: {error}; build the engine again") from None
    given = {"pool_state": os.environ.get(POOL_ENV), "control": os.environ.get(CONTROL_ENV)}
    return settings.model_copy(update={key: value for key, value in given.items() if value})
