"""What fits on which GPUs: arithmetic against facts known from outside, properties over all recipes, and refusals."""

import math
from itertools import product
from random import Random

import pytest

from kvtool.engine.facts import count
from kvtool.engine.recipe import find_recipe, recipe_names
from kvtool.engine.trtllm.estimate import host_tier, prefill_flops, refetch, timeout_s
from kvtool.engine.trtllm.gpus import GPUS, gpu
from kvtool.engine.trtllm.settings import Node, TrtllmSettings
from kvtool.engine.trtllm.sizing import (
    GIB,
    WEIGHT_BITS,
    check,
    fit,
    rank_layout,
    unsplit,
    weights_size,
    workspace_size,
)
from kvtool.errors import EngineRefused

RECIPES = [name for name in recipe_names() if find_recipe(name).target == "tensorrt_llm"]
TERA = 10**12


def facts(name: str):
    return find_recipe(name).model


def settings(**change: object) -> TrtllmSettings:
    return TrtllmSettings.model_validate({"gpu": "h100-80gb", **change})


@pytest.mark.parametrize("name", RECIPES)
def test_bfloat16_weights_of_one_rank_are_two_bytes_a_parameter(name: str) -> None:
    assert weights_size(facts(name), "none", 1).total == 2 * count(facts(name)).total


@pytest.mark.parametrize(
    ("name", "quantisation", "published_gb"),
    [  # sizes of the files that the publishers offer
        ("llama-3.1-8b-h100", "fp8", 9.1),
        ("llama-3.3-70b-h100", "fp8", 72.7),
        ("qwen3-32b-h200", "fp8_block_scales", 34.3),
        ("qwen3-30b-a3b-h100", "fp8_block_scales", 31.2),
        ("deepseek-r1-h200", "fp8_block_scales", 673.0),
        ("llama-3.3-70b-h100", "w4a16_awq", 39.8),
    ],
)
def test_quantised_weights_are_as_large_as_published_checkpoints(name, quantisation, published_gb) -> None:
    assert weights_size(facts(name), quantisation, 1).total / 1e9 == pytest.approx(published_gb, rel=0.02)


