"""What a model is made of, as numbers: enough to size, check and lay out an engine without its checkpoint.

Recipes write these down; for a local checkpoint they are read from its config.json, and both must agree. `parameters`
is the size that the publisher states, and the counted one must be within 0.5 % of it: a recipe with a wrong digit does
not load.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvtool.errors import CheckpointRefused
from kvtool.kv.layout import KVLayout

QKV_BIAS = {"Qwen2ForCausalLM"}
QK_NORM = {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
DENSE = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
MOE = {"MixtralForCausalLM", "Qwen3MoeForCausalLM"}
MLA_MOE = {"DeepseekV3ForCausalLM"}
ARCHITECTURES = tuple(sorted(DENSE | MOE | MLA_MOE))


class Experts(BaseModel):
    """A mixture of experts in place of the dense MLP. Each expert has gate, up and down of `intermediate` columns."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: int = Field(ge=2)
    active: int = Field(ge=1)
    """Experts that compute one token."""
    intermediate: int = Field(ge=1)
    shared: int = Field(default=0, ge=0)
    """Experts of the same width that compute every token."""
    dense_layers: int = Field(default=0, ge=0)
    """The first so many layers have a dense MLP instead."""


class Latent(BaseModel):
    """Multi-head latent attention: what is kept of a token is one vector of kv_rank + rope_dim numbers a layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    q_rank: int = Field(ge=1)
    kv_rank: int = Field(ge=1)
    nope_dim: int = Field(ge=1)
    rope_dim: int = Field(ge=1)
    v_dim: int = Field(ge=1)


class Counted(BaseModel):
    """Parameters by what becomes of them. The linear ones may be quantised; the others stay as they are.

    Attention under MLA has a part that every rank holds (`attention_shared`: the projections into the latents) beside
    the part that is split by heads.
    """

    model_config = ConfigDict(frozen=True)

    embeddings: int
    """Token embeddings, and the output head unless it is the same tensor."""
    q_out: int
    """Linear: q and output projections, split by query heads."""
    kv: int
    """Linear: k and v projections, split by KV heads; MLA: from the latent to heads, split by query heads."""
    attention_shared: int
    mlp: int
    """Linear: dense MLPs and shared experts, split over all ranks."""
    experts: int
    """Linear: routed experts."""
    active_experts: int
    """Of `experts`, those that one token passes through."""
    other: int
    """Norms, biases, routers: on every rank."""

    @property
    def total(self) -> int:
        return self.embeddings + self.q_out + self.kv + self.attention_shared + self.mlp + self.experts + self.other

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with: no embeddings, which are looked up; the head is not counted
        either, as only the last token of a prompt needs it."""
        return self.q_out + self.kv + self.attention_shared + self.mlp + self.active_experts


class ModelFacts(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: str
    """As in config.json."""
    parameters: int = Field(ge=1)
    """As published, without extra layers for speculative decoding."""
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    intermediate: int = Field(ge=1)
    """Width of a dense MLP; of no meaning where all layers have experts."""
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab: int = Field(ge=1)
    context: int = Field(ge=1)
    """Tokens that the model was made for."""
    rope_theta: float = Field(gt=0)
    rope_scaling: dict[str, Any] | None = None
    tied: bool = False
    """Token embeddings and output head are one tensor."""
    bos_token_id: int | None = None
    eos_token_ids: list[int] = Field(min_length=1)
    experts: Experts | None = None
    latent: Latent | None = None

    @model_validator(mode="after")
    def _adds_up(self) -> ModelFacts:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"architecture: wanted one of {', '.join(ARCHITECTURES)}, found {self.architecture}")
        if (self.experts is not None) != (self.architecture in MOE | MLA_MOE):
            raise ValueError(f"experts: {self.architecture} {'has none' if self.experts else 'needs them'}")
        if (self.latent is not None) != (self.architecture in MLA_MOE):
            raise ValueError(f"latent: {self.architecture} {'has none' if self.latent else 'needs it'}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: {self.heads} query heads do not share {self.kv_heads} KV heads evenly")
        counted = count(self).total
        if abs(counted - self.parameters) > 0.005 * self.parameters:
            raise ValueError(
                f"parameters: {self.parameters / 1e9:.2f} billion are published, these facts add up to "
                f"{counted / 1e9:.2f} billion; one of them is wrong"
            )
        return self

    def kv_layout(self, block_tokens: int, dtype: str) -> KVLayout:
        """Of the whole model, all heads: MLA keeps one vector a token and layer, for K and V both."""
        if self.latent:
            width = self.latent.kv_rank + self.latent.rope_dim
            return KVLayout(self.layers, 1, width, block_tokens, dtype, kv_factor=1)
        return KVLayout(self.layers, self.kv_heads, self.head_dim, block_tokens, dtype)


