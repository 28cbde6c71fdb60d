"""Windows with and without a job: the same arrivals, other texts, and figures that are of what was seen."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvtool.batch.job import write_progress
from kvtool.errors import Unavailable
from kvtool.measure.batch_online import Job, Seen, Texts, Window, arrivals, order, summary, write_job


def count(text: str) -> int:
    return len(text.split())


def test_a_pairs_windows_have_the_same_arrivals_and_another_pair_has_others() -> None:
    assert arrivals(1, 0, 50, 2.0) == arrivals(1, 0, 50, 2.0)
    assert arrivals(1, 0, 50, 2.0) != arrivals(1, 1, 50, 2.0)
    assert order(3) == [False, True, True, False, False, True]


def test_arrivals_are_poisson_at_the_rate_asked_for() -> None:
    due = [arrival.at_s for arrival in arrivals(3, 0, 20000, 4.0)]
    gaps = [later - earlier for earlier, later in zip([0.0, *due], due, strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.25, rel=0.05) and spread == pytest.approx(mean, rel=0.05)


def test_texts_are_new_but_for_what_a_window_shares() -> None:
    texts, due = Texts(1, count), arrivals(1, 0, 40, 1.0)
    made = [[texts.of(window, arrival) for arrival in due] for window in range(2)]
    assert len({text for window in made for text in window}) == 80
    for window in made:
        heads = {tuple(text.split()[:40]) for text, arrival in zip(window, due, strict=True) if arrival.head == 0}
        assert len(heads) == 1
    firsts = [{text.split()[0] for text in window} for window in made]
    assert not firsts[0] & firsts[1]


def test_a_made_job_is_one_that_batch_takes(tmp_path: Path) -> None:
    from kvtool.batch.line import read_line

    write_job(tmp_path / "job.jsonl", Texts(1, count), 1)
    lines = [read_line(raw) for raw in (tmp_path / "job.jsonl").read_bytes().splitlines()]
    assert len({line.custom_id for line in lines}) == 400


def test_the_ratio_is_of_the_p99s_and_a_failure_is_counted() -> None:
    def window(with_job: bool, *ttfts: float, **more: float) -> Window:
        seen = [Seen(0.0, (ttft, ttft + 0.1), 10, 5, {"prefill queue": ttft / 2}) for ttft in ttfts]
        return Window(0, with_job, 10.0, seen, **more)  # type: ignore[arg-type]

    loud = window(True, 0.3, 0.6, finished=4, generated=40, stalled_s=3.0)
    loud.seen.append(Seen(0.0, error="Overloaded: full"))
    found = summary([window(False, 0.2, 0.4), loud, window(True, 0.1, finished=2, stalled_s=5.0)])
    assert found["ttft_p99_ratio"] == pytest.approx(1.5)
    assert found["online"]["with"]["failed"] == 1 and found["online"]["without"]["failed"] == 0
    assert found["online"]["with"]["ttft_ms"]["count"] == 3
    assert found["online"]["without"]["tbt_ms"]["median"] == pytest.approx(100)
    assert found["online"]["without"]["stages_ms"]["prefill queue"]["p99"] == pytest.approx(200)
    assert found["batch"]["finished"] == 6 and found["batch"]["longest_without_progress_s"] == 5.0
    json.dumps(found)
    with pytest.raises(Unavailable, match="Overloaded: full"):
        summary([Window(0, False, 1.0, [Seen(0.0, error="Overloaded: full")])])


def test_what_a_job_does_in_a_window_is_counted_from_its_beginning(tmp_path: Path) -> None:
    write_progress(tmp_path, {"done": 3, "tokens_out": 30, "running": 2})
    job = Job(tmp_path)
    assert job.runs()
    job.begin()
    write_progress(tmp_path, {"done": 5, "tokens_out": 50, "running": 2})
    finished, generated, stalled_s = job.end()
    assert (finished, generated) == (2, 20) and 0 <= stalled_s < 10
