"""A tiny checkpoint with a byte tokenizer, and what `kvtool build` makes of it for TensorRT-LLM."""

from __future__ import annotations

import json
from pathlib import Path

BLOCK = 16
LONGEST = 512
VOCAB = 260
EOS, BOS = 256, 257


def write_checkpoint(folder: Path, **changes: object) -> Path:
    """A Llama of two layers and two KV heads; one token for each byte."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "bos_token": "<begin>"}))
    weights = {"model.embed_tokens.weight": torch.zeros(VOCAB, 64, dtype=torch.bfloat16)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<end>", "<begin>", "<a>", "<b>")])
    return str(tokenizer.to_str())


def build_bundle(folder: Path, checkpoint: Path, version: str = "1.2.1", *changes: str, name: str = "tiny") -> Path:
    """The bundle of `checkpoint` for `version`; `changes` are KEY=VALUE as of `kvtool build --set`."""
    from kvtool.engine.trtllm.build import build
    from kvtool.engine.trtllm.request import Asked, prepare

    given = ("gpu=h100-80gb", f"max_seq_len={LONGEST}", "max_batch_size=8", f"max_num_tokens={LONGEST}", *changes)
    asked = Asked(str(checkpoint), name, None, None, version, BLOCK, given)
    return build(prepare(asked, None), folder / name).directory


def as_engine(bundle: Path, folder: Path, **changes: object) -> Path:
    """A directory that says it is a TensorRT engine of the same model. Nothing could load it; nothing here tries."""
    from kvtool.engine.manifest import read_manifest

    manifest = read_manifest(bundle)
    fields = manifest.tensorrt_llm
    assert fields is not None
    parts = {"adapter": "engine-1.2", "tensorrt_version": "10.14.1.48", "gpu_arch": "sm_90", **changes}
    fields = fields.model_copy(update=parts)
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((bundle / name).read_bytes())
    mapping = {"tp_size": fields.tensor_parallel, "pp_size": fields.pipeline_parallel}
    built = {key: getattr(fields, key) for key in ("max_batch_size", "max_num_tokens", "max_seq_len")}
    plugins = {"tokens_per_block": manifest.kv.block_tokens, "use_paged_context_fmha": True, "paged_kv_cache": True}
    table = {
        "version": fields.version,
        "pretrained_config": {"architecture": "LlamaForCausalLM", "dtype": "bfloat16", "mapping": mapping},
        "build_config": {**built, "plugin_config": plugins},
    }
    (folder / "config.json").write_text(json.dumps(table))
    for rank in range(fields.world_size):
        (folder / f"rank{rank}.engine").write_bytes(b"engine")
    (folder / "engine.json").write_text(manifest.model_copy(update={"tensorrt_llm": fields}).model_dump_json(indent=1))
    sealed(folder)
    return folder


def sealed(engine: Path) -> None:
    """Write the sizes of an engine's files into its manifest anew: what was changed was built so."""
    path = engine / "engine.json"
    table = json.loads(path.read_text())
    names = sorted(file.name for file in engine.iterdir() if file.name != path.name)
    table["files"] = {name: (engine / name).stat().st_size for name in names}
    table["digests"] = dict.fromkeys(names, "0" * 64)
    path.write_text(json.dumps(table))
