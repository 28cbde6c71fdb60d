"""Step `build`: a bundle of the model at hand, made as `kvtool build` makes it, for TensorRT-LLM's own classes."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from kvtool.engine.trtllm.build import build
from kvtool.engine.trtllm.bundle import Bundle, read_bundle
from kvtool.engine.trtllm.gpus import GPUS
from kvtool.engine.trtllm.llm_args import llm_args
from kvtool.engine.trtllm.request import Asked, prepare
from kvtool.engine.trtllm.source import read_source
from kvtool.engine.trtllm.version import installed
from kvtool_trtllm.gpucheck.account import Context, Evidence, Skip, gpu

BLOCK_TOKENS = 32
MAX_SEQ_LEN = 1024
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
"""Large enough for every part of the path: several layers, several KV heads, a head size that all kernels know."""


def show_build(context: Context) -> tuple[str, Evidence]:
    torch = gpu()
    model = context.model or write_tiny(context.work / "tiny")
    capability = torch.cuda.get_device_capability(0)
    bundle = make_bundle(model, context.work / "bundle", card_of(capability[0] * 10 + capability[1]))
    files, taken = len(bundle.manifest.files), accepted(bundle)
    return f"{files} files; accepted by {', '.join(taken)}", {"files": files, "classes": len(taken)}


def accepted(bundle: Bundle) -> list[str]:
    """TensorRT-LLM's classes that took what the bundle has for them; one that does not raises."""
    args = llm_args(bundle, role="both", version=installed(), connector=True, cuda_graphs=False)
    module = import_module("tensorrt_llm.llmapi.llm_args")
    module.KvCacheConfig(**args["kv_cache_config"])
    module.KvCacheConnectorConfig(**args["kv_connector_config"])
    module.TorchLlmArgs(**args)
    return ["KvCacheConfig", "KvCacheConnectorConfig", "TorchLlmArgs"]


def make_bundle(model: Path, out: Path, card: str) -> Bundle:
    """The bundle of the checkpoint `model` in `out`, for one GPU of kind `card` and the TensorRT-LLM installed here."""
    longest = min(MAX_SEQ_LEN, json.loads((model / "config.json").read_text())["max_position_embeddings"])
    source = read_source(model)
    changes = (
        f"gpu={card}",
        f"quantisation={source.quantisation}",
        f"kv_dtype={source.kv_dtype or source.dtype}",
        f"max_seq_len={longest}",
        "max_batch_size=8",
        "max_num_tokens=512",
    )
    request = prepare(Asked(str(model), name="gpu-check", block_tokens=BLOCK_TOKENS, changes=changes), None)
    build(request, out, force=True)
    return read_bundle(out)


def card_of(sm: int) -> str:
    """The table's GPU of this compute capability, else the nearest older one.

    Raises:
        Skip: older than any that TensorRT-LLM serves on.
    """
    older = [card for card in GPUS.values() if card.sm <= sm]
    if not older:
        raise Skip(f"the GPU's compute capability {sm / 10:g} is below 8.0")
    newest = max(card.sm for card in older)
    return next(card.name for card in older if card.sm == newest)


def write_tiny(folder: Path) -> Path:
    """A Hugging Face checkpoint of random weights, the same on every machine, with a tokenizer of numbered words."""
    import torch
    from safetensors.torch import save_file

    from kvtool.engine.family import read_family

    folder.mkdir(parents=True, exist_ok=True)
    random, tensors = torch.Generator().manual_seed(11), {}
    for name, shape in read_family(TINY, "tiny").tensors().items():
        noise = torch.randn(shape, generator=random)
        scaled = 1 + 0.1 * noise if "norm" in name else noise * shape[-1] ** -0.5
        tensors[name] = scaled.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = {"<s>": 0, "</s>": 1, **{f"w{i}": i for i in range(2, TINY["vocab_size"])}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<s>"},
    }
    for name, table in (
        ("config.json", TINY),
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ("generation_config.json", {"eos_token_id": 1, "bos_token_id": 0}),
    ):
        (folder / name).write_text(json.dumps(table), encoding="utf-8")
    return folder
