"""An environment over this one: what Triton's stub sees is what is installed where the first python3 on PATH is, and
PYTHONPATH means nothing to it."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def overlay(folder: Path, *paths: Path) -> list[str]:
    """The kvtool command of a venv in `folder` that has `paths`, this checkout, and all that is installed here."""
    venv.create(folder, symlinks=True, with_pip=False)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    every = [*paths, REPOSITORY / "toolkit", REPOSITORY / "plugins", Path(sysconfig.get_paths()["purelib"])]
    (site / "here.pth").write_text("".join(f"{path}\n" for path in every))
    return [str(folder / "bin" / "python3"), "-m", "kvtool.cli.main"]
