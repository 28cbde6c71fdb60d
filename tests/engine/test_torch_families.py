"""Every family against transformers, on models with random weights.

The engine computes in float32 here, so what is left are K and V rounded to bfloat16 when they are stored, and decode's
bfloat16 attention: 2**-8 relative each. Over three layers that stays below 2 % of the logits' spread; a wrong rotation,
norm, bias or mask is tens of percent.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_samples import FAMILIES, VOCAB, write_checkpoint

from kvtool.engine.base import DecodeStep
from kvtool.engine.build import build
from kvtool.engine.manifest import read_manifest
from kvtool.engine.torch.engine import TorchEngine

COUNT = 150
TOKENS = [(at * 37 + at * at) % VOCAB for at in range(COUNT)]


def reference(directory: Path) -> tuple[np.ndarray, list[tuple[torch.Tensor, torch.Tensor]]]:
    """transformers' float32 logits [tokens, vocab] and (K, V) of each layer, [kv_heads, tokens, head_dim]."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    cache = DynamicCache()
    with torch.inference_mode():
        logits = model(torch.tensor([TOKENS]), past_key_values=cache).logits[0]
    return logits.numpy(), [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_kv_are_transformers(tmp_path: Path, family: str) -> None:
    directory = build(write_checkpoint(tmp_path / "m", family), tmp_path / "out").directory
    engine = TorchEngine(directory, read_manifest(directory), threads=2, blocks=8, dtype=torch.float32)
    wanted, cache = reference(directory)
    sequence = engine.open(COUNT)
    engine.prefill(sequence, TOKENS, 0, COUNT)
    for layer, (keys, values) in enumerate(cache):
        for ours, theirs in zip(engine.memory.read(layer, sequence, COUNT), (keys, values), strict=True):
            assert (ours.float() - theirs).abs().max() < 0.03 * theirs.abs().max(), f"layer {layer}"
    found = np.concatenate([engine.decode([DecodeStep(sequence, TOKENS[at], at)]) for at in range(COUNT)])
    error = np.abs(found - wanted).max(1) / wanted.std()
    assert error.max() < 0.1 and np.median(error) < 0.04
    agree = found.argmax(1) == wanted.argmax(1)
    clear = np.sort(wanted, 1)[:, -1] - np.sort(wanted, 1)[:, -2] > 0.1 * wanted.std()
    assert agree[clear].all(), "the favourite differs where it leads clearly"
    engine.close(sequence)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_odd_widths_are_shape_stable_too(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """In both widths that prefill may run in, whatever the CPU. The intermediate size is no multiple of a vector."""
    directory = build(write_checkpoint(tmp_path / "m", family), tmp_path / "out").directory
    engine = TorchEngine(directory, read_manifest(directory), threads=2, blocks=12, dtype=dtype)
    whole, parts = engine.open(COUNT), engine.open(COUNT)
    engine.prefill(whole, TOKENS, 0, COUNT)
    for start in range(0, COUNT, 11):
        engine.prefill(parts, TOKENS, start, min(start + 11, COUNT))
    for layer in range(engine.layout.layers):
        assert torch.equal(engine.memory.read(layer, whole, COUNT), engine.memory.read(layer, parts, COUNT))
    alone = engine.decode([DecodeStep(whole, 5, COUNT - 1)])
    pair = engine.decode([DecodeStep(parts, 5, COUNT - 1), DecodeStep(whole, 5, COUNT - 1)])
    assert np.array_equal(alone[0], pair[0]) and np.array_equal(alone[0], pair[1])
