"""A GGUF file as a checkpoint: names, config and weights in Hugging Face form.

llama.cpp's converter reorders the rows of q and k of Llama-architecture models, so that its rotary embedding pairs
neighbours; Hugging Face pairs the two halves of a head. The rows are put back here (`_restore`), which makes the
dequantised weights equal to transformers' own reading of the file, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvtool.engine.checkpoint import Checkpoint, check_tensors
from kvtool.engine.family import Family, read_family
from kvtool.engine.gguf import Codes, GgufFile
from kvtool.engine.gguf_tokenizer import tokenizer_files
from kvtool.errors import CheckpointRefused

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_A = TypeVar("_A", bound=np.generic)


def open_gguf(path: Path) -> Checkpoint:
    """The model in the GGUF file `path`.

    Raises:
        CheckpointRefused: damaged, or a model, tokenizer or tensor type that is not read here.
    """
    file = GgufFile(path)
    config = _config(file)
    family = read_family(config, str(path))
    names = {_name(file, name): name for name in file.tensors}
    check_tensors(family, {hf: file.tensors[name].shape for hf, name in names.items()}, path)
    permuted = file.metadata["general.architecture"] == "llama"
    files = tokenizer_files(file.metadata, family.vocab, family.context, path)
    return Checkpoint(
        source=path,
        config=config,
        family=family,
        tensors={hf: _tensor(file, name, _heads(family, hf, permuted)) for hf, name in names.items()},
        codes={
            hf: _codes(file, name, _heads(family, hf, permuted))
            for hf, name in names.items()
            if file.tensors[name].kind in ("Q4_0", "Q4_1") and "_proj." in hf
        },
        files=files,
        eos_token_ids=_eos(file, family.vocab),
        bos_token_id=_token_id(file, "bos", family.vocab),
        inputs=[path],
    )


def _field(file: GgufFile, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
    value = file.metadata.get(key, default)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise CheckpointRefused(f"{file.path}: metadata {key}: found {value!r}; it is missing or of another type")
    return value


def _config(file: GgufFile) -> dict[str, Any]:
    """config.json for the model in `file`, in the form that transformers writes."""
    kind = file.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise CheckpointRefused(
            f"{file.path}: general.architecture {kind!r}; this kvtool computes {', '.join(ARCHITECTURES)}"
        )
    if "rope_freqs.weight" in file.tensors or file.metadata.get(f"{kind}.rope.scaling.type", "none") != "none":
        raise CheckpointRefused(
            f"{file.path}: it scales rotary frequencies in a way that only its Hugging Face form states in full; "
            "build from the Hugging Face directory"
        )
    hidden, heads = _field(file, f"{kind}.embedding_length", int), _field(file, f"{kind}.attention.head_count", int)
    if not 0 < heads <= hidden:
        raise CheckpointRefused(f"{file.path}: wanted 1 to {hidden} attention heads, found {heads}")
    head_dim = _field(file, f"{kind}.attention.key_length", int, hidden // heads)
    rotated = _field(file, f"{kind}.rope.dimension_count", int, head_dim)
    if rotated != head_dim or _field(file, f"{kind}.attention.value_length", int, head_dim) != head_dim:
        raise CheckpointRefused(
            f"{file.path}: it rotates {rotated} of {head_dim} dims; this kvtool rotates whole heads"
        )
    theta = float(_field(file, f"{kind}.rope.freq_base", float, 10000.0))
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointRefused(f"{file.path}: tensor token_embd.weight is missing; the file holds no whole model")
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": _field(file, f"{kind}.feed_forward_length", int),
        "num_hidden_layers": _field(file, f"{kind}.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(file, f"{kind}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _field(file, f"{kind}.context_length", int),
        "rms_norm_eps": _round(float(_field(file, f"{kind}.attention.layer_norm_rms_epsilon", float))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def _round(value: float) -> float:
    """The short decimal that a float32 was written from: 9.999999747378752e-06 -> 1e-05."""
    short = float(f"{value:.6g}")
    return short if np.float32(short) == np.float32(value) else value


def _name(file: GgufFile, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    head, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if head != "blk" or not layer.isdecimal() or part not in _LAYER:
        raise CheckpointRefused(f"{file.path}: tensor {name} has no part in the models that this kvtool computes")
    return f"model.layers.{int(layer)}.{_LAYER[part]}"


def _heads(family: Family, name: str, permuted: bool) -> int | None:
    """How many heads the rows of `name` are permuted in; None when they are in order."""
    if not permuted:
        return None
    if name.endswith("q_proj.weight"):
        return family.heads
    return family.kv_heads if name.endswith("k_proj.weight") else None


def _restore(rows: npt.NDArray[_A], heads: int | None) -> npt.NDArray[_A]:
    """Undo llama.cpp's order of q and k rows: within a head, pairs (2i, 2i+1) go back to (i, i + head_dim / 2)."""
    if heads is None:
        return rows
    dim = rows.shape[0] // heads
    return rows.reshape(heads, dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _tensor(file: GgufFile, name: str, heads: int | None) -> Callable[[], torch.Tensor]:
    return lambda: torch.from_numpy(np.array(_restore(file.values(name), heads)))


def _codes(file: GgufFile, name: str, heads: int | None) -> Callable[[], Codes]:
    def load() -> Codes:
        raw = file.codes(name)
        return Codes(_restore(raw.codes, heads), _restore(raw.scale, heads), _restore(raw.offset, heads))

    return load


def _token_id(file: GgufFile, which: str, vocab: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{which}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab:
        raise CheckpointRefused(f"{file.path}: {which}_token_id: wanted 0 to {vocab - 1}, found {value!r}")
    return value


def _eos(file: GgufFile, vocab: int) -> list[int]:
    found = (_token_id(file, which, vocab) for which in ("eos", "eot"))
    return sorted({value for value in found if value is not None})
