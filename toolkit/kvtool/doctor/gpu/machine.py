"""Facts of the machine that a report may carry: kinds and versions, and nothing that names it."""

from __future__ import annotations

import getpass
import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from kvtool.doctor.gpu.report import Scrub

PACKAGES = (
    "kvtool", "tensorrt_llm", "tensorrt", "torch", "triton", "numpy", "transformers", "mpi4py", "nixl", "nixl-cu12",
    "nixl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "cuda-python", "tritonclient",
)  # fmt: skip
_QUERY = ("name", "memory.total", "driver_version", "compute_cap", "ecc.mode.current", "mig.mode.current")
_NVIDIA_SMI_S = 20.0


def machine() -> dict[str, Any]:
    """Kinds of CPU, GPU and system, and versions of what matters here."""
    return {
        "system": f"{_system()}, kernel {platform.release().split('-')[0]}, {platform.machine()}, glibc "
        f"{platform.libc_ver()[1]}",
        "python": platform.python_version(),
        "cpu": f"{_cpu()}, {os.cpu_count()} threads",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "gpus": gpus() or "none",
        "packages": ", ".join(f"{name} {version}" for name, version in _versions().items()) or "none",
    }


def gpus() -> list[str]:
    """One line for each GPU that nvidia-smi lists; empty where it cannot be asked."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if ran.returncode:
        return []
    return [line.strip() for line in ran.stdout.splitlines() if line.strip()]


def scrub(work: Path) -> Scrub:
    """Of this host's names, this user's, and the paths of home and of the check's own directory."""
    host = socket.gethostname()
    names = {host: "<host>", host.partition(".")[0]: "<host>", socket.getfqdn(): "<host>"}
    names.pop("localhost", None)
    try:
        names[getpass.getuser()] = "<user>"
    except (KeyError, OSError):
        pass
    names.pop("root", None)  # says nothing, and is in many a path
    return Scrub({**names, str(Path.home()): "~", str(Path.cwd()): "<here>", str(work): "<work>"})


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return platform.system()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