def count(facts: ModelFacts) -> Counted:
    """The parameters of the model that `facts` describes."""
    moe = facts.experts
    dense_layers = moe.dense_layers if moe else facts.layers
    moe_layers = facts.layers - dense_layers
    mlp = 3 * facts.hidden * facts.intermediate * dense_layers
    experts = active = routers = 0
    if moe:
        one = 3 * facts.hidden * moe.intermediate
        experts, active = (one * n * moe_layers for n in (moe.count, moe.active))
        mlp += one * moe.shared * moe_layers
        routers = (facts.hidden + (1 if facts.latent else 0)) * moe.count * moe_layers  # DeepSeek's have a bias
    q_out, kv, shared, small = _attention(facts)
    return Counted(
        embeddings=facts.vocab * facts.hidden * (1 if facts.tied else 2),
        q_out=q_out * facts.layers,
        kv=kv * facts.layers,
        attention_shared=shared * facts.layers,
        mlp=mlp,
        experts=experts,
        active_experts=active,
        other=(small + 2 * facts.hidden) * facts.layers + facts.hidden + routers,
    )


def _attention(facts: ModelFacts) -> tuple[int, int, int, int]:
    """Parameters of one layer: split by query heads, split by KV heads, on every rank, and not linear at all."""
    if facts.latent:
        m = facts.latent
        q = m.q_rank * facts.heads * (m.nope_dim + m.rope_dim)
        kv = m.kv_rank * facts.heads * (m.nope_dim + m.v_dim)
        out = facts.heads * m.v_dim * facts.hidden
        return q + out, kv, facts.hidden * (m.q_rank + m.kv_rank + m.rope_dim), m.q_rank + m.kv_rank
    q, kv = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    small = (q + 2 * kv if facts.architecture in QKV_BIAS else 0) + (
        2 * facts.head_dim if facts.architecture in QK_NORM else 0
    )
    return 2 * facts.hidden * q, 2 * facts.hidden * kv, 0, small


def facts_of(config: dict[str, Any], where: str, parameters: int | None = None) -> ModelFacts:
    """Facts from the config.json `config`; `where` names the file in errors. config.json has no parameter count: None
    takes the counted one.

    Raises:
        CheckpointRefused: an architecture whose parts are not known here, or a field that is missing or impossible.
    """
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and len(named) == 1 else None
    if architecture not in ARCHITECTURES:
        raise CheckpointRefused(
            f"{where}: architectures: wanted one of {', '.join(ARCHITECTURES)}, found {named!r}; kvtool does not know "
            "what other models are made of"
        )
    try:
        raw = _raw(config, architecture)
        counted = count(ModelFacts.model_construct(**raw)).total
        return ModelFacts.model_validate({**raw, "parameters": parameters or counted})
    except KeyError as error:
        raise CheckpointRefused(f"{where}: {error.args[0]}: missing; is the checkpoint whole?") from None
    except (ValueError, TypeError) as error:
        raise CheckpointRefused(f"{where}: {error}") from None


def _raw(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"}
    plain = scaling.get("rope_type", scaling.get("type", "default")) == "default"
    ends = config.get("eos_token_id")
    raw: dict[str, Any] = {
        "architecture": architecture,
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "intermediate": config["intermediate_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "vocab": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "rope_theta": config.get("rope_theta") or rope.get("rope_theta") or 10000.0,
        "rope_scaling": None if plain else {"rope_type" if k == "type" else k: v for k, v in scaling.items()},
        "tied": config.get("tie_word_embeddings", False),
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_ids": ends if isinstance(ends, list) else [] if ends is None else [ends],
    }
    raw["head_dim"] = config.get("head_dim") or raw["hidden"] // raw["heads"]
    raw["experts"], raw["latent"] = _experts(config, architecture), _latent(config, architecture)
    if raw["latent"]:
        raw["head_dim"] = raw["latent"].nope_dim + raw["latent"].rope_dim
    return raw


def _experts(config: dict[str, Any], architecture: str) -> Experts | None:
    if architecture in DENSE:
        return None
    if architecture == "MixtralForCausalLM":
        return Experts(
            count=config["num_local_experts"],
            active=config["num_experts_per_tok"],
            intermediate=config["intermediate_size"],
        )
    if architecture == "Qwen3MoeForCausalLM":
        if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
            raise ValueError("decoder_sparse_step, mlp_only_layers: wanted experts in every layer")
        return Experts(
            count=config["num_experts"],
            active=config["num_experts_per_tok"],
            intermediate=config["moe_intermediate_size"],
        )
    return Experts(
        count=config["n_routed_experts"],
        active=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        shared=config.get("n_shared_experts") or 0,
        dense_layers=config.get("first_k_dense_replace", 0),
    )


def _latent(config: dict[str, Any], architecture: str) -> Latent | None:
    if architecture not in MLA_MOE:
        return None
    return Latent(
        q_rank=config["q_lora_rank"],
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        v_dim=config["v_head_dim"],
    )


def compare(recipe: ModelFacts, found: ModelFacts, where: str) -> None:
    """Refuse a checkpoint that is not the model of the recipe.

    Raises:
        CheckpointRefused: with the field, what the recipe says, and what the checkpoint has.
    """
    wanted, there = (one.model_dump(exclude={"parameters", "eos_token_ids", "bos_token_id"}) for one in (recipe, found))
    for key, value in wanted.items():
        if there[key] != value:
            raise CheckpointRefused(
                f"{where}: {key}: the recipe says {value!r}, this checkpoint has {there[key]!r}; it is another model: "
                "give --checkpoint the recipe's own, or build the directory itself"
            )
