"""A job's way: every request is answered once, whatever fails, stops or kills it in between."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from made import Bytes, Echo, answer, make_job, prompts, write_input

from kvtool.batch.job import CANCEL, INDEX, JOURNAL, read_progress
from kvtool.batch.journal import Journal
from kvtool.batch.results import errors_path, write_results
from kvtool.batch.rules import Limits
from kvtool.batch.run import Runner
from kvtool.batch.store import Store
from kvtool.batch.target import Ready, Tell
from kvtool.errors import EngineFailed, KvtoolError, Overloaded, Refused, RequestRefused, Unavailable, Unreachable

COUNT = 40
LIMITS = Limits(attempts=3, backoff_s=0.001)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    make_job(tmp_path / "job", write_input(tmp_path / "in.jsonl", prompts(COUNT)))
    return tmp_path / "job"


def run(folder: Path, target: Echo, limits: Limits = LIMITS, **options: Any) -> tuple[str, Runner]:
    told = json.loads((folder / "job.json").read_text())
    with (
        closing(Store(folder / INDEX)) as store,
        closing(Journal(folder / JOURNAL, told["requests"])) as journal,
        Path(told["source"]).open("rb") as source,
    ):
        runner = Runner(
            folder, source, store, journal, Bytes(), target, limits, max_tokens=8, concurrent=4, seed=1, **options
        )
        return runner.run(), runner


def results(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    from kvtool.batch.job import read_job

    told = read_job(folder)
    output = folder.parent / "out.jsonl"
    with closing(Store(folder / INDEX)) as store, closing(Journal.reading(folder / JOURNAL, told.requests)) as journal:
        write_results(told, folder, store, journal, output)
    errors = errors_path(output)
    lines = errors.read_text().splitlines() if errors.exists() else []
    return [json.loads(line) for line in output.read_text().splitlines()], [json.loads(line) for line in lines]


def assert_whole(folder: Path, count: int = COUNT) -> None:
    answered, failed = results(folder)
    assert not failed and [record["custom_id"] for record in answered] == [f"r{number}" for number in range(count)]
    for record, prompt in zip(answered, prompts(count), strict=True):
        assert record["response"]["body"]["choices"][0]["text"] == answer(prompt)


def test_each_request_is_answered_once_in_input_order(job: Path) -> None:
    target = Echo()
    why, runner = run(job, target)
    assert why == "" and sorted(target.started) == list(range(COUNT)) and target.most_running <= 4
    assert runner.counts.done == COUNT and runner.counts.hit_tokens == {"dram": 4 * COUNT}
    assert_whole(job)
    usage = results(job)[0][0]["response"]["body"]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4, "cached_tokens_by_tier": {"dram": 4}}
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2


def test_those_that_begin_alike_run_one_after_the_other(job: Path) -> None:
    target = Echo(slots=1)
    run(job, target)
    heads = [prompts(COUNT)[number][:12] for number in target.started]
    assert sum(one != other for one, other in itertools.pairwise(heads)) < len(set(heads))


def test_what_fails_for_a_passing_reason_is_tried_again(job: Path) -> None:
    def fails(number: int, attempt: int) -> KvtoolError | None:
        return Unavailable("restarting") if attempt < 3 and number % 3 == 0 else None

    why, runner = run(job, Echo(fails=fails))
    assert why == "" and runner.counts.retries == 2 * len(range(0, COUNT, 3))
    assert_whole(job)


def test_what_fails_for_good_is_an_error_of_that_request_alone(job: Path) -> None:
    def fails(number: int, attempt: int) -> KvtoolError | None:
        return {3: RequestRefused("too long"), 5: EngineFailed("NaN")}.get(number)

    target = Echo(fails=fails)
    assert run(job, target)[0] == ""
    answered, failed = results(job)
    assert len(answered) == COUNT - 2
    said = [(one["custom_id"], one["error"]["code"], one["error"]["message"], one["line"]) for one in failed]
    assert said == [("r3", "request_refused", "too long", 4), ("r5", "engine_failed", "NaN", 6)]
    assert target.started.count(3) == 1 and target.started.count(5) == 3


def test_being_told_to_come_later_is_no_attempt_and_lowers_the_pressure(job: Path) -> None:
    refused: list[int] = []

    def fails(number: int, attempt: int) -> KvtoolError | None:
        if number == 7 and attempt <= 6:
            refused.append(attempt)
            return Overloaded("busy", retry_after_s=0.001)
        return None

    why, _ = run(job, Echo(fails=fails))
    assert why == "" and len(refused) == 6
    assert_whole(job)


def test_an_outage_uses_up_no_requests(job: Path) -> None:
    """The target is away for thirty tries in a row, in the middle of the job; the wait doubles up to a limit."""
    tries: list[int] = []

    def fails(number: int, attempt: int) -> KvtoolError | None:
        tries.append(number)
        return Unreachable("no deployment answers") if 10 < len(tries) <= 40 else None

    why, runner = run(job, Echo(fails=fails), Limits(attempts=3, backoff_s=0.001, backoff_s_max=0.01))
    assert why == "" and runner.counts.retries == 30 and runner.counts.failed == 0
    assert_whole(job)


def test_a_request_that_ends_the_target_each_time_is_given_up(job: Path) -> None:
    def fails(number: int, attempt: int) -> KvtoolError | None:
        return Unreachable("it is gone") if number == 7 else None

    target = Echo(fails=fails)
    assert run(job, target, Limits(attempts=2, backoff_s=0.001, backoff_s_max=0.002))[0] == ""
    (failed,) = results(job)[1]
    assert failed["custom_id"] == "r7" and failed["error"] == {"code": "unavailable", "message": "it is gone"}
    assert target.started.count(7) == 20


def test_cancel_leaves_what_is_answered_and_resume_does_the_rest(job: Path) -> None:
    held = set(range(0, COUNT, 2))
    target = Echo(held=held.__contains__)

    def cancelled() -> str:
        if len(target.running) == 4:
            (job / CANCEL).touch()
        return ""

    why, runner = run(job, target, stop=cancelled)
    assert why == "cancelled" and not target.running
    done = runner.counts.done
    answered, failed = results(job)
    assert len(answered) == done and len(failed) == COUNT - done
    assert {one["error"]["code"] for one in failed} == {"not_done"}
    (job / CANCEL).unlink()
    again = Echo()
    assert run(job, again)[0] == ""
    assert len(again.started) == COUNT - done, "what was answered is not run again"
    assert_whole(job)


def test_a_token_budget_stops_the_job_and_a_larger_one_goes_on(job: Path) -> None:
    why, runner = run(job, Echo(), Limits(tokens=20))
    assert why == "the job's 20 tokens are used up" and 10 <= runner.counts.done < COUNT
    assert run(job, Echo(), Limits(tokens=1000))[0] == ""
    assert_whole(job)


def test_the_jobs_time_counts_over_its_runs(job: Path) -> None:
    now = [0.0]

    def later() -> str:
        now[0] += 1.0
        return ""

    limits = Limits(job_s=5.0)
    why, _ = run(job, Echo(held=lambda number: True), limits, stop=later, now_s=lambda: now[0])
    assert why == "the job's time of 5 s is up"
    worked_s = read_progress(job)["seconds"]
    why, _ = run(job, Echo(held=lambda number: True), limits, worked_s=worked_s, now_s=lambda: now[0])
    assert why == "the job's time of 5 s is up"


def test_an_attempt_has_the_requests_time_or_what_the_job_has_left(job: Path) -> None:
    deadlines: list[float] = []

    class Timed(Echo):
        def start(self, ready: Ready, tell: Tell) -> None:
            deadlines.append(ready.deadline_s)
            super().start(ready, tell)

    run(job, Timed(), Limits(request_s=9.0), now_s=lambda: 0.0)
    assert set(deadlines) == {9.0}
    deadlines.clear()
    (job / JOURNAL).write_bytes(b"")
    run(job, Timed(), Limits(request_s=9.0, job_s=5.0), worked_s=2.0, now_s=lambda: 0.0)
    assert set(deadlines) == {3.0}


def test_a_changed_input_stops_the_job_and_it_goes_on_with_the_old_one(job: Path) -> None:
    source = job.parent / "in.jsonl"
    before = source.read_bytes()
    source.write_bytes(before.replace(b'"max_tokens": 4}}', b'"max_tokens": 5}}'))
    target = Echo()
    with pytest.raises(Refused, match=r"line \d+ of the input \('r\d+'\) was changed while the job ran"):
        run(job, target)
    assert not target.started
    source.write_bytes(before)
    assert run(job, Echo())[0] == ""
    assert_whole(job)


def test_nobody_else_may_work_on_it(job: Path) -> None:
    from kvtool.batch.job import is_worked_on, working_on

    assert not is_worked_on(job)
    with working_on(job):
        assert is_worked_on(job)
        with pytest.raises(Refused, match="another process works on this job"), working_on(job):
            pass
    assert not is_worked_on(job)


def test_a_full_disk_stops_the_job_and_it_goes_on_with_room(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.pwrite, [0]

    def full(handle: int, data: bytes, at: int) -> int:
        written[0] += len(data)
        if written[0] > 1500:
            raise OSError(28, "No space left on device")
        return real(handle, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Unavailable, match="No space left on device"):
        run(job, Echo())
    monkeypatch.undo()
    assert 0 < len(results(job)[0]) < COUNT
    assert run(job, Echo())[0] == ""
    assert_whole(job)
