"""`engine.json`: what an engine directory holds, and who may serve it.

Written last, inside a directory that is renamed into place whole, so a directory with a manifest is a complete engine.
A manifest of another schema is refused by name: guessing at fields is how wrong layouts get served.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtool.errors import EngineRefused
from kvtool.kv.layout import KVLayout

SCHEMA = 1
FILE = "engine.json"


class LayoutFields(BaseModel):
    model_config = ConfigDict(extra="forbid")

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    order: str = "L2HTD"
    kv_factor: int = 2

    def layout(self) -> KVLayout:
        return KVLayout(**self.model_dump())


class CheckpointReference(BaseModel):
    """The weights that a bundle points at, or that an engine was made of. They stay where they are."""

    model_config = ConfigDict(extra="forbid")

    path: str
    kind: str
    """`huggingface`, `trtllm` (a TensorRT-LLM checkpoint) or `engine`."""
    digest: str
    """BLAKE3 over what `covers` says."""
    covers: str
    """`headers`: small files whole; of each weight file its size, its tensors' names, types, shapes and places, and a
    sample of its bytes. `bytes`: every byte of every file."""


class TensorRTLLMFields(BaseModel):
    """What an engine or bundle for TensorRT-LLM is bound to. `kv_dtype` is TensorRT-LLM's word (auto, fp8, int8); the
    layout beside it has the bytes'."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    adapter: str
    """`engine-1.2`, `pytorch-1.2` or `pytorch-1.3`."""
    version: str
    tensorrt_version: str | None = None
    """Of the TensorRT that wrote the engine; a C++ runtime of another version does not load it. None for a bundle."""
    gpu_arch: str | None = None
    """Such as sm_90. An engine loads on no other; of a bundle, the KV in the pool is of this kind of GPU."""
    tensor_parallel: int = Field(default=1, ge=1)
    pipeline_parallel: int = Field(default=1, ge=1)
    context_parallel: int = Field(default=1, ge=1)
    moe_tensor_parallel: int | None = Field(default=None, ge=1)
    moe_expert_parallel: int | None = Field(default=None, ge=1)
    kv_dtype: str = "auto"
    quantisation: str | None = None
    """As in config.json of the checkpoint or as asked for, such as FP8; None: the model's own dtype."""
    checkpoint: CheckpointReference
    max_batch_size: int = Field(ge=1)
    max_num_tokens: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    max_beam_width: int = Field(default=1, ge=1)
    block_reuse: bool = True

    @property
    def world_size(self) -> int:
        """Ranks, and so GPUs, of one instance."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel


class Manifest(BaseModel):
    """One engine. `model_digest` is over weights and config, so equal digests mean equal answers."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    schema_version: int = SCHEMA
    name: str
    target: str
    """`torch` or `tensorrt_llm`."""
    architecture: str
    """As in config.json, such as LlamaForCausalLM."""
    dtype: str
    decode_weights: str
    """`int4_g32` (the GGUF's own codes) or `bfloat16`."""
    kv: LayoutFields
    kv_fingerprint: str
    model_digest: str
    source_digest: str
    """Over the inputs of the build; a second build of the same inputs is recognised by it."""
    vocab_size: int
    context_tokens_max: int
    eos_token_ids: list[int]
    bos_token_id: int | None = None
    chat_template: bool = False
    plugins: list[str] = Field(default_factory=list)
    tensorrt_llm: TensorRTLLMFields | None = None
    """There if and only if the target is tensorrt_llm."""
    versions: dict[str, str] = Field(default_factory=dict)
    files: dict[str, int]
    """Name -> size in bytes of every file beside the manifest."""
    digests: dict[str, str]
    """Name -> BLAKE3 of the same files, hex; `kvtool engine verify` reads them again."""

    @model_validator(mode="after")
    def _section_fits(self) -> Manifest:
        if (self.target == "tensorrt_llm") != (self.tensorrt_llm is not None):
            has = "no tensorrt_llm section" if self.tensorrt_llm is None else "a tensorrt_llm section"
            raise ValueError(f"target {self.target} with {has}")
        return self

    @property
    def layout(self) -> KVLayout:
        return self.kv.layout()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the engine in `directory`.

    Raises:
        EngineRefused: no engine there, another schema, a file missing or cut short, or fields that do not fit.
    """
    path = directory / FILE
    if not path.is_file():
        raise EngineRefused(f"{directory}: no engine here ({FILE} is missing); build one with: kvtool build")
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise EngineRefused(f"{path}: not JSON ({error}); build the engine again") from None
    found = raw.get("schema_version") if isinstance(raw, dict) else None
    if found != SCHEMA:
        raise EngineRefused(
            f"{path}: engine schema {found!r}, this kvtool reads schema {SCHEMA}; build it again with: kvtool build"
        )
    try:
        manifest = Manifest.model_validate(raw)
        layout = manifest.layout
    except ValidationError as error:
        raise EngineRefused(f"{path}: {_first(error)}; build the engine again") from None
    except ValueError as error:
        raise EngineRefused(f"{path}: {error}; build the engine again") from None
    if layout.fingerprint != manifest.kv_fingerprint:
        raise EngineRefused(
            f"{path}: kv_fingerprint {manifest.kv_fingerprint} does not belong to the layout ({layout}); build it again"
        )
    for name, size in manifest.files.items():
        there = directory / name
        if not there.is_file() or there.stat().st_size != size:
            held = f"{there.stat().st_size} bytes" if there.is_file() else "missing"
            raise EngineRefused(f"{there}: wanted {size} bytes, found {held}; build the engine again")
    return manifest


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return f"{key}: {first['msg']}" if key else first["msg"].removeprefix("Value error, ")
