"""What stands under every table of results: hardware, versions, commit, command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtool import __version__
from kvtool.units import show_size

PACKAGES = ("torch", "numpy", "nvidia-pytriton", "tritonclient", "openmpi", "mpi4py", "nixl-cu13", "xxhash", "blake3")


def facts(command: Sequence[str], seed: int) -> dict[str, Any]:
    """Everything needed to run it again. No host name and no path of this machine."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(command),
        "seed": seed,
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
    }


def hardware() -> dict[str, Any]:
    return {
        "cpu": _field("/proc/cpuinfo", r"model name\s*:\s*(.+)") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": show_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "kernel": platform.release(),
        "gpu": "none" if not Path("/proc/driver/nvidia/version").exists() else "NVIDIA",
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    found = {"kvtool": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checkout's commit, with "+changes" when files differ from it; "unknown" for an installed wheel."""
    root = Path(__file__).resolve().parents[3]
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        ran = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip() if ran.returncode == 0 else ""


def _field(path: str, pattern: str) -> str:
    found = (
        re.search(pattern, Path(path).read_text(encoding="utf-8", errors="replace")) if Path(path).exists() else None
    )
    return found[1].strip() if found else ""
