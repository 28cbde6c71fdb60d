"""A batch job on a deployment, by the command line: the answers of one process, each once, beside online streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deployed import Deployed, kill, kvtool, until
from prompts import prose

from kvtool.batch.results import errors_path

pytestmark = pytest.mark.real

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def write_job(path: Path, *bodies: dict[str, Any]) -> Path:
    with path.open("w") as file:
        for number, body in enumerate(bodies):
            url = CHAT if "messages" in body else TEXT
            file.write(json.dumps({"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}) + "\n")
    return path


def records(output: Path) -> dict[str, dict[str, Any]]:
    """custom_id -> response body; every line is an answer, and no custom_id is there twice."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {line["custom_id"]: line["response"]["body"] for line in lines}
    assert len(found) == len(lines)
    return found


def texts(output: Path) -> dict[str, str]:
    choices = {name: body["choices"][0] for name, body in records(output).items()}
    return {name: one["text"] if "text" in one else one["message"]["content"] for name, one in choices.items()}


def many(path: Path, count: int, max_tokens: int, start: int) -> Path:
    shared = prose(70, start)
    bodies = ({"prompt": f"{shared} {n}:", "max_tokens": max_tokens, "ignore_eos": True} for n in range(count))
    return write_job(path, *bodies)


def status(job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kvtool("batch", "status", job, "--json").stdout)
    return found


def test_a_job_has_the_answers_of_one_process_and_says_what_came_from_which_tier(
    deployment: Deployed, smollm2_engine: Path, tmp_path: Path
) -> None:
    shared = prose(80, 21)
    source = write_job(
        tmp_path / "in.jsonl",
        *({"prompt": f"{shared} {word}", "max_tokens": 6} for word in ("and", "or", "but")),
        *({"messages": [{"role": "user", "content": f"Name a {word}."}], "max_tokens": 8} for word in ("dog", "tree")),
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "max_tokens": 6},
        {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.9, "seed": 7},
        {"prompt": "Count: one, two,", "max_tokens": 12, "stop": ["five"]},
        {"prompt": "Übermäßig große Äpfel", "max_tokens": 5, "temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 3},
        {"prompt": [1, 2, 3], "max_tokens": 2},
    )
    there, here = tmp_path / "there.jsonl", tmp_path / "here.jsonl"
    where = ["--run-dir", str(deployment.run_dir), "--json"]
    ran = kvtool("batch", "run", str(source), "-o", str(there), *where, check=False)
    assert ran.returncode == 3 and json.loads(ran.stdout)["answered"] == 9, ran  # one line has no answer
    assert "token ids can be run on an engine (--engine), not on a deployment" in errors_path(there).read_text()
    kvtool("batch", "run", str(source), "-o", str(here), "--engine", str(smollm2_engine), "--json")
    found = texts(there)
    assert list(found) == [f"r{number}" for number in range(9)]
    alone = texts(here)
    assert alone.pop("r9") and found == alone
    usage = [records(there)[f"r{number}"]["usage"]["prompt_tokens_details"] for number in range(3)]
    cached = [each["cached_tokens"] for each in usage]
    assert min(cached) == 0 and max(cached) >= 64, cached  # computed by the first; a pool that is late is a miss
    assert all(each["cached_tokens"] == sum(each["cached_tokens_by_tier"].values()) for each in usage)
    until("everything to be given back", lambda: not deployment.held(), 15)


def test_a_job_cancelled_beside_an_online_stream_is_resumed_and_each_request_is_answered_once(
    deployment: Deployed, tmp_path: Path
) -> None:
    source = many(tmp_path / "in.jsonl", 16, 16, 23)
    output = tmp_path / "out.jsonl"
    where = ["--run-dir", str(deployment.run_dir), "--concurrent", "4"]
    said = kvtool("batch", "submit", str(source), "-o", str(output), *where)
    job = said.stdout.strip()
    until("a request to be answered", lambda: status(job)["answered"], 40)
    online = deployment.ask("The capital of France is", 8, ignore_eos=True)
    assert len(online.tokens) == 8 and not online.error
    kvtool("batch", "cancel", job)
    stopped = status(job)
    assert stopped["state"] == "stopped" and 0 < stopped["answered"] < 16, stopped
    before = texts(output)
    assert len(before) == stopped["answered"]
    until("what ran for it to be given back", lambda: not deployment.held(), 15)
    kvtool("batch", "resume", job)
    after = texts(output)
    assert list(after) == [f"r{number}" for number in range(16)]
    assert {name: after[name] for name in before} == before


@pytest.fixture
def narrow(smollm2_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A deployment that takes six requests at once, so three of a job."""
    running = Deployed(tmp_path_factory.mktemp("narrow"), smollm2_engine, limits__concurrent_max="6")
    yield running
    running.down()
    assert running.left() == set()


@pytest.mark.slow
def test_a_deployment_that_refuses_and_loses_servers_answers_the_whole_job(narrow: Deployed, tmp_path: Path) -> None:
    source = many(tmp_path / "in.jsonl", 60, 12, 25)
    output = tmp_path / "out.jsonl"
    said = kvtool("batch", "submit", str(source), "-o", str(output), "--run-dir", str(narrow.run_dir))
    job = Path(said.stdout.strip())
    for name in ("front-0", "decode-0"):
        answered = status(str(job))["answered"]
        until("the job to go on", lambda answered=answered: status(str(job))["answered"] > answered, 60)
        kill(narrow.server(name)["pid"])
    until("the job to end", lambda: status(str(job))["state"] == "done", 240)
    assert list(texts(output)) == [f"r{number}" for number in range(60)]
    progress = json.loads((job / "progress.json").read_text())
    assert progress["failed"] == 0 and progress["retries"] > 0, progress
