"""Which deployment a command means: by its spec, by its run directory, or the default one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtool.errors import SpecRefused

if TYPE_CHECKING:
    from kvtool.config.spec import Spec

SpecArgument = Annotated[Path, typer.Argument(help="The deployment spec, a YAML file.", show_default=False)]
SpecOption = Annotated[Path | None, typer.Option("--spec", help="Spec of the deployment meant.", show_default=False)]
RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="Run directory of the deployment meant.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override one key, such as pool.ranks=3. Repeatable."),
]


def overrides(settings: Sequence[str] | None) -> dict[str, str]:
    """Raises SpecRefused: one of them is not KEY=VALUE."""
    given = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise SpecRefused(f"--set {setting}: wanted KEY=VALUE, such as pool.ranks=3")
        given[key.strip()] = value
    return given


def read_spec(path: Path, settings: Sequence[str] | None = None) -> Spec:
    from kvtool.config.load import load_spec

    return load_spec(path, overrides(settings))[0]


def run_dir_of(spec: Path | None, run_dir: Path | None) -> Path:
    """The run directory meant; that of the default name when nothing is given."""
    from kvtool.config.spec import Spec, default_run_dir

    if run_dir is not None:
        return run_dir.absolute()
    if spec is not None:
        return read_spec(spec).state_dir
    return default_run_dir(str(Spec.model_fields["name"].default))
