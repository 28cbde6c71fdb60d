"""Run one command of a build: its lines as they come, and no process of it left when this returns.

A process that imports tensorrt_llm may hang in MPI or CUDA before it says a word, so the first line has a deadline of
its own; later ones may be long apart, since TensorRT compiles in silence. The command runs in a session of its own, and
the whole session goes when the build ends, fails or is cancelled.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from kvtool.engine.trtllm.commands import Command
from kvtool.errors import BuildFailed, EngineRefused

FIRST_LINE_S = 300.0
SILENCE_S = 3600.0
END_S = 10.0
TAIL = 12
_PR_SET_PDEATHSIG = 1

Log = Callable[[str], None]


def run(
    command: Command,
    environment: Mapping[str, str],
    scratch: Path,
    log: Log,
    step: Callable[[int], None],
    *,
    first_line_s: float = FIRST_LINE_S,
    silence_s: float = SILENCE_S,
) -> None:
    """Run `command` in `scratch` to its end. `step` is told how many ranks' files there are, after each line.

    Raises:
        EngineRefused: its program is not there.
        BuildFailed: it said nothing in time, ended with an error, or made no whole set of files.
    """
    process = _start(command, environment, scratch)
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
    reader.start()
    tail: deque[str] = deque(maxlen=TAIL)
    try:
        wait_s = first_line_s
        while (line := _next(lines, wait_s, command, tail)) is not None:
            wait_s = silence_s
            tail.append(line)
            log(line)
            step(len(made(command)))
        if not _exited(process, END_S):
            raise BuildFailed(f"{command.title}: closed its output and did not end within {END_S:.0f} s")
    finally:
        code = _end(process)
        reader.join(END_S)
    if code:
        said = "\n  ".join(tail) or "nothing"
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise BuildFailed(f"{command.title}: ended with {how}; its last lines were:\n  {said}")
    there = made(command)
    if len(there) != command.ranks:
        raise BuildFailed(
            f"{command.title}: ended well, but wanted {command.makes.format('0..' + str(command.ranks - 1))} in "
            f"{command.directory}, found {len(there)} of {command.ranks}; is the checkpoint split for this world size?"
        )


def made(command: Command) -> list[Path]:
    """The ranks' files that are there, none of them empty."""
    paths = [command.directory / command.makes.format(rank) for rank in range(command.ranks)]
    return [path for path in paths if path.is_file() and path.stat().st_size]


def _start(command: Command, environment: Mapping[str, str], scratch: Path) -> subprocess.Popen[bytes]:
    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    try:
        return subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise EngineRefused(f"{command.title}: cannot start {command.argv[0]}: {error.strerror}") from None


def _read(process: subprocess.Popen[bytes], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for raw in process.stdout:
            lines.put(raw.decode(errors="replace").rstrip())
    lines.put(None)


def _next(lines: queue.Queue[str | None], wait_s: float, command: Command, tail: deque[str]) -> str | None:
    try:
        return lines.get(timeout=wait_s)
    except queue.Empty:
        if tail:
            raise BuildFailed(
                f"{command.title}: silent for {wait_s:.0f} s, after: {tail[-1]}; it was ended. Look at GPU memory and "
                "whether other processes hold the GPUs"
            ) from None
        raise BuildFailed(
            f"{command.title}: said nothing for {wait_s:.0f} s after its start, and was ended; importing tensorrt_llm "
            "hangs where MPI or CUDA is set up wrong: try it alone, python3 -c 'import tensorrt_llm'"
        ) from None


def _exited(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Whether the leader ends within `wait_s`. It is not reaped, so its number stays the session's."""
    ends_s = time.monotonic() + wait_s
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() >= ends_s:
            return False
        time.sleep(0.01)
    return True


def _end(process: subprocess.Popen[bytes]) -> int:
    """End whatever is left of the session: ask a leader that lives, wait, insist. Returns its exit status."""
    if not _exited(process, 0.0):
        os.killpg(process.pid, signal.SIGTERM)
        _exited(process, END_S)
    os.killpg(process.pid, signal.SIGKILL)  # workers that outlived it, too
    return process.wait(END_S)
