"""A job that is killed: at each step that the disk sees, and at random moments. Each answer is there, once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from made import BLOCK, CONTEXT, Bytes, Echo, answer, full_work, prompts, write_input

from kvtool.batch import submit
from kvtool.batch.job import JOB, JOURNAL
from kvtool.batch.target import Ready, Tell

SLOTS = 4
CALLS = ("fsync", "pwrite", "ftruncate", "replace", "rename", "unlink", "mkdir")
"""What changes the disk or makes it durable. SQLite's own are not among them: its file is thrown away half made."""


def kill_at(step: int) -> None:
    """This process dies at the `step`-th of its `CALLS`, before it, or within a write; -1: it lives. After one is
    before the next: what is on the disk is the same."""
    steps = [0]

    def here() -> None:
        steps[0] += 1
        if steps[0] - 1 == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(call: Callable[..., Any]) -> Callable[..., Any]:
        def killing(*given: Any, **named: Any) -> Any:
            here()
            return call(*given, **named)

        return killing

    def half(handle: int, data: bytes, at: int) -> int:
        here()
        done = write(handle, data[: max(1, len(data) // 2)], at)
        here()
        return done

    write = os.pwrite
    for name in CALLS:
        setattr(os, name, half if name == "pwrite" else wrapped(getattr(os, name)))
    os.fsync = wrapped(lambda handle: None)  # a killed process loses no page; what a power cut loses: test_journal


class Logged(Echo):
    """Writes down each request that it is given, where a kill does not undo it."""

    def __init__(self, log: Path, pause_s: float) -> None:
        super().__init__(SLOTS, pause_s=pause_s)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def start(self, ready: Ready, tell: Tell) -> None:
        os.write(self._log, b"%d\n" % ready.number)
        super().start(ready, tell)


def live(folder: Path, step: int, pause_s: float = 0.0) -> None:
    """The life of a job on `Bytes` and `Echo`: made if it is not there, worked on, its results written."""
    kill_at(step)
    manifest = SimpleNamespace(
        context_tokens_max=CONTEXT,
        kv=SimpleNamespace(block_tokens=BLOCK),
        layout=SimpleNamespace(block_size=64),
        name="bytes",
        model_digest="0",
    )
    if not folder.exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(submit, "read_manifest", lambda directory: manifest)
            patch.setattr(submit, "Tokenizer", lambda directory: Bytes())
            wanted = submit.Wanted(folder.parent / "in.jsonl", folder.parent / "out.jsonl", Path("none"), folder)
            submit.make(wanted)
    assert full_work(folder, Logged(folder.parent / "started", pause_s)).why == ""


def lived(folder: Path, step: int = -1, pause_s: float = 0.0, killed_after_s: float | None = None) -> bool:
    """`live` in a process of its own; whether that came to its end."""
    child = os.fork()
    if child == 0:
        try:
            live(folder, step, pause_s)
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(4)
    if killed_after_s is not None:
        time.sleep(killed_after_s)  # the moment of the kill: what is tested
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code == 0


def assert_whole(folder: Path, count: int, kills: int) -> None:
    """The output has each answer once, in order and right; what ran twice is at most what was in flight at a kill."""
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    said = [(one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in found]
    assert said == [(f"r{number}", answer(prompt)) for number, prompt in enumerate(prompts(count))]
    assert not (folder / "out.errors.jsonl").exists()
    numbers = [json.loads(line[17:])["number"] for line in (folder / "job" / JOURNAL).read_bytes().splitlines()]
    assert sorted(numbers) == list(range(count)), "the journal itself has each once"
    started = [int(line) for line in (folder / "started").read_text().splitlines()]
    assert set(started) == set(range(count)) and len(started) <= count + kills * SLOTS
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".out")], "a half-written file stayed"


def each_step(tmp_path: Path) -> None:
    """From the making of the job to its written results."""
    count, step, phases = 6, 0, set[str]()
    while True:
        folder = tmp_path / str(step)
        folder.mkdir()
        write_input(folder / "in.jsonl", prompts(count))
        if lived(folder / "job", step):
            break
        made, journal = (folder / "job" / JOB).exists(), folder / "job" / JOURNAL
        written = (folder / "out.jsonl").exists()
        phases.add("written" if written else "worked" if made and journal.stat().st_size else "made" if made else "new")
        assert lived(folder / "job")
        assert_whole(folder, count, 1)
        shutil.rmtree(folder)
        step += 1
    assert_whole(folder, count, 0)
    assert step >= 20 and phases == {"new", "made", "worked", "written"}


def twenty_times(tmp_path: Path) -> None:
    rng, count, kills = Random(1), 200, 20
    write_input(tmp_path / "in.jsonl", prompts(count))
    for kill in range(kills):
        ended = lived(tmp_path / "job", pause_s=0.02, killed_after_s=rng.uniform(0.0, 0.08))
        assert not ended, f"the job was done before kill {kill + 1}"
    assert lived(tmp_path / "job")
    assert_whole(tmp_path, count, kills)


@pytest.mark.real
@pytest.mark.parametrize("kills", [each_step, twenty_times])
def test_killed_at_each_step_and_at_random_every_answer_is_there_once(
    tmp_path: Path, kills: Callable[[Path], None]
) -> None:
    """In a small process: forks of one with a model in it cost ten times as much."""
    script = f"import sys, pathlib; sys.path.insert(0, sys.argv[1]); from test_kills import {kills.__name__} as kills; "
    command = [sys.executable, "-c", script + "kills(pathlib.Path(sys.argv[2]))", str(Path(__file__).parent)]
    ran = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def write_words(path: Path, count: int, max_tokens: int) -> Path:
    """Completions that the model of `small_engine` knows the words of; SmolLM2 makes something of them too."""
    rng = Random(1)
    heads = [" ".join(f"w{rng.randrange(2, 160)}" for _ in range(40)) for _ in range(3)]
    with path.open("w") as file:
        for number in range(count):
            body = {"prompt": f"{heads[number % 3]} w{number + 2}", "max_tokens": max_tokens, "ignore_eos": True}
            file.write(json.dumps({"custom_id": f"r{number}", "url": "/v1/completions", "body": body}) + "\n")
    return path


def said(output: Path) -> list[tuple[Any, ...]]:
    """All of a result that two runs of one job have in common."""
    records = [json.loads(line) for line in output.read_text().splitlines()]
    bodies = [one["response"]["body"] for one in records]
    usages = [{name: count for name, count in body["usage"].items() if "details" not in name} for body in bodies]
    return [(one["custom_id"], body["choices"], u) for one, body, u in zip(records, bodies, usages, strict=True)]


def kill_the_command(folder: Path, engine: Path, count: int, max_tokens: int, kills: int, seed: int) -> None:
    """`kvtool batch run`, then `resume`, killed `kills` times at random moments of all that they do, on as many jobs as
    that takes; each job's output is that of an undisturbed one, whole."""
    source, rng = write_words(folder / "in.jsonl", count, max_tokens), Random(seed)
    kvtool = [sys.executable, "-m", "kvtool.cli.main", "batch"]
    settings = ["--engine", str(engine), "--concurrent", "4", "--threads", "1"]

    def run(job: int | str, killed_after_s: float = 600.0) -> bool:
        output = folder / f"out-{job}.jsonl"
        there = output.with_name(f"{output.name}.job")
        command = ["resume", str(there)] if there.exists() else ["run", str(source), "-o", str(output), *settings]
        with (folder / "log").open("ab") as log, subprocess.Popen([*kvtool, *command], stdout=log, stderr=log) as child:
            try:
                code = child.wait(timeout=killed_after_s)
            except subprocess.TimeoutExpired:
                child.kill()
                assert killed_after_s < 600, "it hangs"
                return False
            assert code == 0, (folder / "log").read_text()[-2000:]
            return True

    began_s = time.monotonic()
    assert run("undisturbed")
    whole_s, wanted = time.monotonic() - began_s, said(folder / "out-undisturbed.jsonl")
    assert len(wanted) == count
    killed, job = 0, 0
    while killed < kills:
        if run(job, rng.uniform(0.0, whole_s)):
            assert said(folder / f"out-{job}.jsonl") == wanted
            job += 1
        else:
            killed += 1
    assert run(job) or run(job)
    assert said(folder / f"out-{job}.jsonl") == wanted


@pytest.mark.real
@pytest.mark.slow
def test_the_command_killed_at_random_gives_what_an_undisturbed_one_gives(tmp_path: Path, small_engine: Path) -> None:
    kill_the_command(tmp_path, small_engine, count=12, max_tokens=16, kills=2, seed=2)


@pytest.mark.real
@pytest.mark.slow
def test_the_command_killed_twenty_times_on_a_real_model(tmp_path: Path, smollm2_engine: Path) -> None:
    kill_the_command(tmp_path, smollm2_engine, count=24, max_tokens=12, kills=20, seed=3)
