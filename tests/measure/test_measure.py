from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.measure import facts
from kvtool.measure.processes import cpu_between, settle, watch
from kvtool.measure.stats import Ratio, percentile, ratio, summarise
from kvtool.triton.process import Process


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=400), st.floats(0.001, 1.0))
def test_percentile_is_a_sample_that_the_stated_share_does_not_exceed(samples: list[float], share: float) -> None:
    found = percentile(samples, share)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= share * len(samples) - 1e-6
    assert sum(sample < found for sample in samples) < share * len(samples) + 1e-6


def test_summary_of_one_to_a_hundred() -> None:
    assert summarise(range(1, 101)).to_json() == {"count": 100, "median": 50, "p90": 90, "p99": 99, "max": 100}


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match=r"share lies in \(0, 1\], got 99"):
        percentile([1.0], 99)


def test_ratio_pairs_neighbours_so_that_a_slow_minute_falls_on_both() -> None:
    assert ratio([2.0, 20.0, 4.0], [1.0, 10.0, 2.0]) == Ratio(2.0, 2.0, 2.0)
    assert str(ratio([1.0, 3.0], [1.0, 2.0])) == "1.00x (1.00 to 1.50)"
    with pytest.raises(ValueError, match="got 2 and 1"):
        ratio([1.0, 2.0], [1.0])


def test_facts_name_what_is_needed_to_run_it_again_and_not_this_machine() -> None:
    found = facts.facts(["kvtool", "bench"], seed=7)
    assert found["command"] == "kvtool bench"
    assert found["seed"] == 7
    assert found["versions"]["python"].startswith("3.")
    assert found["hardware"]["cores"] >= 1
    assert os.uname().nodename not in str(found) or os.uname().nodename in ("linux", "localhost")


def test_watch_finds_the_grandchild_by_its_mark_and_what_it_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child starts a grandchild that works until the look is over; both carry the mark of the deployment."""
    work = "print(1, flush=True)\nwhile True: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    environ = {**os.environ, "KVTOOL_DEPLOYMENT": f"test-{os.getpid()}"}
    command = [sys.executable, "-c", child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, start_new_session=True) as process:
        try:
            assert process.stdout
            process.stdout.readline()
            costs = watch(f"test-{os.getpid()}", 0.5)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert len(costs) == 2
    assert costs[0].cpu_s < costs[1].cpu_s
    assert costs[1].resident > 2**20
    assert settle(f"test-{os.getpid()}", timeout_s=5.0, window_s=0.05), "nothing of it runs any more"


def test_reused_pid_is_not_taken_for_the_process_before() -> None:
    def process(started_ticks: int, cpu_s: float) -> Process:
        return Process(7, 1, 7, "S", started_ticks, cpu_s, 0, "it")

    assert cpu_between([process(1, 9.0)], [process(2, 0.5)]) == {7: 0.5}
    assert cpu_between([process(1, 9.0)], [process(1, 9.25)]) == {7: 0.25}
