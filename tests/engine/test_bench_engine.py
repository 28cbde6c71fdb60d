"""`kvtool bench engine` on a model so small that it takes a second."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from engine_samples import write_checkpoint
from typer.testing import CliRunner

from kvtool.cli.main import app
from kvtool.engine.build import build
from kvtool.errors import Refused


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = write_checkpoint(tmp_path / "m", "LlamaForCausalLM", max_position_embeddings=1024)
    return build(source, tmp_path / "out").directory


@pytest.mark.filterwarnings("ignore")
def test_table_ratios_and_raw_samples(directory: Path, tmp_path: Path) -> None:
    saved = tmp_path / "engine.json"
    arguments = ["bench", "engine", str(directory), "--against", "transformers,llama.cpp", "--rounds", "2"]
    result = CliRunner().invoke(app, [*arguments, "--save", str(saved)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "prefill 512" in result.output and "transformers" in result.output
    found = json.loads(saved.read_text())
    rows = {row["what"]: row for row in found["rows"]}
    assert {"prefill 512", "decode batch 1", "decode batch 4", "decode batch 16", "attention 512, one layer"} <= set(
        rows
    )
    assert len(rows["decode batch 4"]["samples"]["transformers"]) == 8
    assert rows["decode batch 1"]["peer_over_kvtool"]["transformers"]["median"] > 0
    assert "transformers" in found["peers"] and found["threads"] == 2 and "commit" in found
    reason = "no recipe" if importlib.util.find_spec("llama_cpp") else "llama-cpp-python"
    assert reason in found["absent"][0]


def test_unknown_peer_is_refused(directory: Path) -> None:
    result = CliRunner().invoke(app, ["bench", "engine", str(directory), "--against", "vllm"])
    assert isinstance(result.exception, Refused) and "found 'vllm'" in str(result.exception)
