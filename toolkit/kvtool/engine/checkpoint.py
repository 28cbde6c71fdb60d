"""A checkpoint as the builders see it: a Hugging Face config, named tensors on demand, tokenizer files.

Two forms are read: a Hugging Face directory (config.json, safetensors whole or sharded, tokenizer.json) and a GGUF
file. What follows never asks which it was. Tensors come one at a time, so building takes little more memory than the
largest of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from kvtool.engine.family import Family, read_family
from kvtool.engine.gguf import Codes
from kvtool.errors import CheckpointRefused

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Checkpoint:
    """`tensors`: Hugging Face name -> loader, float of any width. `codes`: the linear weights that the file holds as
    4-bit codes. `files`: tokenizer files, ready to be written beside the weights. `config`: Hugging Face form."""

    source: Path
    config: dict[str, Any]
    family: Family
    tensors: Mapping[str, Callable[[], torch.Tensor]]
    files: Mapping[str, bytes]
    eos_token_ids: list[int]
    bos_token_id: int | None
    inputs: list[Path]
    """Every file that decides the result, for the source digest."""
    codes: Mapping[str, Callable[[], Codes]] = field(default_factory=dict)

    def digest(self, *settings: str) -> str:
        """Over the bytes of all inputs and the settings of the build; about 1 s for each 5 GB."""
        whole = blake3(b"kvtool source 1\0")
        for text in settings:
            whole.update(len(text).to_bytes(8, "little") + text.encode())
        for path in self.inputs:
            whole.update(path.name.encode() + b"\0" + file_digest(path))
        return whole.hexdigest()


def file_digest(path: Path) -> bytes:
    """BLAKE3 over the file's bytes, on all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).digest()


def open_checkpoint(source: Path) -> Checkpoint:
    """Read the headers of the checkpoint at `source`.

    Raises:
        CheckpointRefused: neither form, damaged, or a model that the engines do not compute.
    """
    if source.is_dir():
        return _open_huggingface(source)
    if source.is_file():
        from kvtool.engine.gguf_model import open_gguf

        return open_gguf(source)
    raise CheckpointRefused(
        f"{source}: wanted a Hugging Face directory, a GGUF file or the name of a recipe, found nothing there"
    )


def check_tensors(family: Family, found: Mapping[str, tuple[int, ...]], where: Path) -> None:
    """Compare the tensors that a checkpoint has with what its config says.

    Raises:
        CheckpointRefused: one is missing or has another shape, or one is there that nothing would read.
    """
    wanted = family.tensors()
    for name, shape in wanted.items():
        if name not in found:
            raise CheckpointRefused(f"{where}: tensor {name} is missing; the checkpoint is incomplete")
        if tuple(found[name]) != shape:
            raise CheckpointRefused(f"{where}: tensor {name}: wanted shape {list(shape)}, found {list(found[name])}")
    unread = [n for n in found if n not in wanted and not n.endswith("rotary_emb.inv_freq")]
    if family.tied:
        unread = [n for n in unread if n != "lm_head.weight"]
    if unread:
        raise CheckpointRefused(
            f"{where}: tensor {unread[0]} ({len(unread)} such) has no part in {family.architecture} as config.json "
            "describes it; serving without it would give other answers than the model's"
        )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The table in `path`.

    Raises:
        CheckpointRefused: missing, not JSON, or not a table.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointRefused(f"{path}: wanted {what}, the file is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"{path}: wanted {what}, found something else ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointRefused(f"{path}: wanted {what}, found a {type(raw).__name__}")
    return raw


def _open_huggingface(source: Path) -> Checkpoint:
    config = read_json(source / "config.json", "a model's config")
    family = read_family(config, str(source / "config.json"))
    shards = _shards(source)
    found: dict[str, tuple[int, ...]] = {}
    loaders: dict[str, Callable[[], torch.Tensor]] = {}
    for path in shards:
        for name, shape in _shapes(path):
            found[name], loaders[name] = shape, _loader(path, name)
    check_tensors(family, found, source)
    files = {name: (source / name).read_bytes() for name in TOKENIZER_FILES if (source / name).is_file()}
    if "tokenizer.json" not in files:
        raise CheckpointRefused(f"{source}: tokenizer.json is missing; save the model's fast tokenizer there")
    inputs = [source / "config.json", *(source / name for name in files), *shards]
    generation = source / "generation_config.json"
    if generation.is_file():
        inputs.append(generation)
    eos, bos = _special_ids(config, read_json(generation, "generation settings") if generation.is_file() else {})
    return Checkpoint(source, config, family, loaders, files, eos, bos, inputs)


def _shards(source: Path) -> list[Path]:
    single, index = source / "model.safetensors", source / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointRefused(
            f"{source}: wanted model.safetensors or model.safetensors.index.json, found neither; "
            "save the model with safe_serialization=True"
        )
    names = read_json(index, "an index of shards").get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointRefused(f"{index}: wanted a weight_map from tensor to file, found {type(names).__name__}")
    shards = [source / name for name in sorted(set(names.values()))]
    for path in shards:
        if path.parent != source or not path.is_file():
            raise CheckpointRefused(f"{index}: names the shard {path.name!r}, which is not in {source}")
    return shards


def _shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                part = file.get_slice(name)
                if part.get_dtype() not in ("F32", "F16", "BF16"):
                    raise CheckpointRefused(
                        f"{path}: tensor {name} is {part.get_dtype()}; this kvtool reads F32, F16 and BF16"
                    )
                yield name, tuple(part.get_shape())
    except (SafetensorError, OSError) as error:
        raise CheckpointRefused(f"{path}: wanted a safetensors file, found a damaged one ({error})") from None


def _loader(path: Path, name: str) -> Callable[[], torch.Tensor]:
    def load() -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    return load


def _special_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[list[int], int | None]:
    """EOS ids and the BOS id; generation_config.json knows better than config.json where both speak."""
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    bos = config.get("bos_token_id")
    if not all(isinstance(i, int) for i in ids) or not isinstance(bos, (int, type(None))):
        raise CheckpointRefused(f"eos_token_id, bos_token_id: wanted token ids, found {eos!r} and {bos!r}")
    return ids, bos
