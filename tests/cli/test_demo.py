"""The demo for real: kept running and talked to as the README says; interrupted; and measured."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.triton import process
from kvtool.triton.state import read_state, read_state_or_nothing, stop

pytestmark = pytest.mark.real
ROOT = Path(__file__).resolve().parents[2]
KVTOOL = [sys.executable, "-m", "kvtool.cli.main"]
SHORT = ["--entries", "5", "--max-tokens", "8"]


def run(*arguments: str, timeout_s: float = 180.0) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run([*KVTOOL, *arguments], capture_output=True, text=True, timeout=timeout_s)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return ran


@pytest.fixture(scope="module")
def folder(smollm2_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the demo, with the engine built before: the demo finds it and builds nothing."""
    made = tmp_path_factory.mktemp("demo")
    shutil.copytree(smollm2_engine, made / "engine")
    return made


@pytest.fixture(scope="module")
def kept(folder: Path) -> Iterator[tuple[Path, str]]:
    """(run directory, what the demo printed) of a demo that was left running."""
    try:
        yield folder / "state", run("demo", "--keep", "--dir", str(folder), *SHORT).stdout
    finally:
        stop(folder / "state")


def test_demo_gives_the_tokens_of_one_process_and_finds_the_prompt_in_the_pool(kept: tuple[Path, str]) -> None:
    said = kept[1]
    assert "same tokens as one process: yes" in said
    cold, warm = re.search(r"(\d+) of \d+ │ +(\d+) of \d+", said).groups()  # type: ignore[union-attr]
    assert int(cold) == 0 < int(warm)
    assert "by shm" in said


def test_readmes_client_streams_an_answer(kept: tuple[Path, str], tmp_path: Path) -> None:
    """The very lines of the README, in a file of their own, with nothing of kvtool."""
    scripts = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (script,) = [script for script in scripts if "tritonclient" in script]
    assert "import kvtool" not in script and "from kvtool" not in script
    (tmp_path / "ask.py").write_text(script)
    host, front = _front(kept[0])
    command = [sys.executable, "ask.py", f"{host}:{front['grpc_port']}", "The capital of France is"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert "Paris" in ran.stdout
    assert '"finish_reason"' in ran.stdout


def test_readmes_curl_streams_an_answer(kept: tuple[Path, str]) -> None:
    (body,) = re.findall(r"generate_stream \\\n +-d '(.*)'", (ROOT / "README.md").read_text())
    host, front = _front(kept[0])
    request = urllib.request.Request(
        f"http://{host}:{front['http_port']}/v2/models/kvtool/generate_stream",
        data=body.encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [json.loads(line[5:]) for line in response.read().decode().splitlines() if line.startswith("data:")]
    assert [event["finish_reason"] for event in events][-1] == "length"
    assert sum(len(_listed(event["token_ids"])) for event in events) == json.loads(body)["max_tokens"]


def test_bench_of_a_running_deployment_reports_ratios_percentiles_and_costs(kept: tuple[Path, str]) -> None:
    ran = run(
        "bench", "serve", "--run-dir", str(kept[0]), "--prompt-tokens", "96", "--rounds", "1", "--max-tokens", "4",
        "--idle", "1", "--json",
    )  # fmt: skip
    found = json.loads(ran.stdout)
    assert found["same_tokens"]
    assert found["raw"]["TTFT ms, deployment, full hit"]["hit_ratio"] > 0.9
    assert found["raw"]["TTFT ms, deployment, cold"]["hit_ratio"] == 0.0
    assert {"median", "low", "high"} == set(found["ratios"]["TTFT, one process cold / full hit"])
    names = {each["name"] for each in found["idle"]["processes"]}
    assert {"tritonserver front", "tritonserver decode", "stub of decode_engine"} <= names
    assert len([name for name in names if "kvtool.triton.supervise" in name]) == 1
    assert sum(found["cpu_ms_per_streamed_token"].values()) > 0
    for text in ("Ratios", "Raw", "Processes", f"seed {found['seed']}"):
        assert text in ran.stderr


@pytest.mark.parametrize(("number", "whole_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_interrupted_demo_leaves_nothing(folder: Path, tmp_path: Path, number: int, whole_group: bool) -> None:
    """Ctrl-C reaches every process of the terminal; a kill reaches the demo alone. Both come while servers load."""
    (tmp_path / "engine").symlink_to(folder / "engine")
    command = [*KVTOOL, "demo", "--dir", str(tmp_path), *SHORT]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as demo:
        try:
            assert demo.stderr
            next(line for line in demo.stderr if "loads" in line)
            deployment = str((read_state(tmp_path / "state") or {})["deployment"])
            os.kill(-demo.pid if whole_group else demo.pid, number)
            rest = demo.stderr.read()
            assert demo.wait(60) == 130, rest
        finally:
            demo.kill()
            stop(tmp_path / "state")
    assert "no process and no shared memory is left" in rest
    assert process.marked(deployment) == []
    assert list(Path("/dev/shm").glob(f"kvt-{deployment}-*")) == []


def test_deployment_that_was_kept_stops_without_a_trace(kept: tuple[Path, str]) -> None:
    """Last, since the others use it."""
    deployment = str((read_state(kept[0]) or {})["deployment"])
    run("deploy", "down", "--run-dir", str(kept[0]))
    until_s = time.monotonic() + 5
    while process.marked(deployment) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert process.marked(deployment) == []
    assert list(Path("/dev/shm").glob(f"kvt-{deployment}-*")) == []
    assert read_state_or_nothing(kept[0]) is None


def _front(run_dir: Path) -> tuple[str, dict[str, int]]:
    state = read_state(run_dir)
    assert state is not None
    return str(state["host"]), next(server for server in state["servers"] if server["role"] == "front")


def _listed(value: object) -> list[object]:
    """generate_stream shows a tensor of one element as that element."""
    return value if isinstance(value, list) else [value]
