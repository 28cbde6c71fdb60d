"""`kvtool batch` as a person uses it, on real engines: the way through, and each refusal's sentence.

Most of it runs in this process, by the command line's own door; what outlives a command runs in processes of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvtool.cli.main import main

REQUESTS = 3


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Kvtool = Callable[..., Ran]


@pytest.fixture
def kvtool(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Kvtool:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        code = main(["batch", *arguments])
        said = capfd.readouterr()
        assert "Traceback" not in said.err and "should not have happened" not in said.err, said.err
        return Ran(code, said.out, said.err)

    return run


def in_own_process(*arguments: str, cwd: Path) -> Ran:
    command = [sys.executable, "-m", "kvtool.cli.main", "batch", *arguments]
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in ran.stderr, ran.stderr
    return Ran(ran.returncode, ran.stdout, ran.stderr)


def write(path: Path, count: int = REQUESTS, **body: Any) -> Path:
    heads = ["You are a careful assistant. " * 8, "Answer in one word, and be kind about it. " * 6]
    with path.open("w") as file:
        for number in range(count):
            messages = [
                {"role": "system", "content": heads[number % 2]},
                {"role": "user", "content": f"Say something about the number {number}."},
            ]
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**line, "body": {"messages": messages, "max_tokens": 3, **body}}) + "\n")
    return path


def write_words(path: Path, count: int, max_tokens: int) -> Path:
    """Completions in the words of `small_engine`, in three groups that begin alike."""
    with path.open("w") as file:
        for number in range(count):
            head = " ".join(f"w{2 + (7 * at + number % 3) % 150}" for at in range(64))
            body = {"prompt": f"{head} w{number + 2}", "max_tokens": max_tokens, "ignore_eos": True}
            file.write(json.dumps({"custom_id": f"r{number}", "url": "/v1/completions", "body": body}) + "\n")
    return path


def texts(path: Path) -> dict[str, str]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    choices = {one["custom_id"]: one["response"]["body"]["choices"][0] for one in records}
    return {name: one["message"]["content"] if "message" in one else one["text"] for name, one in choices.items()}


def assert_same_alone(kvtool: Kvtool, source: Path, engine: Path, count: int, hit_ratio: float) -> None:
    together, alone = source.with_name("together.jsonl"), source.with_name("alone.jsonl")
    where = ["run", str(source), "--engine", str(engine), "--threads", "1", "--json"]
    ran = kvtool(*where, "-o", str(together))
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["answered"] == count and found["failed"] == 0 and found["hit_ratio"] > hit_ratio
    assert found["computed_tokens"] + found["reused_tokens"] == found["prompt_tokens"]
    ran = kvtool(*where, "-o", str(alone), "--concurrent", "1", "--pool-size", "0", "--arrival-order")
    assert ran.code == 0 and json.loads(ran.out)["hit_ratio"] == 0, ran.err
    assert texts(together) == texts(alone)
    assert list(texts(together)) == [f"r{number}" for number in range(count)] and all(texts(together).values())


@pytest.mark.real
def test_answers_are_those_of_one_request_at_a_time(kvtool: Kvtool, tmp_path: Path, small_engine: Path) -> None:
    assert_same_alone(kvtool, write_words(tmp_path / "in.jsonl", 30, 12), small_engine, 30, 0.8)


@pytest.mark.real
@pytest.mark.slow
def test_so_are_those_of_a_real_model(kvtool: Kvtool, tmp_path: Path, smollm2_engine: Path) -> None:
    assert_same_alone(kvtool, write(tmp_path / "in.jsonl"), smollm2_engine, REQUESTS, 0.1)


@pytest.mark.real
def test_submitted_looked_at_cancelled_and_resumed(kvtool: Kvtool, tmp_path: Path, small_engine: Path) -> None:
    count, engine = 30, ["--engine", str(small_engine), "--threads", "1"]
    source = write_words(tmp_path / "in.jsonl", count, 50)
    ran = in_own_process("submit", str(source), *engine, "-o", "out.jsonl", "--concurrent", "2", cwd=tmp_path)
    assert ran.code == 0, ran.err
    job = ran.out.strip()
    again = kvtool("resume", job)
    assert again.code == 2 and "a process works on this job already" in again.err
    until_s = time.monotonic() + 60
    while not (seen := json.loads(kvtool("status", job, "--json").out))["answered"]:
        assert seen["state"] == "running" and time.monotonic() < until_s, seen
        time.sleep(0.05)
    assert kvtool("cancel", job).code == 0
    seen = json.loads(kvtool("status", job, "--json").out)
    assert seen["state"] == "stopped" and 0 < seen["answered"] < count
    assert len(texts(tmp_path / "out.jsonl")) == seen["answered"]
    assert kvtool("results", job, "-o", "so-far.jsonl").code == 0
    assert texts(tmp_path / "so-far.jsonl") == texts(tmp_path / "out.jsonl")
    ended = kvtool("resume", job)
    assert ended.code == 0, ended.err
    assert len(texts(tmp_path / "out.jsonl")) == count
    assert json.loads(kvtool("status", job, "--json").out)["state"] == "done"
    assert kvtool("resume", job).code == 0, "of a job that is done: nothing to do"


@pytest.mark.real
def test_the_plan_says_what_it_would_take_and_makes_nothing(kvtool: Kvtool, tmp_path: Path, small_engine: Path) -> None:
    source = write_words(tmp_path / "in.jsonl", 30, 12)
    found = json.loads(kvtool("run", str(source), "--engine", str(small_engine), "--plan", "--json").out)
    assert found["requests"] == 30 and found["prefix_groups"] == 3 and found["estimate_s"] > 0
    assert found["prompt_tokens"] == 30 * 65 and found["reused_tokens"] == 27 * 64
    assert found["output_tokens_max"] == 30 * 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.real
def test_requests_out_of_time_and_a_job_out_of_tokens(kvtool: Kvtool, tmp_path: Path, small_engine: Path) -> None:
    source = write_words(tmp_path / "in.jsonl", 6, 200)
    run = ["run", str(source), "--engine", str(small_engine), "--threads", "1", "--concurrent", "1", "--json"]
    late = kvtool(*run, "-o", "late.jsonl", "--request-deadline", "10ms", "--attempts", "2")
    found = json.loads(late.out)
    assert late.code == 3 and (found["answered"], found["failed"], found["retries"]) == (0, 6, 6), late.err
    errors = [json.loads(line)["error"] for line in (tmp_path / "late.errors.jsonl").read_text().splitlines()]
    assert {error["code"] for error in errors} == {"deadline_passed"} and all(error["message"] for error in errors)
    spent = kvtool(*run, "-o", "spent.jsonl", "--token-budget", "300")
    found = json.loads(spent.out)
    assert spent.code == 1 and (found["answered"], found["left"], found["generated_tokens"]) == (2, 4, 400)
    assert "stopped: the job's 300 tokens are used up; the rest waits for: kvtool batch resume" in spent.err
    again = kvtool("resume", found["job"], "--token-budget", "100000", "--json")
    assert again.code == 0 and json.loads(again.out)["answered"] == 6


ONE = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "the file is empty; wanted one request a line"),
        (b"\n \n", "none of its lines is a request: only blank lines"),
        (b"hello\n", "none of its lines is a request: line 1: wanted one JSON object"),
        ({**ONE, "url": "/v1/images"}, "line 1: url: wanted /v1/chat/completions or /v1/completions, found '/v1/imag"),
        ({"url": ONE["url"], "body": {}}, "line 1: custom_id: wanted a text of 1 to 512 characters, found none"),
        (
            {**ONE, "body": {"prompt": "word " * 9000}},
            "line 1: the prompt has 9001 tokens; beside 1 to generate the context holds at most 8191",
        ),
        ({**ONE, "body": {"prompt": "x", "n": 2}}, "line 1: body.n: 2 is not supported; leave it out"),
    ],
)
def test_an_input_without_a_request_is_refused(
    kvtool: Kvtool, tmp_path: Path, smollm2_engine: Path, line: Any, said: str
) -> None:
    (tmp_path / "in.jsonl").write_bytes(line if isinstance(line, bytes) else json.dumps(line).encode())
    ran = kvtool("run", "in.jsonl", "--engine", str(smollm2_engine))
    assert ran.code == 2 and said in " ".join(ran.err.split()), ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_each_other_refusal_is_a_sentence(kvtool: Kvtool, tmp_path: Path, smollm2_engine: Path) -> None:
    engine = ["--engine", str(smollm2_engine)]
    good = str(write(tmp_path / "in.jsonl", 1))
    (tmp_path / "there.jsonl").touch()
    for arguments, said in (
        (["run", "none.jsonl", *engine], "wanted a file of requests, found nothing"),
        (["run", good, *engine, "-o", "there.jsonl"], "the output is there already; choose another --output"),
        (["run", good, *engine, "-o", "no/such/place.jsonl"], "wanted a file in a directory that is there"),
        (["run", good], "say where to run: --engine DIRECTORY (here), or --spec FILE"),
        (["run", good, *engine, "--run-dir", "x"], "give one of them"),
        (["run", good, "--url", "x:1"], "--url needs --engine too"),
        (["run", good, "--run-dir", "nothing-here"], "no deployment in"),
        (["run", good, "--engine", "nothing-here"], "no engine here"),
        (["status", "nothing-here"], "no batch job here"),
        (["resume", "nothing-here"], "no batch job here"),
        (["cancel", "nothing-here"], "no batch job here"),
        (["results", "nothing-here"], "no batch job here"),
    ):
        ran = kvtool(*arguments)
        assert ran.code in (1, 2) and said in " ".join(ran.err.split()), (arguments, ran.err)
    assert not [path for path in tmp_path.iterdir() if path.name.endswith((".job", ".new"))]


@pytest.mark.real
def test_the_command_itself_ends_with_a_sentence_and_its_code(tmp_path: Path, smollm2_engine: Path) -> None:
    (tmp_path / "in.jsonl").write_text("hello\n")
    ran = in_own_process("run", "in.jsonl", "--engine", str(smollm2_engine), cwd=tmp_path)
    assert ran.code == 2 and ran.out == "" and "none of its lines is a request" in ran.err
