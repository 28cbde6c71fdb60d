"""The torch target of `kvtool build`: bf16 weights, and the checkpoint's own 4-bit codes for decode.

`model.safetensors` has Hugging Face names in bfloat16, so that transformers loads the directory too (it is the oracle
of the tests). `int4.safetensors` has, for each linear weight W that the checkpoint holds as 4-bit codes,

    W.codes   uint8   [out, in / 2]    columns 2j and 2j + 1 in the low and high half of byte j
    W.scale   float16 [out, in / 32]   value = code * scale + offset
    W.offset  float16 [out, in / 32]

in row order, packed for no machine: what the CPU at hand wants is made when the engine is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from kvtool.engine.build import Built, Progress
from kvtool.engine.checkpoint import Checkpoint
from kvtool.engine.gguf import GROUP
from kvtool.engine.weights_file import SafetensorsWriter, TensorPlan
from kvtool.errors import CheckpointRefused

WEIGHTS, CODES = "model.safetensors", "int4.safetensors"


class TorchBuilder:
    target = "torch"

    def check(self, checkpoint: Checkpoint, block_tokens: int) -> None:
        if not 1 <= block_tokens <= 512:
            raise CheckpointRefused(f"--block-tokens: wanted 1 to 512, found {block_tokens}")

    def write(self, checkpoint: Checkpoint, directory: Path, progress: Progress) -> Built:
        for name, raw in checkpoint.files.items():
            (directory / name).write_bytes(raw)
        config = {**checkpoint.config, "dtype": "bfloat16"}
        config.pop("torch_dtype", None)
        _write_json(directory / "config.json", config)
        ids = {"eos_token_id": checkpoint.eos_token_ids, "bos_token_id": checkpoint.bos_token_id}
        _write_json(directory / "generation_config.json", {k: v for k, v in ids.items() if v not in (None, [])})
        _write_weights(checkpoint, directory / WEIGHTS, progress)
        linears = [name for name in checkpoint.family.tensors() if "_proj.weight" in name]
        if not all(name in checkpoint.codes for name in linears):
            return Built([WEIGHTS], "bfloat16")
        _write_codes(checkpoint, linears, directory / CODES, progress)
        return Built([WEIGHTS, CODES], "int4_g32")


def _write_json(path: Path, table: dict[str, object]) -> None:
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_weights(checkpoint: Checkpoint, path: Path, progress: Progress) -> None:
    plans = [TensorPlan(name, torch.bfloat16, shape) for name, shape in checkpoint.family.tensors().items()]
    done, total = 0, sum(plan.size for plan in plans)
    with SafetensorsWriter(path, plans) as writer:
        for plan in writer.plans:
            tensor = checkpoint.tensors[plan.name]()
            if not bool(torch.isfinite(tensor).all()):
                raise CheckpointRefused(f"{checkpoint.source}: tensor {plan.name} holds values that are not finite")
            writer.write(tensor.to(torch.bfloat16))
            done += plan.size
            progress("writing bfloat16 weights", done, total)


def _write_codes(checkpoint: Checkpoint, linears: list[str], path: Path, progress: Progress) -> None:
    plans = []
    for name in linears:
        rows, columns = checkpoint.family.tensors()[name]
        plans += [
            TensorPlan(f"{name}.scale", torch.float16, (rows, columns // GROUP)),
            TensorPlan(f"{name}.offset", torch.float16, (rows, columns // GROUP)),
            TensorPlan(f"{name}.codes", torch.uint8, (rows, columns // 2)),
        ]
    done, total = 0, sum(plan.size for plan in plans)
    with SafetensorsWriter(path, plans) as writer:
        for plan in writer.plans:
            name, _, part = plan.name.rpartition(".")
            codes = checkpoint.codes[name]()
            if part == "codes":
                raw = np.ascontiguousarray(codes.codes)
                writer.write(torch.from_numpy(raw[:, 0::2] | (raw[:, 1::2] << 4)))
            else:
                writer.write(torch.from_numpy(codes.scale if part == "scale" else codes.offset).to(torch.float16))
            done += plan.size
            progress("writing 4-bit codes", done, total)
