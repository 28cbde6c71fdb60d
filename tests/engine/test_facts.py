"""Facts of models: counted as their publishers count them, and refused where a digit is wrong."""

import json

import pytest
from pydantic import ValidationError

from kvtool.engine.facts import ModelFacts, compare, count, facts_of
from kvtool.engine.recipe import find_recipe, recipe_names
from kvtool.errors import CheckpointRefused

FROM_HUB = [name for name in recipe_names() if find_recipe(name).huggingface]

QWEN3_30B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.mark.parametrize("name", FROM_HUB)
def test_a_recipe_counts_to_the_published_size(name: str) -> None:
    """To the last parameter, so that a wrong digit in any of the facts shows."""
    facts = find_recipe(name).model
    assert count(facts).total == facts.parameters


@pytest.mark.parametrize(
    ("config", "published", "active"),
    [(QWEN3_30B, 30_532_122_624, 3.3e9), (DEEPSEEK_V3, 671_026_419_200, 37e9)],
    ids=["qwen3-30b-a3b", "deepseek-v3"],
)
def test_a_config_counts_to_the_published_size(config: dict, published: int, active: float) -> None:
    counted = count(facts_of(config, "config.json"))
    assert counted.total == published
    assert counted.active + counted.embeddings == pytest.approx(active, rel=0.03), "what the model's name says"


def test_latent_attention_keeps_576_numbers_of_a_token() -> None:
    layout = facts_of(DEEPSEEK_V3, "config.json").kv_layout(32, "bfloat16")
    assert (layout.kv_heads, layout.head_dim, layout.kv_factor) == (1, 576, 1)
    assert layout.token_size == 61 * 576 * 2


def test_both_spellings_of_rope_mean_the_same() -> None:
    plain = {k: v for k, v in DEEPSEEK_V3.items() if not k.startswith("rope")}
    later = plain | {
        "rope_parameters": {
            "rope_theta": 10000,
            "rope_type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
        }
    }
    assert facts_of(later, "x") == facts_of(DEEPSEEK_V3, "x")


def test_a_wrong_digit_is_refused() -> None:
    facts = find_recipe("llama-3.1-8b-h100").model.model_dump()
    with pytest.raises(ValidationError, match=r"8\.03 billion are published, these facts add up to 8\.97 billion"):
        ModelFacts.model_validate(facts | {"intermediate": 16724})


@pytest.mark.parametrize("missing", ["num_hidden_layers", "vocab_size", "num_experts", "moe_intermediate_size"])
def test_a_config_without_a_field_is_refused(missing: str) -> None:
    config = {k: v for k, v in QWEN3_30B.items() if k != missing}
    with pytest.raises(CheckpointRefused, match=rf"config\.json: {missing}: missing"):
        facts_of(config, "config.json")


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(CheckpointRefused, match=r"wanted one of DeepseekV3ForCausalLM, .*found \['GPT2LMHeadModel'\]"):
        facts_of(QWEN3_30B | {"architectures": ["GPT2LMHeadModel"]}, "config.json")
    with pytest.raises(CheckpointRefused, match="wanted experts in every layer"):
        facts_of(QWEN3_30B | {"decoder_sparse_step": 2}, "config.json")


def test_a_checkpoint_of_another_model_is_refused() -> None:
    one = facts_of(QWEN3_30B, "a")
    compare(one, one, "a")
    compare(one, one.model_copy(update={"eos_token_ids": [1, 2]}), "a")
    with pytest.raises(CheckpointRefused, match=r"kv_heads: the recipe says 4, this checkpoint has 8"):
        compare(one, one.model_copy(update={"kv_heads": 8}), "a")


def test_facts_survive_json() -> None:
    facts = facts_of(DEEPSEEK_V3, "a")
    assert ModelFacts.model_validate(json.loads(facts.model_dump_json())) == facts
