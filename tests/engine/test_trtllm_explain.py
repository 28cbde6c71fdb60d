"""`kvtool build --explain`: for each recipe the tables that stand in golden/, and one sentence where nothing fits."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvtool.assets import asset_dir
from kvtool.cli.build_explain import explained
from kvtool.cli.main import app
from kvtool.engine.explain import Table
from kvtool.engine.recipe import recipe_names
from kvtool.errors import CheckpointRefused, EngineRefused

GOLDEN = Path(__file__).parent / "golden" / "explain"


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

    got, path = text(explained(name, None, None)[1]), GOLDEN / f"{name}.txt"
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
    name, tables = explained(str(tmp_path / "mine.yaml"), None, None)
    assert name == "mine"
    assert "8 x A100 80 GB SXM" in tables[1].title
    raw["tensorrt_llm"]["tensor_parallel"] = 1
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(EngineRefused, match=r"mine \(prefill\) on 1 x A100 80 GB SXM: each rank needs 131\.4 GiB"):
        explained(str(tmp_path / "mine.yaml"), None, None)


def test_other_block_sizes_move_blocks_and_not_tokens() -> None:
    def tokens(block_tokens: int) -> str:
        tables = explained("llama-3.1-8b-h100", None, block_tokens)[1]
        return next(row for row in tables[1].rows if row.what == "blocks that fit").how.split(": ")[1]

    assert tokens(32)[:4] == tokens(64)[:4]


def test_what_cannot_be_explained_is_said() -> None:
    with pytest.raises(CheckpointRefused, match=r"nowhere: wanted a Hugging Face directory, .*found nothing"):
        explained("nowhere", None, None)
    with pytest.raises(EngineRefused, match="needs a recipe that says on which GPUs"):
        explained("smollm2-135m", "tensorrt_llm", None)
