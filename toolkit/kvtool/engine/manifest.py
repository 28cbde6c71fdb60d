"""`engine.json`: what an engine directory holds, and who may serve it.

Written last, inside a directory that is renamed into place whole, so a directory with a manifest is a complete engine.
A manifest of another schema is refused by name: guessing at fields is how wrong layouts get served.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
    versions: dict[str, str] = Field(default_factory=dict)
    files: dict[str, int]
    """Name -> size in bytes of every file beside the manifest."""
    digests: dict[str, str]
    """Name -> BLAKE3 of the same files, hex; `kvtool engine verify` reads them again."""

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
    except (ValidationError, ValueError) as error:
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
