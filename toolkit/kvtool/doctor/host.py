"""The machine as the doctor sees it: facts that are cheap to read, and a way to run a probe under a deadline."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

PROBE_S = 60.0
"""Longest time that one probe may take."""


@dataclass(frozen=True)
class Ran:
    """How a probe ended; `code` None: stopped at its deadline. `text`: its output, of Python probes the last line."""

    code: int | None
    text: str


@dataclass(frozen=True)
class Host:
    """The machine as the checks see it. `version` gives an installed package's version, `run` runs a probe."""

    python: tuple[int, int, int]
    machine: str
    glibc: tuple[int, ...]
    libpython: Path
    site_packages: Path
    bin: Path
    shm: Path
    shm_free: int
    memlock: float
    files: float
    environ: Mapping[str, str]
    version: Callable[[str], str | None]
    run: Callable[[Sequence[str]], Ran]
    executable: str = field(default=sys.executable)

    def which(self, name: str) -> str | None:
        """`name` on PATH, else beside this Python."""
        return shutil.which(name, path=self.environ.get("PATH", "")) or shutil.which(name, path=str(self.bin))

    def python_probe(self, code: str, *arguments: str) -> Ran:
        return self.run([self.executable, "-c", code, *arguments])


def this_host() -> Host:
    shm = Path("/dev/shm")
    libdir, soname = (sysconfig.get_config_var(key) or "" for key in ("LIBDIR", "INSTSONAME"))
    return Host(
        python=sys.version_info[:3],
        machine=platform.machine(),
        glibc=numbers(platform.libc_ver()[1]),
        libpython=Path(libdir, soname),
        site_packages=Path(sysconfig.get_paths()["purelib"]),
        bin=Path(sys.executable).parent,
        shm=shm,
        shm_free=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        environ=dict(os.environ),
        version=_installed_version,
        run=run_probe,
    )


def run_probe(command: Sequence[str]) -> Ran:
    """Run `command` in a process group of its own and end the whole group at the deadline."""
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    except OSError as error:
        return Ran(127, str(error))
    try:
        output, _ = process.communicate(timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Ran(None, "")
    is_python = len(command) > 1 and command[1] == "-c"
    lines = output.strip().splitlines()
    return Ran(process.returncode, (lines[-1] if lines else "") if is_python else output.strip())


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _limit(kind: int) -> float:
    soft, _ = resource.getrlimit(kind)
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def numbers(version: str) -> tuple[int, ...]:
    """(1, 26, 4) of "1.26.4"; stops at the first part that is no number."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