@pytest.mark.parametrize("seed", range(100))
def test_splitting_never_loses_a_byte_and_copies_only_what_must_be_whole(seed: int) -> None:
    rng = Random(seed)
    model = facts(rng.choice(RECIPES))
    quantisation = rng.choice(list(WEIGHT_BITS))
    tp = rng.choice([1, 2, 4, 8, 16, 32])
    one, each = weights_size(model, quantisation, 1), weights_size(model, quantisation, tp)
    assert tp * each.total >= one.total
    assert each.total <= one.total
    counted = count(model)
    copied = (tp - 1) * (2 * counted.attention_shared + 2 * counted.other)
    if not model.latent and tp > model.kv_heads:
        copied += 2 * counted.kv * (tp // model.kv_heads - 1)
    if quantisation == "none":
        assert tp * each.total >= one.total + copied, "each rank holds whole KV heads"
    assert tp * each.total <= one.total + copied + 8 * tp * model.hidden, "more than copies and padding"


@pytest.mark.parametrize(("name", "tp"), list(product(RECIPES, [1, 2, 4, 8, 16])))
def test_kv_of_all_ranks_is_the_models_or_whole_copies_of_heads(name: str, tp: int) -> None:
    model = facts(name)
    whole, rank = model.kv_layout(32, "bfloat16"), rank_layout(model, "bfloat16", tp, 32)
    if model.latent:
        assert rank == whole, "a latent has no heads to split"
    else:
        assert rank.kv_heads * tp == max(tp, whole.kv_heads)
        assert rank.token_size * min(tp, model.kv_heads) == whole.token_size
    assert rank_layout(model, "fp8", tp, 32).block_size * 2 == rank.block_size


def test_kv_per_token_of_models_that_are_known() -> None:
    def known(name: str, dtype: str) -> int:
        return rank_layout(facts(name), dtype, 1, 32).token_size

    assert known("llama-3.1-8b-h100", "bfloat16") == 128 * 1024
    assert known("llama-3.3-70b-h100", "bfloat16") == 320 * 1024
    assert known("mixtral-8x7b-h100", "bfloat16") == 128 * 1024
    assert known("deepseek-r1-h200", "bfloat16") == 70_272


@pytest.mark.parametrize("seed", range(100))
def test_what_is_said_to_fit_does(seed: int) -> None:
    """Everything together stays below the memory, one block more passes the room, and refusal means no sequence."""
    rng = Random(seed)
    recipe = find_recipe(rng.choice(RECIPES))
    tried = recipe.tensorrt_llm.model_copy(
        update={
            "gpu": rng.choice(list(GPUS)),
            "tensor_parallel": rng.choice([1, 2, 4, 8]),
            "expert_parallel": 1,
            "quantisation": rng.choice(list(WEIGHT_BITS)),
            "kv_dtype": rng.choice(["bfloat16", "fp8"]),
            "max_seq_len": rng.choice([512, 8192, 131072]),
            "memory_fraction": rng.choice([0.3, 0.85, 0.95]),
        }
    )
    block_tokens = rng.choice([16, 32, 64])
    got = fit(recipe.model, tried, block_tokens)
    assert got.reserve + got.weights.total + got.workspace + got.free == got.memory
    assert 0 <= got.kv_room <= max(0, got.free)
    assert got.blocks * got.block <= got.kv_room < (got.blocks + 1) * got.block
    assert got.sequences * math.ceil(tried.max_seq_len / block_tokens) <= got.blocks
    try:
        assert check(recipe.model, tried, block_tokens, "x") == got
        assert got.sequences >= 1
    except EngineRefused as refused:
        card = gpu(tried.gpu)
        cannot = unsplit(recipe.model, tried.quantisation, tried.tensor_parallel, 1)
        lacks = (tried.quantisation != "none" or tried.kv_dtype == "fp8") and card.sm < 100
        assert cannot or lacks or got.sequences < 1, refused


@pytest.mark.parametrize("name", RECIPES)
def test_workspace_grows_with_the_pass_and_shrinks_with_ranks(name: str) -> None:
    model = facts(name)
    sizes = [workspace_size(model, settings(max_num_tokens=n)) for n in (1024, 2048, 8192)]
    assert sizes == sorted(set(sizes))
    assert workspace_size(model, settings(tensor_parallel=8)) < workspace_size(model, settings())


def test_seventy_billion_in_bfloat16_on_one_h100_says_what_would_do() -> None:
    tried = settings(max_seq_len=8192)
    with pytest.raises(EngineRefused) as refused:
        check(facts("llama-3.3-70b-h100"), tried, 32, "llama-3.3-70b")
    assert str(refused.value) == (
        "llama-3.3-70b on 1 x H100 80 GB SXM: each rank needs 131.4 GiB for weights (bfloat16), 2.4 GiB of workspace "
        "and 2.0 GiB for CUDA, of 79.1 GiB there are; use tensor_parallel 2, or gpu b200"
    )


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("llama-3.3-70b-h100", {"tensor_parallel": 3}, "64 query heads cannot be split so; use 1, 2, 4, 8, 16"),
        ("llama-3.3-70b-h100", {"expert_parallel": 2}, "LlamaForCausalLM has no experts; leave it out"),
        ("llama-3.3-70b-h100", {"quantisation": "nvfp4"}, r"\(sm_90\) does not compute it; use b200, or another"),
        ("llama-3.1-8b-h100", {"gpu": "a100-40gb", "kv_dtype": "fp8"}, "has no FP8; use kv_dtype bfloat16"),
        ("llama-3.1-8b-h100", {"gpu": "a100-40gb", "quantisation": "fp8"}, "use l40s or h100-80gb or h200 or b200"),
        ("llama-3.1-8b-h100", {"gpu": "h100"}, "gpu: wanted one of a100-40gb, .*, found 'h100'"),
        (
            "qwen3-30b-a3b-h100",
            {"quantisation": "fp8_block_scales", "tensor_parallel": 4},
            "experts' intermediate 768 does not split into 4 parts of whole groups of 128",
        ),
        (
            "qwen3-30b-a3b-h100",
            {"tensor_parallel": 4, "expert_parallel": 3},
            "a divisor of tensor_parallel 4 and of 128",
        ),
        (
            "deepseek-r1-h200",
            {"quantisation": "fp8_block_scales", "tensor_parallel": 8, "expert_parallel": 8},
            "use tensor_parallel 16 and expert_parallel 16, or gpu h200",
        ),
        (
            "qwen3-8b-a100",
            {"max_seq_len": 600_000},
            r"one sequence of max_seq_len 600000 needs 18750; lower max_seq_len",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(name: str, change: dict, sentence: str) -> None:
    with pytest.raises(EngineRefused, match=sentence):
        check(facts(name), settings(**change), 32, name)


@pytest.mark.parametrize("name", RECIPES)
def test_advice_can_be_followed(name: str) -> None:
    """What a refusal tells to do is done, and is not refused again."""
    model, rng, followed = facts(name), Random(name), 0
    for _ in range(60):
        tried = settings(
            gpu=rng.choice(list(GPUS)),
            tensor_parallel=rng.choice([1, 2, 4]),
            max_seq_len=rng.choice([8192, 131072]),
            quantisation=rng.choice(["none", "fp8"]),
        )
        try:
            check(model, tried, 32, name)
        except EngineRefused as refused:
            words = str(refused)
            if " use tensor_parallel" not in words or "cannot be split" in words:
                continue
            first = words.split(" use ")[-1].split(",")[0].split()
            change = {first[i]: int(first[i + 1]) for i in range(0, len(first), 3)}
            check(model, tried.model_copy(update=change), 32, name)
            followed += 1
    assert followed or name.startswith(("llama-3.1", "qwen3-8b")), "nothing was refused, so nothing was followed"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_fits_its_gpus(name: str) -> None:
    recipe = find_recipe(name)
    for role in recipe.tensorrt_llm.roles():
        one = recipe.tensorrt_llm.of(role)
        got = check(recipe.model, one, recipe.block_tokens, name)
        assert got.sequences >= 2, "a batch of one is no recipe"
        assert one.max_seq_len <= recipe.model.context
        assert one.tensor_parallel <= one.node.gpus


def test_host_memory_is_divided_by_the_ranks_on_the_node() -> None:
    node = Node.model_validate({"gpus": 8, "memory": "1TiB", "pool": "512GiB", "host_cache": "256GiB"})
    got = host_tier(node, GIB, "x")
    assert (got.pool, got.own, got.ranks) == (64 * GIB, 32 * GIB, 8)
    assert got.node_total == (512 + 256 + 8) * GIB


def test_host_memory_beyond_the_cgroups_limit_is_refused_with_what_fits() -> None:
    """The first sizes that the sentence names are tried: just enough fits, a GiB more does not."""
    node = {"gpus": 4, "memory": "256GiB", "pool": "300GiB"}
    with pytest.raises(EngineRefused, match=r"4 ranks want 304\.0 GiB .* lower pool to 226\.4 GiB, or raise memory"):
        host_tier(Node.model_validate(node), GIB, "x")
    host_tier(Node.model_validate(node | {"pool": "226.4GiB"}), GIB, "x")
    with pytest.raises(EngineRefused):
        host_tier(Node.model_validate(node | {"pool": "227GiB"}), GIB, "x")


def test_prefill_work_is_twice_the_parameters_for_short_prompts_and_quadratic_for_long_ones() -> None:
    model = facts("llama-3.3-70b-h100")
    assert prefill_flops(model, 1) == pytest.approx(2 * 68.45e9, rel=0.01)
    long = prefill_flops(model, 1_000_000)
    assert long / prefill_flops(model, 500_000) == pytest.approx(4, rel=0.2)


def test_estimates_say_which_of_fetch_and_compute_is_less() -> None:
    recipe = find_recipe("llama-3.3-70b-h100")
    one = recipe.tensorrt_llm.of("prefill")
    got = refetch(recipe.model, one, fit(recipe.model, one, 32).kv_token, 4096)
    assert got.size == 4096 * 80 * 2 * 4 * 128
    assert got.here_s < got.away_s < got.compute_s
    slow = one.model_copy(update={"node": one.node.model_copy(update={"network": 10**8})})
    assert refetch(recipe.model, slow, got.size // 4096, 4096).away_s > got.compute_s


def test_a_timeout_comes_from_the_bytes() -> None:
    assert timeout_s(10**9, 10**9) == 30.0
    assert timeout_s(TERA, 10**10) == 1000.0
