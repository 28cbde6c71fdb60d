"""Steps that hang, crash, lie and leave things behind: each is a failure with its cause, within its time."""

import os
import sys
import time
from pathlib import Path

import pytest

from kvtool.doctor.gpu.report import Result, Scrub, Status, Step
from kvtool.doctor.gpu.runner import MARK, marked, run_step

STEP = Step("copy", "bytes come back", 20, {"bytes": 8})
TELL = """
import json, os, sys, time, subprocess, signal
number, path = os.environ["KVTOOL_GPU_CHECK"], os.environ["KVTOOL_GPU_CHECK_ACCOUNT"]
def tell(status="pass", detail="well", number=number, step="copy", evidence={"bytes": 8}):
    open(path, "w").write(json.dumps(dict(number=number, step=step, status=status, detail=detail, evidence=evidence)))
"""


def run(work: Path, body: str, timeout_s: float = 20.0) -> Result:
    return run_step(STEP, [sys.executable, "-c", TELL + body], work, Scrub({"secret-host": "<host>"}), timeout_s)


def test_an_honest_step_passes_with_its_evidence(tmp_path: Path) -> None:
    result = run(tmp_path, "tell()")
    assert (result.status, dict(result.evidence), result.log) == (Status.PASS, {"bytes": 8}, ())


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("", "ended with exit code 0 and without an account"),
        ("sys.exit(4)", "ended with exit code 4 and without an account"),
        ("tell(); sys.exit(4)", "says pass, but ended with exit code 4"),
        ("tell('skip', 'no GPU'); sys.exit(4)", "says skip, but ended with exit code 4"),
        ("tell('fail', 'torn'); sys.exit(1)", "torn"),
        ("tell('fail', 'torn')", "torn"),
        ("tell(); os.kill(os.getpid(), signal.SIGSEGV)", "crashed: SIGSEGV"),
        ("tell(number='0')", "its account is not of this run"),
        ("tell(step='other')", "its account is not of this run"),
        ("tell(evidence={})", "says that it passed, but bytes is missing"),
        ("open(path, 'w').write('{\"numb')", "its account is damaged"),
        ("open(path, 'w').write('[]')", "its account is not of this run"),
        ("print('PASS')", "without an account"),
        ("raise RuntimeError('boom')", "ended with exit code 1 and without an account"),
    ],
)
def test_a_step_that_lies_or_breaks_is_a_failure(tmp_path: Path, body: str, sentence: str) -> None:
    result = run(tmp_path, body)
    assert result.status is Status.FAIL
    assert sentence in result.detail


def test_an_account_of_an_earlier_run_is_not_believed(tmp_path: Path) -> None:
    assert run(tmp_path, "tell()").status is Status.PASS
    assert "without an account" in run(tmp_path, "").detail


def test_a_skip_needs_a_reason(tmp_path: Path) -> None:
    assert run(tmp_path, "tell('skip', 'no GPU', evidence={})").status is Status.SKIPPED
    assert run(tmp_path, "tell('skip', '', evidence={})").status is Status.FAIL


def test_a_step_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    """The grandchild is in a session of its own, as MPI's are, and ignores what asks politely."""
    body = """
tell()
sleeper = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
open("child", "w").write(str(child.pid))
print(number, flush=True)
time.sleep(600)
"""
    began_s = time.monotonic()
    result = run(tmp_path, body, timeout_s=3.0)
    assert time.monotonic() - began_s < 15
    assert result.status is Status.FAIL
    assert result.detail == "did not end within 3 s and was killed"
    number = result.log[-1]
    assert len(number) == 16
    assert not marked(number)
    status = Path(f"/proc/{(tmp_path / 'child').read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text(), (
        "ended, if perhaps not yet reaped by its new parent"
    )


def test_what_a_step_leaves_running_is_ended_and_is_a_failure(tmp_path: Path) -> None:
    body = "tell(); subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    result = run(tmp_path, body)
    assert (result.status, result.detail) == (Status.FAIL, "left 1 processes running, which were ended")


def test_the_log_of_a_failure_is_short_and_scrubbed(tmp_path: Path) -> None:
    result = run(tmp_path, "print('x' * 1000)\nfor n in range(100): print(n, 'on secret-host')\nsys.exit(1)")
    assert len(result.log) == 25
    assert result.log[-1] == "99 on <host>"


def test_a_step_that_cannot_be_started_is_a_failure(tmp_path: Path) -> None:
    result = run_step(STEP, [str(tmp_path / "absent")], tmp_path, Scrub({}))
    assert result.status is Status.FAIL
    assert "could not be started" in result.detail


def test_a_step_does_not_inherit_an_mpi_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("PMIX_RANK", "0")
    found = "sum(name.startswith(('OMPI_COMM', 'PMIX_')) for name in os.environ)"
    assert run(tmp_path, f"tell(detail=str({found}))").detail == "0"
    assert MARK not in os.environ
