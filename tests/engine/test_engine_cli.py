"""kvtool build, engine show, engine verify: what they print and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_samples import write_checkpoint

from kvtool.cli.main import main


def test_build_show_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_checkpoint(tmp_path / "m", "Qwen3ForCausalLM"), tmp_path / "engine"
    assert main(["build", str(source), "--out", str(out), "--name", "tiny"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(out) and "tiny: Qwen3ForCausalLM for torch" in printed.err
    assert main(["build", str(source), "--out", str(out), "--name", "tiny"]) == 0
    assert "already built" in capsys.readouterr().err
    assert main(["engine", "show", str(out)]) == 0
    assert "3 layers x 2 KV heads x 32 dims" in capsys.readouterr().out.replace("\n", " ")
    assert main(["engine", "show", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "tiny"
    assert main(["engine", "verify", str(out)]) == 0
    assert "4 files whole" in capsys.readouterr().err


def test_refusals_are_one_sentence_and_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["build", str(tmp_path / "nothing")], "found nothing of that name"),
        (["engine", "verify", str(tmp_path)], "no engine here"),
        (["build", "smollm2-135m", "--target", "tensorrt_llm"], "gpu: Field required; set it with --set gpu=VALUE"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert words in said and "Traceback" not in said
