"""How many lines of kvtool's connector the contract's tests run: python tests/contract/coverage_gate.py

Measured by coverage.py over tests/contract (with MPI ranks and threads) and tests/plugins, and printed. Left out, by
name below: what runs on a GPU only, and the device copies, which have tests of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICE = ["build.py", "copies.py", "kernel.py", "packing.py", "pieces.py", "selfcheck.py", "twin.py"]
"""Device copies: CUDA, its build, and their twin."""
ONLY_ON_GPU = ("class Cuda:", "return Cuda(")
"""Lines, with what is indented below them, that need a GPU."""


def settings(folder: Path) -> Path:
    path = folder / "coveragerc"
    left = "\n    ".join(f"{ROOT}/plugins/kvtool_trtllm/{name}" for name in [*DEVICE, "gpucheck/*"])
    never = [r"pragma: no cover", "if TYPE_CHECKING:", r"\.\.\.$", *(only.replace("(", r"\(") for only in ONLY_ON_GPU)]
    path.write_text(
        f"[run]\nsource = {ROOT}/plugins/kvtool_trtllm\nparallel = true\ndata_file = {folder}/data\n"
        f"patch = subprocess\nconcurrency = thread\n[report]\nomit =\n    {left}\nshow_missing = true\n"
        f"exclude_lines =\n    " + "\n    ".join(never) + "\n"
    )
    return path


def measure(folder: Path, *tests: str) -> str:
    """The report, a line for each file; the tests must pass."""
    rc, env = settings(folder), dict(os.environ)
    env["PYTHONPATH"] = f"{ROOT}/toolkit:{ROOT}/plugins"
    pytest = [
        sys.executable,
        "-m",
        "coverage",
        "run",
        f"--rcfile={rc}",
        "-m",
        "pytest",
        "-q",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
    ]
    subprocess.run([*pytest, f"--basetemp={folder}/tests", *tests], cwd=ROOT, env=env, check=True, timeout=1500)
    subprocess.run([sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={rc}"], cwd=ROOT, check=True)
    report = [sys.executable, "-m", "coverage", "report", f"--rcfile={rc}"]
    return subprocess.run(report, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(measure(Path(folder), *(sys.argv[1:] or ["tests/contract", "tests/plugins"])))
