"""Which models the engines compute, as one small description read from config.json.

Four families differ from each other in few places: biases on q, k and v (Qwen2), norms on q and k (Qwen3), a sliding
window (Mistral). What a config asks for and the engine does not compute is refused by name: an engine that ignores a
field serves wrong answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvtool.errors import CheckpointRefused

FAMILIES = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "MistralForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
}

LAYERS_MAX = 4096
"""Beyond any model; keeps a damaged config from listing billions of tensors."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's long-context scaling of rotary frequencies (Llama 3 report, arXiv:2407.21783, section 3.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Family:
    """Everything that the forward pass depends on besides the weights."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor that a checkpoint must have."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            attn = at + "self_attn."
            shapes |= {
                at + "input_layernorm.weight": (self.hidden,),
                attn + "q_proj.weight": (q, self.hidden),
                attn + "k_proj.weight": (kv, self.hidden),
                attn + "v_proj.weight": (kv, self.hidden),
                attn + "o_proj.weight": (self.hidden, q),
                at + "post_attention_layernorm.weight": (self.hidden,),
                at + "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                at + "mlp.up_proj.weight": (self.intermediate, self.hidden),
                at + "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
            if self.qkv_bias:
                shapes |= {attn + "q_proj.bias": (q,), attn + "k_proj.bias": (kv,), attn + "v_proj.bias": (kv,)}
            if self.qk_norm:
                shapes |= {attn + "q_norm.weight": (self.head_dim,), attn + "k_norm.weight": (self.head_dim,)}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


class _Config:
    """config.json with every field checked as it is read."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def refuse(self, sentence: str) -> CheckpointRefused:
        return CheckpointRefused(f"{self.where}: {sentence}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 31:
            raise self.refuse(f"{key}: wanted a positive whole number, found {value!r}")
        return value

    def number(self, fields: dict[str, Any], key: str, default: float | None = None) -> float:
        value = fields.get(key)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.refuse(f"{key}: wanted a positive number, found {value!r}")
        return float(value)


def read_family(raw: dict[str, Any], where: str) -> Family:
    """The family of the model whose config.json is `raw`; `where` names the file in errors.

    Raises:
        CheckpointRefused: an architecture or setting that the engines do not compute, or fields that do not fit.
    """
    config = _Config(raw, where)
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else named
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise config.refuse(f"architectures: found {named!r}, this kvtool computes {', '.join(FAMILIES)}")
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", heads)
    head_dim = config.count("head_dim", max(hidden // heads, 1))
    if heads % kv_heads or head_dim % 2:
        raise config.refuse(
            f"wanted num_attention_heads a multiple of num_key_value_heads and an even head_dim, found {heads}, "
            f"{kv_heads} and {head_dim}"
        )
    _refuse_unknown(config, architecture)
    layers = config.count("num_hidden_layers")
    if layers > LAYERS_MAX:
        raise config.refuse(f"num_hidden_layers: wanted at most {LAYERS_MAX}, found {layers}")
    theta, scaling = _rope(config)
    return Family(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=config.count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.count("vocab_size"),
        context=config.count("max_position_embeddings"),
        norm_eps=config.number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(raw.get("tie_word_embeddings", False)),
        **FAMILIES[architecture],
    )


def _refuse_unknown(config: _Config, architecture: str) -> None:
    raw = config.raw
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise config.refuse(f"hidden_act: found {raw['hidden_act']!r}, this kvtool computes silu")
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise config.refuse(f"{key}: found {raw[key]!r}, this kvtool computes {architecture} without it")
    if raw.get("quantization_config"):
        raise config.refuse("quantization_config: this kvtool reads float checkpoints, or 4-bit codes from GGUF files")
    windowed = raw.get("sliding_window") is not None and raw.get("use_sliding_window", architecture[:4] != "Qwen")
    if windowed and raw["sliding_window"] < raw.get("max_position_embeddings", 0):
        raise config.refuse(
            f"sliding_window: found {raw['sliding_window']!r}, this kvtool attends to the whole context; "
            "set max_position_embeddings to the window or use a checkpoint without one"
        )


def _rope(config: _Config) -> tuple[float, RopeScaling | None]:
    fields = config.raw.get("rope_parameters") or config.raw.get("rope_scaling") or {}
    if not isinstance(fields, dict):
        raise config.refuse(f"rope_parameters: wanted a table, found {fields!r}")
    theta = config.number({**config.raw, **fields}, "rope_theta", 10000.0)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if fields.get("partial_rotary_factor", config.raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise config.refuse("partial_rotary_factor: this kvtool rotates whole heads")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise config.refuse(f"rope scaling: found {kind!r}, this kvtool computes default and llama3")
    scaling = RopeScaling(
        factor=config.number(fields, "factor"),
        low_freq_factor=config.number(fields, "low_freq_factor"),
        high_freq_factor=config.number(fields, "high_freq_factor"),
        original_context=int(config.number(fields, "original_max_position_embeddings")),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise config.refuse("rope scaling: wanted high_freq_factor above low_freq_factor")
    return theta, scaling
