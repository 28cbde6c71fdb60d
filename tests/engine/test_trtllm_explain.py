"""`kvtool build --explain`: for each recipe the tables that stand in golden/, and one sentence where nothing fits."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvtool.assets import asset_dir
from kvtool.cli.build_explain import explained_torch, explained_trtllm
from kvtool.cli.main import app
from kvtool.engine.explain import Table
from kvtool.engine.recipe import find_recipe, recipe_names
from kvtool.engine.trtllm.request import Asked
from kvtool.errors import CheckpointRefused, EngineRefused, SpecRefused

GOLDEN = Path(__file__).parent / "golden" / "explain"


def explained(source: str, block_tokens: int | None = None, **asked: object) -> tuple[str, list[Table]]:
    recipe = find_recipe(source)
    if recipe and recipe.target == "torch":
        return explained_torch(source, None, block_tokens)
    return explained_trtllm(Asked(source, block_tokens=block_tokens, **asked))


def text(tables: list[Table]) -> str:
    lines = []
    for table in tables:
        lines.append(table.title)
        lines += [f"    {row.what:<28} {row.amount:>14}   {row.how}" for row in table.rows]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", recipe_names())
def test_explain_prints_what_it_printed(name: str, request: pytest.FixtureRequest) -> None:
    """To accept a change: KVTOOL_GOLDEN=write pytest tests/engine/test_trtllm_explain.py"""
    import os

    got, path = text(explained(name)[1]), GOLDEN / f"{name}.txt"
    if os.environ.get("KVTOOL_GOLDEN") == "write":
        path.write_text(got, encoding="utf-8")
    assert got == path.read_text(encoding="utf-8")


def test_the_command_prints_tables_and_json() -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["build", "--explain", "llama-3.3-70b-h100"])
    assert shown.exit_code == 0, shown.output
    assert "decode: 4 x H100 80 GB SXM (sm_90)" in shown.stdout
    as_json = runner.invoke(app, ["build", "--explain", "--json", "llama-3.3-70b-h100"])
    tables = json.loads(as_json.stdout)["tables"]
    assert [row["what"] for row in tables[1]["rows"]][:2] == ["memory of the GPU", "weights"]


def test_a_recipe_of_ones_own_is_explained_from_its_file(tmp_path: Path) -> None:
    raw = yaml.safe_load((asset_dir("engines") / "llama-3.3-70b-a100.yaml").read_text())
    raw["name"], raw["tensorrt_llm"]["tensor_parallel"] = "mine", 8
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    name, tables = explained(str(tmp_path / "mine.yaml"))
    assert name == "mine"
    assert "8 x A100 80 GB SXM" in tables[1].title
    raw["tensorrt_llm"]["tensor_parallel"] = 1
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(EngineRefused, match=r"mine \(prefill\) on 1 x A100 80 GB SXM: each rank needs 131\.4 GiB"):
        explained(str(tmp_path / "mine.yaml"))


def test_other_block_sizes_move_blocks_and_not_tokens() -> None:
    def tokens(block_tokens: int) -> str:
        tables = explained("llama-3.1-8b-h100", block_tokens)[1]
        return next(row for row in tables[1].rows if row.what == "blocks that fit").how.split(": ")[1]

    assert tokens(32)[:4] == tokens(64)[:4]


def test_settings_are_changed_one_by_one_and_a_role_is_chosen() -> None:
    name, tables = explained("llama-3.3-70b-h100", role="decode", changes=("gpu=h200", "max_seq_len=65536"))
    titles = [one.title for one in tables]
    assert titles[1:3] == ["prefill and decode: 4 x H200 141 GB SXM (sm_90)", "host memory of a node of 8 GPUs"]
    assert name == "llama-3.3-70b-h100"


def test_a_pipelines_stage_holds_its_share() -> None:
    def sizes(*changes: str) -> dict[str, str]:
        tables = explained("llama-3.1-8b-h100-engine", changes=changes)[1]
        return {row.what: row.amount for row in tables[1].rows}

    assert sizes()["KV per token"] == "128.0 KiB"
    assert sizes("pipeline_parallel=2")["KV per token"] == "64.0 KiB"
    with pytest.raises(EngineRefused, match="context_parallel 2: kvtool does not work out what fits then; use 1"):
        sizes("context_parallel=2")


def test_what_cannot_be_explained_is_said() -> None:
    with pytest.raises(CheckpointRefused, match=r"nowhere: wanted a checkpoint directory or a recipe .*found nothing"):
        explained("nowhere")
    with pytest.raises(CheckpointRefused, match=r"nowhere: wanted a Hugging Face directory, .*found nothing"):
        explained_torch("nowhere", None, None)
    with pytest.raises(SpecRefused, match="gpu: Field required; set it with --set gpu=VALUE"):
        explained_trtllm(Asked("smollm2-135m"))


@pytest.mark.parametrize("name", [name for name in recipe_names() if find_recipe(name).target == "tensorrt_llm"])
def test_every_recipe_is_rehearsed_where_its_checkpoint_is_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvtool build --dry-run` writes nothing and prints a bundle or the commands of an engine for each role."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["build", name, "--dry-run", "--json"])
    assert shown.exit_code == 0, shown.output
    recipe = find_recipe(name)
    plans = json.loads(shown.stdout)
    assert [plan["name"] for plan in plans] == [
        f"{name}-{role}" if role else name for role in recipe.tensorrt_llm.roles()
    ]
    assert not list(tmp_path.iterdir())
    for plan, role in zip(plans, recipe.tensorrt_llm.roles(), strict=True):
        one, files = recipe.tensorrt_llm.of(role), plan["files"]
        manifest = json.loads(files["engine.json"])
        assert manifest["tensorrt_llm"]["tensor_parallel"] == one.tensor_parallel
        if one.backend == "tensorrt":
            assert plan["commands"][-1][0] == "trtllm-build"
            continue
        args, connector = yaml.safe_load(files["llm.yaml"]), yaml.safe_load(files["connector.yaml"])
        assert (args["tensor_parallel_size"], args["max_batch_size"]) == (one.tensor_parallel, one.max_batch_size)
        assert args["kv_cache_config"]["tokens_per_block"] == recipe.block_tokens
        assert connector["stored_parallel"] == recipe.tensorrt_llm.stored_parallel
        assert connector["kv"] == manifest["kv"]
        if recipe.model.experts:
            assert args["moe_expert_parallel_size"] == one.expert_parallel
