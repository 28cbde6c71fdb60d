"""What a deployment could leave on a machine: processes, and names in /dev/shm."""

from __future__ import annotations

from pathlib import Path

PROGRAMS = ("tritonserver", "triton_python_backend_stub", "mpiexec", "prterun", "prted")
MODULES = ("kvtool.pool.rank", "kvtool.triton.supervise")


def leftovers(run_dir: Path, prefixes: set[str]) -> set[str]:
    """Processes that name `run_dir` on their command line, and shared memory whose name begins with one of `prefixes`.
    Other deployments of the same machine are none of our business."""
    found = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(prefixes))}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            program = words[0].rsplit("/", 1)[-1]
            ours = program in PROGRAMS or any(word in MODULES for word in words[1:4])
            if ours and any(str(run_dir) in word for word in words):
                found.add(f"process {entry.name}: {' '.join(words)[:120]}")
    return found
