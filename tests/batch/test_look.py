"""What a person sees of a job: honest numbers, in words, and nothing that is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtool.batch.look import Pace, duration, eta_s, line, look_rows, rates, summary, summary_rows, unanswered
from kvtool.batch.run import Counts
from kvtool.batch.work import Worked
from kvtool.cli import batch_show


def record(tokens_in: int, hits: int, prefill_s: float | None = None) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": tokens_in, "completion_tokens": 5, "hit_tokens": {"dram": hits}}
    return {"usage": usage if prefill_s is None else {**usage, "prefill_s": prefill_s}}


def worked(counts: Counts, failed: int = 0) -> Worked:
    return Worked(counts, "", counts.done, failed, Path("out.jsonl"))


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(-1, "0.0 s"), (9.94, "9.9 s"), (61, "1 min 01 s"), (3599.6, "1 h 00 min"), (90061, "25 h 01 min")],
)
def test_durations_in_words(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_what_reuse_saved_is_by_the_rate_of_what_was_computed() -> None:
    counts = Counts(requests=3, seconds=10.0)
    for one in (record(100, 0, 2.0), record(100, 80, 0.5)):
        counts.add(one)
    assert counts.saved_s == pytest.approx(80 * 2.5 / 120)
    said = dict(summary_rows(worked(counts)))
    assert said["prompt tokens"] == "200, of these 80 (40%) reused: 80 from dram"
    assert said["reuse saved"] == "about 1.7 s of computing" and said["left"] == "1"
    assert summary(worked(counts))["reuse_saved_s"] == 1.67


def test_what_is_not_known_is_not_said() -> None:
    counts = Counts(requests=1, seconds=10.0)
    counts.add(record(100, 100))  # no time was told, and nothing computed to know a rate by
    said = dict(summary_rows(worked(counts)))
    assert "reuse saved" not in said and counts.saved_s == 0.0
    assert not {"failed for good", "left", "tried again", "lines without one"} & said.keys()
    assert eta_s(Counts(requests=5)) is None and rates(Counts(requests=5)) == "starting"


def test_lines_without_an_answer_are_said_with_the_place_of_their_reasons() -> None:
    counts = Counts(requests=2, seconds=1.0, retries=4)
    counts.add({"error": {"code": "deadline_passed", "message": "late"}})
    said = dict(summary_rows(worked(counts, failed=2)))
    assert said["failed for good"] == "1" and said["tried again"] == "4"
    assert said["lines without one"] == "2, with reasons in out.errors.jsonl"


def test_a_bar_says_pace_hits_and_what_is_left() -> None:
    counts = Counts(requests=10, done=4, run_done=4, run_seconds=8.0, tokens_in=10, hit_tokens={"dram": 5})
    assert rates(counts) == "0.50 requests/s, hit 50%, 12.0 s left"


def test_before_the_first_answer_there_is_no_rate_and_a_slow_one_is_by_the_minute() -> None:
    assert rates(Counts(requests=10, running=4, run_seconds=9.0)) == "4 running"
    slow = Counts(requests=10, done=1, run_done=1, run_seconds=20.0, failed=1)
    assert rates(slow) == "3.0 requests/min, hit 0%, 2 min 40 s left, 1 failed"
    assert line(slow).startswith("2 of 10 requests are over, 3.0 requests/min")


def test_without_a_terminal_lines_come_at_once_and_then_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = Pace(0.0)
    came = [second for second in range(3601) if pace.due(float(second))]
    assert came[:3] == [10, 20, 30] and came[-1] - came[-2] > 300 and len(came) < 60
    now_s = [0.0]
    monkeypatch.setattr(batch_show.time, "monotonic", lambda: now_s[0])
    with batch_show.checking() as checked, batch_show.working(False) as tell:
        checked(1, 2)
        for now_s[0] in (1.0, 11.0, 12.0):
            tell(Counts(requests=10, running=4))
    said = capsys.readouterr()
    assert said.err == "• 0 of 10 requests are over, 4 running\n" and said.out == ""


def test_lines_without_an_answer_are_counted_by_kind(tmp_path: Path) -> None:
    kinds = ["not_done", "deadline_passed", "not_done"]
    lines = "".join(f'{{"custom_id": "a", "error": {{"code": "{kind}", "message": "x"}}}}\n' for kind in kinds)
    (tmp_path / "out.errors.jsonl").write_text(lines)
    said = unanswered(Worked(Counts(requests=3), "", 0, 3, tmp_path / "out.jsonl"))
    assert said == f"3 lines have no answer (2 not_done, 1 deadline_passed); why: {tmp_path / 'out.errors.jsonl'}"


def test_a_stopped_job_says_how_to_go_on() -> None:
    found = {
        "job": "out.job", "state": "stopped", "requests": 10, "answered": 3, "failed": 1, "running": 0,
        "rejected_lines": 2, "requests_s": 0.5, "hit_ratio": 0.25, "generated_tokens": 9, "seconds": 70.0,
        "left_s": None, "told_s_ago": 1.0, "where": "engine", "output": "out.jsonl",
    }  # fmt: skip
    said = dict(look_rows(found))
    assert said["over"] == "4 of 10 requests" and said["go on with"] == "kvtool batch resume out.job"
    assert said["worked"] == "1 min 10 s" and said["lines that are none"] == "2" and "left" not in said
    said = dict(look_rows({**found, "state": "running", "running": 2, "left_s": 30.0}))
    assert "go on with" not in said and said["left"] == "about 30.0 s" and said["running now"] == "2"
