"""`kvtool build --dry-run` of every recipe prints what stands in golden/: each command, each file, to the byte.

To accept a change: KVTOOL_GOLDEN=write pytest tests/engine/trtllm/test_golden.py
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
import yaml
from trtllm_samples import checkpoint

from kvtool import __version__
from kvtool.cli.main import main
from kvtool.engine.recipe import find_recipe, recipe_names

GOLDEN = Path(__file__).parent / "golden"
RECIPES = [name for name in recipe_names() if (found := find_recipe(name)) and found.target == "tensorrt_llm"]


@pytest.fixture(autouse=True)
def _no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-hub"))
    monkeypatch.delenv("KVTOOL_TRTLLM_EXAMPLES", raising=False)


@pytest.mark.parametrize("name", RECIPES)
def test_dry_run_prints_what_it_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", name, "--dry-run", "--out", f"/engines/{name}"]) == 0
    got = capsys.readouterr().out.replace(f'"kvtool": "{__version__}"', '"kvtool": "VERSION"')
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("KVTOOL_GOLDEN") == "write":
        path.write_text(got, encoding="utf-8")
    assert got == path.read_text(encoding="utf-8")
    assert not Path("/engines").exists(), "a dry run writes nothing"


def test_dry_run_says_what_the_build_then_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = checkpoint(tmp_path / "m"), tmp_path / "out"
    settings = ["gpu=h200", "max_seq_len=512", "max_num_tokens=256", "max_batch_size=8"]
    arguments = [
        "build",
        str(source),
        "--target",
        "tensorrt_llm",
        "--tensorrt-llm-version",
        "1.4.0rc1",
        "--out",
        str(out),
    ]
    arguments += [word for setting in settings for word in ("--set", setting)]
    assert main([*arguments, "--dry-run", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["directory"] == str(out) and not out.exists() and not told["rehearsed"] and told["commands"] == []
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{out}\n"
    for name, text in told["files"].items():
        if name != "engine.json":
            assert (out / name).read_text() == text, name
    written, said = json.loads((out / "engine.json").read_text()), json.loads(told["files"]["engine.json"])
    assert {**said, "files": written["files"], "digests": written["digests"]} == written
    assert sorted([*told["files"], *told["copied"]]) == sorted(path.name for path in out.iterdir())
    assert main(["engine", "show", str(out)]) == 0
    assert "1.4.0rc1 (pytorch-1.3), sm_90" in capsys.readouterr().out
    assert main(["engine", "verify", str(out)]) == 0
    assert "tensorrt_llm is not installed here" in capsys.readouterr().err


def test_commands_are_shell_lines_that_say_what_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with spaces and quotes in paths, and with plugin libraries in the environment."""
    source = checkpoint(tmp_path / "it's mine")
    settings = ["backend=tensorrt", "gpu=h200", "max_seq_len=512", "max_num_tokens=256", "plugins=[/opt/my plugin.so]"]
    arguments = ["build", str(source), "--target", "tensorrt_llm", "--tensorrt-llm-version", "1.2.1", "--dry-run"]
    arguments += [word for setting in settings for word in ("--set", setting)]
    assert main([*arguments, "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    for argv in told["commands"]:
        assert shlex.split(next(line for line in lines if argv[1] in shlex.split(line))) == [
            "env", "LD_PRELOAD=/opt/my plugin.so", *argv,
        ]  # fmt: skip
    assert told["environment"] == {"LD_PRELOAD": "/opt/my plugin.so"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing-of-that-name", "--target", "tensorrt_llm"], "wanted a checkpoint directory or a recipe (deepseek"),
        (["llama-3.1-8b-h100", "--set", "gpu=tpu"], "gpu: wanted one of a100-40gb"),
        (["llama-3.1-8b-h100", "--tensorrt-llm-version", "2.0"], "TensorRT-LLM 2.0: kvtool drives 1.1 to 1.4"),
        (["llama-3.1-8b-h100-engine", "--tensorrt-llm-version", "1.4.0rc1"], "build them with 1.2.1"),
        (["llama-3.1-8b-h100", "--block-tokens", "24"], "block_tokens: wanted a power of two"),
        (["smollm2-135m", "--role", "prefill"], "--role: for --target tensorrt_llm, this build is for torch"),
        (["smollm2-135m", "--dry-run"], "--dry-run: for --target tensorrt_llm"),
    ],
)
def test_refusals_are_one_sentence_and_exit_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", *arguments, *(["--dry-run"] if arguments[0].startswith("llama") else [])]) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


@pytest.mark.parametrize("name", RECIPES)
def test_files_are_read_by_their_parsers(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from kvtool.engine.manifest import Manifest
    from kvtool.engine.trtllm.connector import read_settings

    assert main(["build", name, "--dry-run", "--json"]) == 0
    for told in json.loads(capsys.readouterr().out):
        manifest = Manifest.model_validate_json(told["files"]["engine.json"])
        assert manifest.layout.fingerprint == manifest.kv_fingerprint
        if "connector.yaml" in told["files"]:
            path = tmp_path / "connector.yaml"
            path.write_text(told["files"]["connector.yaml"])
            assert read_settings(path).kv == manifest.kv
            assert (
                yaml.safe_load(told["files"]["llm.yaml"])["tensor_parallel_size"] == read_settings(path).tensor_parallel
            )
