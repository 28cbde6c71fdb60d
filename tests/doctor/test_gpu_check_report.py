"""`kvtool gpu-check` where there is no GPU: everything is skipped with its reason, and nothing is claimed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.doctor.gpu.report import Result, Status, Step
from kvtool.doctor.gpu.steps import STEPS, check
from kvtool_trtllm.gpucheck.__main__ import MODULES, load

ROOT = Path(__file__).parents[2]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def statuses(run: dict[str, Status], only: tuple[str, ...] = ()) -> dict[str, Result]:
    def one(step: Step) -> Result:
        return Result(step.name, run.get(step.name, Status.PASS), "as told")

    return {result.name: result for result in check(Path(), {}, only, run=one).results}


def test_every_step_has_its_code_and_its_evidence() -> None:
    assert [step.name for step in STEPS] == list(MODULES)
    for step in STEPS:
        assert step.evidence, step.name
        assert 0 < step.timeout_s <= 900
        assert callable(load(step.name))
    earlier: set[str] = set()
    for step in STEPS:
        assert set(step.needs) <= earlier
        earlier.add(step.name)


def test_what_needs_a_step_that_did_not_pass_is_skipped_and_says_so() -> None:
    got = statuses({"import": Status.SKIPPED, "kernels": Status.FAIL})
    assert got["connector"].status is Status.SKIPPED
    assert got["build"].detail == "needs import, which was skipped"
    assert got["equality"].detail == "needs build, which was skipped"
    assert got["nixl"].status is Status.PASS
    assert statuses({"versions": Status.FAIL})["nixl"].detail == "needs versions, which failed"


def test_only_some_steps_and_what_they_need_are_run() -> None:
    got = statuses({}, only=("equality",))
    assert {name for name, result in got.items() if result.status is Status.PASS} == {
        "versions", "import", "build", "connector", "equality",
    }  # fmt: skip
    assert got["gds"].detail == "not asked for"


@pytest.mark.real
@pytest.mark.skipif(has_gpu(), reason="here is a GPU: scripts/gpu-check is to be run as it is")
def test_without_a_gpu_the_script_skips_everything_and_says_why(tmp_path: Path) -> None:
    environment = {**os.environ, "KVTOOL_PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "gpu-check"), "--out", str(tmp_path / "made" / "report")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 3, ran.stderr
    report = json.loads((tmp_path / "made" / "report.json").read_text())
    assert [step["name"] for step in report["steps"]] == [step.name for step in STEPS]
    assert {step["status"] for step in report["steps"]} == {"SKIPPED"}
    assert all(step["detail"] for step in report["steps"])
    assert "GPU" in report["steps"][0]["detail"] or "CUDA" in report["steps"][0]["detail"]
    assert report["verdict"].startswith(f"0 of {len(STEPS)} steps passed, 0 failed")
    text = (tmp_path / "made" / "report.txt").read_text()
    assert "PASS" not in text
    assert text.strip() == ran.stdout.strip()
    for name in (str(Path.home()) + "/", str(tmp_path), os.uname().nodename):
        assert name not in text + json.dumps(report), "what names this machine does not leave it"


def test_the_command_refuses_what_it_does_not_know() -> None:
    from kvtool.cli.main import main

    assert main(["gpu-check", "--only", "everything"]) == 2
    assert main(["gpu-check", "--model", "/nowhere"]) == 2
    assert main(["gpu-check", "--list"]) == 0


# What the steps do, where it can be done without a GPU: on the CPU, with the same code.


@pytest.mark.real
def test_the_step_nixl_compares_what_another_process_holds() -> None:
    from kvtool_trtllm.gpucheck.nixl import read_from_another

    pytest.importorskip("nixl_cu13")
    assert read_from_another("cpu", "DRAM", 1 << 20) > 0


@pytest.mark.real
def test_the_step_nixl_sees_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtool_trtllm.gpucheck import nixl
    from kvtool_trtllm.gpucheck.account import Wrong

    pytest.importorskip("nixl_cu13")
    true = nixl.pattern
    monkeypatch.setattr(nixl, "pattern", lambda size: true(size).bitwise_xor_(1))  # here only, not in the owner
    with pytest.raises(Wrong, match="reported success and brought other bytes"):
        nixl.read_from_another("cpu", "DRAM", 1 << 20)


def test_answers_are_compared_with_the_cold_run_and_the_engines_own_reuse() -> None:
    from kvtool_trtllm.gpucheck.account import Wrong
    from kvtool_trtllm.gpucheck.serving import compare

    plain = [[[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]]]
    assert compare(plain, [[1, 2, 3], [4, 5, 6]], "x") == 2
    assert compare(plain, [[1, 2, 3], [4, 5, 7]], "x") == 1
    with pytest.raises(Wrong, match=r"prompt 1 differs from token 2 on: \[8\] instead of \[6\]"):
        compare(plain, [[1, 2, 3], [4, 5, 8]], "x")
    for short in ([], [[1, 2, 3]], [[1, 2, 3], []]):
        with pytest.raises(Wrong, match="wanted 2, with tokens"):
            compare(plain, short, "x")


def test_the_step_builds_a_bundle_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtool.engine.trtllm import request
    from kvtool_trtllm.gpucheck import bundle
    from kvtool_trtllm.gpucheck.account import Skip
    from kvtool_trtllm.gpucheck.serving import prompts

    monkeypatch.setattr(request, "installed", lambda: "1.2.1")
    made = bundle.make_bundle(bundle.write_tiny(tmp_path / "tiny"), tmp_path / "bundle", bundle.card_of(90))
    assert made.fields.gpu_arch == "sm_90"
    assert made.manifest.layout.kv_heads == 4
    asked = prompts(made, 0)
    assert all(0 < len(one) < made.fields.max_seq_len for one in asked)
    assert asked[1][:96] == asked[3][:96]
    assert (bundle.card_of(86), bundle.card_of(120)) == ("a100-40gb", "b200")
    with pytest.raises(Skip, match=r"compute capability 7.5 is below 8.0"):
        bundle.card_of(75)


def test_the_step_kernels_compares_with_the_twin_and_sees_a_wrong_byte() -> None:
    from kvtool_trtllm.gpucheck.account import Wrong
    from kvtool_trtllm.gpucheck.kernels import CASES, compare
    from kvtool_trtllm.twin import Twin

    assert sum(compare(seed, "cpu", False, Twin()) for seed in range(CASES)) > 1 << 16

    class Torn(Twin):
        def copy(self, gathering: bool, table: Any, rows: Any, packed: Any) -> None:
            super().copy(gathering, table, rows, packed)
            if gathering:
                packed[-1, -1] += 1

    with pytest.raises(Wrong, match=r"gather of shape 0: byte .* the twin's is"):
        compare(0, "cpu", False, Torn())
