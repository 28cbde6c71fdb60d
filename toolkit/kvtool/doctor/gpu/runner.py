"""Runs one step in a process of its own, and believes it only so far as its account holds.

A step gets a number that it must repeat, writes its account to a file, and ends with 0. Whatever else happens is a
failure with its cause: it hung and was killed, crashed, ended without an account, or left another step's. What it
started ends with it: its process group, and every process that still carries its number in the environment.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtool.doctor.gpu.report import Result, Scrub, Status, Step, judge
from kvtool.engine.trtllm.llm import clean_environment

MARK = "KVTOOL_GPU_CHECK"
LOG_LINES = 25
_LOG_BYTES = 64 * 1024
_END_S = 5.0


def command(step: str, work: Path, options: Mapping[str, Any]) -> list[str]:
    """The process of a step: the plugin's steps, by name only, as nothing in kvtool imports plugins."""
    return [sys.executable, "-m", "kvtool_trtllm.gpucheck", step, str(work), json.dumps(dict(options))]


def run_step(step: Step, argv: Sequence[str], work: Path, scrub: Scrub, timeout_s: float | None = None) -> Result:
    """Run `argv` as `step`. `work`: a directory of the check's own, where account and log are written.

    Never raises for what the step does; the longest it takes is its timeout and a few seconds.
    """
    limit_s, number, began_s = timeout_s or step.timeout_s, secrets.token_hex(8), time.monotonic()
    account, log = work / f"{step.name}.json", work / f"{step.name}.log"
    account.unlink(missing_ok=True)
    environment = {**os.environ, MARK: number, f"{MARK}_ACCOUNT": str(account)}
    clean_environment(environment)
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=work,
            )
        except OSError as error:
            return Result(step.name, Status.FAIL, scrub(f"could not be started: {error}"))
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            left = _end(process, number)
    seconds = time.monotonic() - began_s
    result = _judged(step, code, limit_s, account, number, seconds)
    if result.status is Status.PASS and left:
        result = Result(step.name, Status.FAIL, f"left {left} processes running, which were ended", seconds)
    return _scrubbed(result, log, scrub)


def _judged(step: Step, code: int | None, limit_s: float, account: Path, number: str, seconds: float) -> Result:
    def failed(detail: str) -> Result:
        return Result(step.name, Status.FAIL, detail, seconds)

    if code is None:
        return failed(f"did not end within {limit_s:g} s and was killed")
    if code < 0:
        return failed(f"crashed: {signal.Signals(-code).name}")
    try:
        claim: Any = json.loads(account.read_text(encoding="utf-8"))
    except OSError:
        return failed(f"ended with exit code {code} and without an account")
    except ValueError as error:
        return failed(f"its account is damaged: {error}")
    if not isinstance(claim, dict) or claim.get("number") != number or claim.get("step") != step.name:
        return failed("its account is not of this run")
    result = judge(step, claim, seconds)
    if code and result.status is not Status.FAIL:
        return failed(f"says {claim.get('status')}, but ended with exit code {code}")
    return result


def _end(process: subprocess.Popen[bytes], number: str) -> int:
    """End the step and all that it started. How many processes of a step that ended by itself were still there after
    _END_S."""
    until_s, alone = time.monotonic() + _END_S, process.poll() is not None
    while alone and marked(number) and time.monotonic() < until_s:
        time.sleep(0.05)  # what was told to end may take a moment
    left = marked(number)
    _signal_group(process.pid)
    until_s = time.monotonic() + _END_S
    while process.poll() is None or marked(number):
        for pid in marked(number):
            _kill(pid)
        if time.monotonic() >= until_s:
            break
        time.sleep(0.02)
    return len(left) if alone else 0


def marked(number: str) -> list[int]:
    """Processes that carry the number of a step in their environment. Zombies carry none."""
    wanted, found = f"{MARK}={number}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _signal_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _scrubbed(result: Result, log: Path, scrub: Scrub) -> Result:
    lines: tuple[str, ...] = ()
    if result.status is Status.FAIL:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            raw = file.read().decode("utf-8", "replace")
        lines = tuple(scrub(line[:400]) for line in raw.splitlines()[-LOG_LINES:])
    return Result(
        result.name, result.status, scrub(result.detail), result.seconds, scrub.value(dict(result.evidence)), lines
    )
