"""Where the folders that ship with kvtool lie: engine recipes and Triton models.

They stand at the top of the repository, since people read them more than they import them. A wheel carries copies
inside the package; a checkout (editable install) uses the originals. Callers ask here and never build the path.
"""

from __future__ import annotations

from pathlib import Path

from kvtool.errors import Missing

ASSETS = ("engines", "triton_models")
SHIPPED = "shipped"
"""Folder inside the installed package; `setup.py` fills it when a wheel is built."""


def asset_dir(name: str) -> Path:
    """The folder `name`, one of `ASSETS`. Read-only: it may belong to another user.

    Raises:
        ValueError: not one of `ASSETS`.
        Missing: the installation is incomplete.
    """
    if name not in ASSETS:
        raise ValueError(f"wanted one of {', '.join(ASSETS)}, got {name!r}")
    package = Path(__file__).resolve().parent
    shipped, checkout = package / SHIPPED / name, package.parents[1] / name
    for folder in (shipped, checkout):
        if folder.is_dir():
            return folder
    raise Missing(
        f"kvtool's folder {name!r} is missing (looked in {shipped} and {checkout}); "
        "install kvtool again: pip install --force-reinstall --no-deps kvtool"
    )
