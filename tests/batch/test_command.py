"""`kvtool batch` as a person uses it, on the real small model: the way through, and each refusal's sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Kvtool = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def kvtool(tmp_path: Path) -> Kvtool:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvtool.cli.main", "batch", *arguments]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in ran.stderr
        return ran

    return run


def write(path: Path, count: int = 12, **body: Any) -> Path:
    heads = ["You are a careful assistant. " * 12, "Answer in one word, and be kind about it. " * 10]
    with path.open("w") as file:
        for number in range(count):
            messages = [
                {"role": "system", "content": heads[number % 2]},
                {"role": "user", "content": f"Say something about the number {number}."},
            ]
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**line, "body": {"messages": messages, "max_tokens": 6, **body}}) + "\n")
    return path


def texts(path: Path) -> dict[str, str]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["message"]["content"] for one in records}


@pytest.mark.real
def test_answers_are_those_of_one_request_at_a_time(kvtool: Kvtool, tmp_path: Path, smollm2_engine: Path) -> None:
    source, engine = write(tmp_path / "in.jsonl"), ["--engine", str(smollm2_engine)]
    ran = kvtool("run", str(source), *engine, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["answered"] == 12 and found["failed"] == 0 and found["hit_ratio"] > 0.5
    assert found["computed_tokens"] + found["reused_tokens"] == found["prompt_tokens"]
    alone = kvtool(
        "run", str(source), *engine, "-o", "alone.jsonl", "--concurrent", "1", "--pool-size", "0", "--arrival-order"
    )
    assert alone.returncode == 0, alone.stderr
    together = texts(tmp_path / "in.results.jsonl")
    assert together == texts(tmp_path / "alone.jsonl") and list(together) == [f"r{number}" for number in range(12)]


@pytest.mark.real
def test_submitted_looked_at_cancelled_and_resumed(kvtool: Kvtool, tmp_path: Path, smollm2_engine: Path) -> None:
    source = write(tmp_path / "in.jsonl", 60, max_tokens=24, ignore_eos=True)
    ran = kvtool("submit", str(source), "--engine", str(smollm2_engine), "-o", "out.jsonl")
    assert ran.returncode == 0, ran.stderr
    job = ran.stdout.strip()
    again = kvtool("resume", job)
    assert again.returncode == 2 and "a process works on this job already" in again.stderr
    until_s = time.monotonic() + 60
    while not (seen := json.loads(kvtool("status", job, "--json").stdout))["answered"]:
        assert seen["state"] == "running" and time.monotonic() < until_s, seen
    assert kvtool("cancel", job).returncode == 0
    seen = json.loads(kvtool("status", job, "--json").stdout)
    assert seen["state"] == "stopped" and 0 < seen["answered"] < 60
    assert len(texts(tmp_path / "out.jsonl")) == seen["answered"]
    assert kvtool("results", job, "-o", "so-far.jsonl").returncode == 0
    assert texts(tmp_path / "so-far.jsonl") == texts(tmp_path / "out.jsonl")
    ended = kvtool("resume", job)
    assert ended.returncode == 0, ended.stderr
    assert len(texts(tmp_path / "out.jsonl")) == 60
    assert json.loads(kvtool("status", job, "--json").stdout)["state"] == "done"
    assert kvtool("resume", job).returncode == 0, "of a job that is done: nothing to do"


@pytest.mark.real
def test_the_plan_says_what_it_would_take_and_makes_nothing(
    kvtool: Kvtool, tmp_path: Path, smollm2_engine: Path
) -> None:
    source = write(tmp_path / "in.jsonl")
    ran = kvtool("run", str(source), "--engine", str(smollm2_engine), "--plan", "--json", "--concurrent", "2")
    found = json.loads(ran.stdout)
    assert found["requests"] == 12 and found["prefix_groups"] == 2 and found["estimate_s"] > 0
    assert found["reused_tokens"] > found["prompt_tokens"] // 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_each_refusal_is_a_sentence(kvtool: Kvtool, tmp_path: Path, smollm2_engine: Path) -> None:
    engine = ["--engine", str(smollm2_engine)]
    good = write(tmp_path / "in.jsonl", 1)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.jsonl").write_text("hello\n")
    (tmp_path / "there.jsonl").touch()
    (tmp_path / "url.jsonl").write_text(json.dumps({"custom_id": "a", "url": "/v1/images", "body": {}}))
    (tmp_path / "id.jsonl").write_text(json.dumps({"url": "/v1/completions", "body": {"prompt": "x"}}))
    body = {"prompt": "word " * 9000}
    (tmp_path / "long.jsonl").write_text(json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body}))
    for arguments, said in (
        (["run", "empty.jsonl", *engine], "the file is empty; wanted one request a line"),
        (["run", "none.jsonl", *engine], "wanted a file of requests, found nothing"),
        (["run", "text.jsonl", *engine], "none of its lines is a request: line 1: wanted one JSON object"),
        (
            ["run", "url.jsonl", *engine],
            "line 1: url: wanted /v1/chat/completions or /v1/completions, found '/v1/images'",
        ),
        (["run", "id.jsonl", *engine], "line 1: custom_id: wanted a text of 1 to 512 characters, found none"),
        (
            ["run", "long.jsonl", *engine],
            "line 1: the prompt has 9000 tokens; beside 1 to generate the context holds at most",
        ),
        (["run", str(good), *engine, "-o", "there.jsonl"], "the output is there already; choose another --output"),
        (["run", str(good), *engine, "-o", "no/such/place.jsonl"], "wanted a file in a directory that is there"),
        (["run", str(good)], "say where to run: --engine DIRECTORY (here), or --spec FILE"),
        (["run", str(good), *engine, "--run-dir", "x"], "give one of them"),
        (["run", str(good), "--url", "x:1"], "--url needs --engine too"),
        (["run", str(good), "--run-dir", "nothing-here"], "no deployment in"),
        (["run", str(good), "--engine", "nothing-here"], "no engine here"),
        (["status", "nothing-here"], "no batch job here"),
        (["resume", "nothing-here"], "no batch job here"),
    ):
        ran = kvtool(*arguments)
        assert ran.returncode in (1, 2) and said in " ".join(ran.stderr.split()), (arguments, ran.stderr)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".job", ".new"))]
