"""Run kvbench with kvtool among its peers: `scripts/bench-peers KVBENCH [driver|faults|ceilings|table] ARGUMENTS...`

KVBENCH is a folder with kvbench in it, which stays as it is: a copy of it gets our adapter, and its table of peers our
lines. KVBENCH_VENVS says where the other peers' environments are; kvtool's client and pool run in this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
VARIANTS = {
    "kvtool": {},
    "kvtool-view": {"variant": "view"},
    "kvtool-ucx": {"variant": "ucx"},
    "kvtool-socket": {"variant": "socket"},
}


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    source, what, arguments = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if not (source / "kvbench" / "peers.py").is_file():
        print(f"{source}: wanted a folder with kvbench/peers.py in it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        copy = Path(folder)
        shutil.copytree(source, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(HERE / "kvtool_adapter.py", copy / "kvbench" / "adapters" / "kvtool_pool.py")
        lines = "".join(f"PEERS[{name!r}] = ('kvtool_pool', 'kvtool', {opts!r})\n" for name, opts in VARIANTS.items())
        with (copy / "kvbench" / "peers.py").open("a") as table:
            table.write(f"\n{lines}")
        venvs = Path(os.environ.get("KVBENCH_VENVS", Path.home() / ".cache/kvbench/venvs")).absolute()
        (copy / "venvs").mkdir()
        for venv in venvs.iterdir() if venvs.is_dir() else ():
            (copy / "venvs" / venv.name).symlink_to(venv)
        (copy / "venvs" / "kvtool").symlink_to(sys.prefix)
        environment = {**os.environ, "KVBENCH_VENVS": str(copy / "venvs"), "KVTOOL_PATH": str(ROOT / "toolkit")}
        module = [str(HERE / "table.py")] if what == "table" else ["-m", f"kvbench.{what}"]
        environment["PYTHONPATH"] = str(copy)
        return subprocess.run([sys.executable, *module, *arguments], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
