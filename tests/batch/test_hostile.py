"""What a person's file may hold, and what may have become of a job's directory: a sentence each, and on where one can.

The lines are those that real exports have: other encodings, other line ends, parameters that other servers know.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from made import BLOCK, CONTEXT, Bytes, Echo, full_work, make_job, prompts, write_input

from kvtool.batch.intake import Checks, rejected_in, take_in
from kvtool.batch.job import INDEX, JOB, JOURNAL
from kvtool.batch.line import TEXT_URL
from kvtool.batch.look import look, write_so_far
from kvtool.batch.store import Entry, Store
from kvtool.cli.main import main
from kvtool.errors import Refused

COUNT = 12


def ask(custom_id: str = "a", prompt: Any = "hello", **body: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "url": TEXT_URL, "body": {"prompt": prompt, **body}}).encode()


def taken(folder: Path, data: bytes) -> tuple[list[Entry], list[dict[str, Any]]]:
    """What intake makes of a file: its requests and its rejections."""
    (folder / "in.jsonl").write_bytes(data)
    checks = Checks(CONTEXT, BLOCK, 8)
    with closing(Store.make(folder / INDEX)) as store:
        take_in(folder / "in.jsonl", folder, store, Bytes(), checks, lambda done, total: None)
        return list(store.by_number()), list(rejected_in(folder))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"custom_id": "\xff"}', "wanted UTF-8, found byte 0xff"),
        (ask().decode().encode("utf-16"), "wanted UTF-8, found byte 0xff"),
        (b"\x00" * 40, "found no JSON"),
        (ask().replace(b"hello", b"hel\x00lo"), "found no JSON (Invalid control character"),
        (b"[" * 100_000, "found lists or objects within each other too deep"),
        (ask(tools=1).replace(b": 1}", b": " + b"[" * 900 + b"]" * 900 + b"}"), "body.tools"),
        (ask().replace(b"hello", b"h\\ud800"), "body.prompt: wanted text, found half a character"),
        (ask().replace(b'"a"', b'"a\\udc00"'), "custom_id: wanted text, found half a character"),
        (ask(stop=["x\ud800"]), "body.stop: wanted text, found half a character"),
        (b"9" * 5000, "found no JSON"),
        (b"[1, 2]", "wanted one JSON object, found a list"),
        (ask(max_tokens=-1), "body.max_tokens: wanted a whole number from 1 to"),
        (ask(max_tokens=1.5), "body.max_tokens: wanted a whole number"),
        (ask(max_tokens=True), "body.max_tokens: wanted a whole number"),
        (ask(temperature=float("nan")), "body.temperature: wanted a number from 0 to 2, found nan"),
        (ask(seed=1 << 70), "body.seed: wanted a whole number"),
        (ask(n=2), "body.n: 2 is not supported"),
        (ask(stream=True), "body.stream: True is not supported"),
        (ask(logprobs=5), "body.logprobs: 5 is not supported"),
        (ask(tools=[{"type": "function"}]), "body.tools: "),
        (ask(guided_json={}), "body.guided_json is not supported; known: "),
        (ask(prompt=["one", "two"]), "body.prompt: wanted one text or one list of token ids, found a list"),
        (ask(prompt=[]), "body.prompt: wanted one text or one list of token ids, found an empty list"),
        (ask().replace(b'"url"', b'"URL"'), "wanted custom_id, method, url and body, found URL too"),
    ],
)
def test_a_bad_line_is_named_and_the_others_go_on(tmp_path: Path, bad: bytes, said: str) -> None:
    requests, rejected = taken(tmp_path, ask("first") + b"\n" + bad.replace(b"\n", b"") + b"\n" + ask("last"))
    assert [one.custom_id for one in requests] == ["first", "last"]
    assert [one["line"] for one in rejected] == [2] and said in rejected[0]["message"], rejected


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + ask("a") + b"\n" + ask("b"),
        ask("a") + b"\r\n" + ask("b") + b"\r\n",
        b"\n\n  " + ask("a") + b"  \n\r\n" + ask("b") + b"\n\n\n",
        ask("a", n=1, stream=False, logprobs=None, user="me", model="gpt", tools=[]) + b"\n" + ask("b"),
    ],
)
def test_what_means_the_same_is_taken(tmp_path: Path, data: bytes) -> None:
    requests, rejected = taken(tmp_path, data)
    assert [one.custom_id for one in requests] == ["a", "b"] and not rejected
    assert {one.tokens_in for one in requests} == {5}


def test_a_line_too_long_for_memory_is_named_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.batch.source.LINE_SIZE_MAX", 1000)
    monkeypatch.setattr("kvtool.batch.line.LINE_SIZE_MAX", 1000)
    requests, rejected = taken(tmp_path, ask("a") + b"\n" + ask("b", "x" * 5000) + b"\n" + ask("c"))
    assert [one.custom_id for one in requests] == ["a", "c"]
    assert rejected[0]["code"] == "line_too_long" and "wanted at most 1000 bytes in a line" in rejected[0]["message"]


# The job's directory.


@pytest.fixture
def job(tmp_path: Path) -> Path:
    make_job(tmp_path / "job", write_input(tmp_path / "in.jsonl", prompts(COUNT)))
    return tmp_path / "job"


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda job: change(job / JOB, version=2), "version: .* made by another version or changed by hand"),
        (lambda job: change(job / JOB, colour="red"), "colour: Extra inputs are not permitted"),
        (lambda job: (job / JOB).write_text("{"), "made by another version or changed by hand; submit the job again"),
        (lambda job: (job / JOB).unlink(), "no batch job here"),
        (lambda job: (job / INDEX).unlink(), "the job's index is gone"),
        (lambda job: (job / INDEX).write_bytes(b"no database" * 99), "the job's index cannot be read"),
        (lambda job: (job / INDEX).write_bytes((job / INDEX).read_bytes()[:5000]), "the job's index cannot be read"),
        (lambda job: change(job / JOB, requests=13), "wanted 13 requests, found 12"),
        (lambda job: (job / JOURNAL).unlink(), "the job's journal cannot be opened"),
        (lambda job: (job.parent / "in.jsonl").unlink(), "the job's input is gone; put it back"),
        (
            lambda job: write_input(job.parent / "in.jsonl", prompts(COUNT + 1)),
            "wanted the file that the job was checked on",
        ),
    ],
)
def test_a_job_that_was_harmed_is_refused_and_nothing_runs(job: Path, harm: Any, said: str) -> None:
    target = Echo()
    harm(job)
    with pytest.raises(Refused, match=said):
        full_work(job, target)
    assert not target.started and not (job.parent / "out.jsonl").exists()


def test_an_input_put_back_as_it_was_is_gone_on_with(job: Path) -> None:
    source = job.parent / "in.jsonl"
    before = source.read_bytes()
    source.write_bytes(before.replace(b"r1", b"x1"))
    with pytest.raises(Refused, match="put it back, or submit a new job"):
        full_work(job, Echo())
    source.write_bytes(before)
    assert full_work(job, Echo()).answered == COUNT


def test_news_that_are_damaged_or_of_another_version_are_no_matter(job: Path) -> None:
    for text in ("", "{", "[]", '{"seconds": 3.0, "colour": 1, "at_s": 0}'):
        (job / "progress.json").write_text(text)
        assert look(job)["state"] == "stopped"
    assert full_work(job, Echo()).answered == COUNT
    assert look(job)["state"] == "done"


@pytest.mark.real
def test_two_processes_do_not_work_on_one_job(job: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from kvtool.batch.job import working_on\n"
        "with working_on(Path(sys.argv[1])): print('mine', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(job)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"mine\n"
        target = Echo()
        with pytest.raises(Refused, match="another process works on this job; look with: kvtool batch status"):
            full_work(job, target)
        assert look(job)["state"] == "running" and not target.started
        assert write_so_far(job, job.parent / "so-far.jsonl").answered == 0, "results may be asked for meanwhile"
        other.kill()
    assert full_work(job, Echo()).answered == COUNT, "a lock ends with its holder"


# What the command would write over.


def test_files_that_are_somebody_elses_stay(
    tmp_path: Path, small_engine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(ask("a", "w2 w3"))
    (tmp_path / "out.errors.jsonl").write_text("keep me")
    (tmp_path / "taken").mkdir()
    run = ["batch", "run", str(source), "--engine", str(small_engine)]
    for given, said in (
        (["-o", str(source), "--overwrite"], "the output would replace the input"),
        (["-o", str(tmp_path / "out.jsonl")], "a file of errors is there already"),
        (
            ["-o", str(tmp_path / "new.jsonl"), "--job", str(tmp_path / "taken")],
            "there is a job there already, or some",
        ),
    ):
        assert main([*run, *given]) == 2
        assert said in " ".join(capfd.readouterr().err.split())
    assert source.read_bytes() == ask("a", "w2 w3") and (tmp_path / "out.errors.jsonl").read_text() == "keep me"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.errors.jsonl", "taken"]
