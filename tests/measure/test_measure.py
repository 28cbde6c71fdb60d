from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.measure import facts
from kvtool.measure.processes import Process, cpu_between, family, look
from kvtool.measure.stats import Ratio, percentile, ratio, summarise


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


def test_family_finds_children_of_children_and_what_they_used() -> None:
    """A child starts a grandchild that works for a tenth of a second and then waits for its stdin to close."""
    work = (
        "import time, sys; end = time.process_time() + 0.1\nwhile time.process_time() < end: pass\nprint(1, flush=True)"
    )
    grandchild = f"{work}\nsys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        before = look(process.pid)
        assert process.stdout and process.stdin and before
        process.stdout.readline()
        found = family([process.pid])
        process.stdin.close()
    assert len(found) == 2
    assert found[0].pid == process.pid
    assert found[1].cpu_s >= 0.05  # counted in ticks of the kernel
    assert found[1].resident > 2**20
    assert cpu_between([], found)[found[1].pid] == found[1].cpu_s


def test_reused_pid_is_not_taken_for_the_process_before() -> None:
    old = Process(7, "old", cpu_s=9.0, resident=0, shared=0, started_ticks=1)
    new = Process(7, "new", cpu_s=0.5, resident=0, shared=0, started_ticks=2)
    assert cpu_between([old], [new]) == {7: 0.5}
    assert cpu_between([old], [Process(7, "old", 9.25, 0, 0, 1)]) == {7: 0.25}


def test_process_that_is_gone_is_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert look(process.pid) is None
