"""Engine recipes: `kvtool build smollm2-135m` instead of a path.

A recipe is a YAML file in `engines/` that says where a checkpoint is found and how it is built. A checkpoint inside an
installed Python package is found through the package's file list, without importing the package.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtool.assets import asset_dir
from kvtool.errors import CheckpointRefused, Missing

SUFFIXES = (".yaml", ".yml")


class PackageSource(BaseModel):
    """A checkpoint that an installed distribution carries."""

    model_config = ConfigDict(extra="forbid")

    distribution: str
    """As pip names it."""
    file: str
    """Path inside site-packages."""
    install: str
    """The line that installs it."""


class Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"[a-z0-9][a-z0-9._-]*")
    description: str
    target: str = "torch"
    block_tokens: int = Field(default=32, ge=1)
    package: PackageSource

    def source(self) -> Path:
        """Where the checkpoint lies on this machine.

        Raises:
            Missing: the package is not installed, or without that file.
        """
        wanted = self.package
        try:
            distribution = metadata.distribution(wanted.distribution)
        except metadata.PackageNotFoundError:
            raise Missing(
                f"recipe {self.name}: the Python package {wanted.distribution}, which carries the checkpoint, is not "
                f"installed; run: {wanted.install}"
            ) from None
        path = Path(str(distribution.locate_file(wanted.file)))
        if not path.is_file():
            raise Missing(
                f"recipe {self.name}: {wanted.distribution} {distribution.version} is installed but has no "
                f"{wanted.file}; run: {wanted.install} --force-reinstall"
            )
        return path


def recipe_names() -> list[str]:
    return sorted(path.stem for path in asset_dir("engines").iterdir() if path.suffix in SUFFIXES)


def find_recipe(name: str) -> Recipe | None:
    """The recipe called `name`, or None.

    Raises:
        CheckpointRefused: the file is there but is no recipe.
    """
    if "/" in name or name.startswith("."):
        return None
    for suffix in SUFFIXES:
        path = asset_dir("engines") / f"{name}{suffix}"
        if path.is_file():
            return _read(path)
    return None


def _read(path: Path) -> Recipe:
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        recipe = Recipe.model_validate(raw)
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise CheckpointRefused(f"{path}: not a recipe: {error}") from None
    if recipe.name != path.stem:
        raise CheckpointRefused(f"{path}: name: wanted {path.stem!r} as the file is called, found {recipe.name!r}")
    return recipe
