"""Digests of checkpoints that are referenced and not copied: cheap, and honest about what they cover.

`headers` covers config, tokenizer and index whole, and of each weight file its size, the safetensors header (names,
types, shapes, places) and four KiB in the middle of every tensor: another training run, a merged adapter or another
quantisation changes every matrix that it touches, so it shows there, and a 700 GB checkpoint takes seconds. An edit of
a few rows of one matrix may not show; `bytes` reads everything (about 5 GB a second and core where the disk allows).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from kvtool.engine.trtllm.source import weight_files
from kvtool.errors import CheckpointRefused

Covers = Literal["headers", "bytes"]
SAMPLE = 4096
HEADER_MAX = 256 << 20
SMALL = 64 << 20
"""Files up to this size that are no weights are digested whole."""


def digest(path: Path, covers: Covers = "headers") -> str:
    """BLAKE3 over config, tokenizer, index and weights of the checkpoint at `path`.

    Raises:
        CheckpointRefused: weights are missing or damaged.
    """
    whole = blake3(f"kvtool checkpoint 1 {covers}\0".encode())
    weights = weight_files(path)
    others = [p for p in path.iterdir() if p.is_file() and p not in weights and p.stat().st_size <= SMALL]
    kept = [p for p in others if p.suffix in (".json", ".jinja", ".model", ".tiktoken") and p.name != "engine.json"]
    for file in [*sorted(kept), *weights]:
        whole.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        if covers == "bytes" or file in kept:
            whole.update(blake3(max_threads=blake3.AUTO).update_mmap(file).digest())
        elif file.suffix == ".safetensors":
            _sample_tensors(file, whole)
        else:
            _sample_places(file, whole)
    return whole.hexdigest()


def kv_scales(path: Path, stage_ranks: int) -> str:
    """BLAKE3 over the scales of quantised KV in a TensorRT-LLM checkpoint: equal however its layers are split over the
    `stage_ranks` ranks of each pipeline stage.

    Quantised KV means nothing without them, and each calibration finds its own.

    Raises:
        CheckpointRefused: none there, or ranks that disagree about a layer.
    """
    found: dict[str, bytes] = {}
    for file in sorted(path.glob("rank*.safetensors")):
        stage = int(file.stem.removeprefix("rank")) // stage_ranks
        header, start = _header(file)
        with file.open("rb") as raw:
            for name, one in header.items():
                if name.endswith("kv_cache_scaling_factor"):
                    first, last = one["data_offsets"]
                    raw.seek(start + first)
                    value = raw.read(last - first)
                    if found.setdefault(f"{stage}:{name}", value) != value:
                        raise CheckpointRefused(f"{file}: {name}: another value than in the rank before; convert again")
    if not found:
        raise CheckpointRefused(f"{path}: quantised KV without scales (kv_cache_scaling_factor); convert it again")
    whole = blake3(b"kvtool kv scales 1\0")
    for name in sorted(found):
        whole.update(name.encode() + b"\0" + found[name])
    return whole.hexdigest()


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The table of a safetensors file, and where its data begins.

    Raises:
        CheckpointRefused: damaged.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if not 2 <= size <= HEADER_MAX:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        end = path.stat().st_size - 8 - size
        header.pop("__metadata__", None)
        if any(not 0 <= first <= last <= end for first, last in (one["data_offsets"] for one in header.values())):
            raise ValueError("a tensor that ends behind the file")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointRefused(f"{path}: wanted a safetensors file, found a damaged one ({error})") from None
    return header, 8 + size


def _sample_tensors(path: Path, into: blake3) -> None:
    header, start = _header(path)
    with path.open("rb") as file:
        into.update(file.read(start))
        for first, last in sorted(tuple(one["data_offsets"]) for one in header.values()):
            file.seek(start + max(first, (first + last - SAMPLE) // 2))
            into.update(file.read(min(SAMPLE, last - first)))


def _sample_places(path: Path, into: blake3) -> None:
    """A KiB or four at 256 places, evenly, and at both ends: of engines, which have no table of contents."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for place in range(257):
            file.seek(max(0, (size - SAMPLE) * place // 256))
            into.update(file.read(SAMPLE))
