"""What a deployment could leave on a machine: processes of ours, and names in /dev/shm."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = ("tritonserver", "triton_python_backend_stub", "mpiexec", "prterun", "prted")
MODULES = ("kvtool.pool.rank", "kvtool.triton.supervise")
SHM = ("kvt-", "kvtool-", "sm_segment", "vader_segment", "psm3", "ucx_shm")


def leftovers() -> set[str]:
    found = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir() if path.name.startswith(SHM)}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            program = words[0].rsplit("/", 1)[-1]
            if program in PROGRAMS or any(word in MODULES for word in words[1:4]):
                found.add(f"process {entry.name}: {' '.join(words)[:120]}")
    return found
