"""Small models and files made on the spot: a checkpoint of each family, random weights, GGUF files of any content."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 160
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "tie_word_embeddings": False},
    "LlamaForCausalLM-scaled": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": False},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "tie_word_embeddings": True},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
}


def small_config(family: str, **changes: Any) -> dict[str, Any]:
    """config.json of a model with 3 layers; the intermediate size is no multiple of a vector on purpose."""
    return {
        "architectures": [family.partition("-")[0]],
        "hidden_size": 64,
        "intermediate_size": 104,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": 1,
        "bos_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **FAMILIES[family],
        **changes,
    }


def write_checkpoint(folder: Path, family: str, shards: int = 1, **changes: Any) -> Path:
    """A Hugging Face directory with random float32 weights, large enough that every part of the model matters."""
    import torch
    from safetensors.torch import save_file

    from kvtool.engine.family import read_family

    folder.mkdir(parents=True, exist_ok=True)
    config = small_config(family, **changes)
    random = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in read_family(config, "sample").tensors().items():
        noise = torch.randn(shape, generator=random)
        is_norm = "norm" in name
        tensors[name] = 1 + 0.2 * noise if is_norm else noise * (0.5 if "bias" in name else shape[-1] ** -0.5)
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        index = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard::shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(small_tokenizer()))
    return folder


def small_tokenizer() -> dict[str, Any]:
    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": c, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for c, i in (("<s>", 0), ("</s>", 1))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "</s>"},
    }  # fmt: skip


def gguf_bytes(
    metadata: dict[str, Any], tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3
) -> bytes:
    """A GGUF file. tensors: name -> (type number, shape with rows first, bytes)."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    data = bytearray()
    for name, (kind, shape, raw) in tensors.items():
        dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += _text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    out += bytes(-len(out) % 32)
    return bytes(out + data)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(item) for item in value)
    return struct.pack("<IIQ", 9, 5, len(value)) + np.asarray(value, "<i4").tobytes()


def quantise_q4(values: np.ndarray, with_offset: bool) -> bytes:
    """Q4_1 (or Q4_0) blocks of `values` [rows, columns], by ggml's rule."""
    groups = values.reshape(-1, 32).astype(np.float32)
    if with_offset:
        low = groups.min(1, keepdims=True)
        scale = ((groups.max(1, keepdims=True) - low) / 15).astype("<f2")
        codes = (groups - low) / np.maximum(scale.astype(np.float32), 1e-8)
        head = np.concatenate([scale, low.astype("<f2")], 1)
    else:
        scale = (np.abs(groups).max(1, keepdims=True) / 8).astype("<f2")
        codes = groups / np.maximum(scale.astype(np.float32), 1e-8) + 8
        head = scale
    codes = np.clip(np.round(codes), 0, 15).astype("u1")
    packed = codes[:, :16] | (codes[:, 16:] << 4)
    return b"".join(h.tobytes() + p.tobytes() for h, p in zip(head, packed, strict=True))


def small_gguf(folder: Path, **metadata: Any) -> Path:
    """A whole Llama model as a GGUF file: Q4_1 linears, F32 norms and embedding, a byte-level tokenizer."""
    random = np.random.default_rng(3)
    hidden, inner, vocab, layers = 64, 128, 260, 2
    symbols = [chr(c) for c in _byte_symbols()]
    fields: dict[str, Any] = {
        "general.architecture": "llama", "llama.block_count": layers, "llama.context_length": 256,
        "llama.embedding_length": hidden, "llama.feed_forward_length": inner, "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2, "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<s>", "</s>", *symbols, "th", "the"],
        "tokenizer.ggml.token_type": [3, 3] + [1] * 258, "tokenizer.ggml.merges": ["t h", "th e"],
        "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1,
    } | metadata  # fmt: skip
    tensors: dict[str, tuple[int, tuple[int, ...], bytes]] = {}

    def plain(name: str, *shape: int) -> None:
        values = 1 + 0.1 * random.standard_normal(shape) if len(shape) == 1 else random.standard_normal(shape)
        tensors[name] = (0, shape, values.astype("<f4").tobytes())

    def linear(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns)) * columns**-0.5
        tensors[name] = (3, (rows, columns), quantise_q4(values, with_offset=True))

    plain("token_embd.weight", vocab, hidden)
    plain("output_norm.weight", hidden)
    for layer in range(layers):
        at = f"blk.{layer}."
        plain(at + "attn_norm.weight", hidden)
        plain(at + "ffn_norm.weight", hidden)
        for name, rows, columns in (
            ("attn_q", hidden, hidden), ("attn_k", hidden // 2, hidden), ("attn_v", hidden // 2, hidden),
            ("attn_output", hidden, hidden), ("ffn_gate", inner, hidden), ("ffn_up", inner, hidden),
            ("ffn_down", hidden, inner),
        ):  # fmt: skip
            linear(f"{at}{name}.weight", rows, columns)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.gguf"
    path.write_bytes(gguf_bytes(fields, tensors))
    return path


def _byte_symbols() -> list[int]:
    """GPT-2's printable stand-in for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return kept + [256 + i for i in range(256 - len(kept))]
