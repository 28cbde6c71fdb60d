"""Engine recipes: `kvtool build smollm2-135m` instead of a path.

A recipe is a YAML file in `engines/` that says where a checkpoint is found and how it is built. The checkpoint comes
from an installed Python package (found through the package's file list, without importing it), or from Hugging Face:
then the recipe holds the model's facts, so that sizes can be worked out and builds rehearsed where it is not there.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvtool.assets import asset_dir
from kvtool.engine.facts import ModelFacts, compare, facts_of
from kvtool.engine.hub import hub_snapshot
from kvtool.engine.trtllm.settings import TrtllmSettings
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


class HubSource(BaseModel):
    """A checkpoint on the Hugging Face hub. kvtool never downloads: it looks into the local cache."""

    model_config = ConfigDict(extra="forbid")

    repo: str = Field(pattern=r"[A-Za-z0-9][\w.-]*/[\w.-]+")
    revision: str = "main"


class Recipe(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"[a-z0-9][a-z0-9._-]*")
    description: str
    target: str = "torch"
    block_tokens: int = Field(default=32, ge=1)
    package: PackageSource | None = None
    huggingface: HubSource | None = None
    model: ModelFacts | None = None
    """Needed with `huggingface`."""
    tensorrt_llm: TrtllmSettings | None = None
    """Needed with target tensorrt_llm."""

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        if (self.package is None) == (self.huggingface is None):
            raise ValueError("wanted one of package and huggingface, to say where the checkpoint comes from")
        if self.huggingface and self.model is None:
            raise ValueError("model: missing; a recipe of a Hugging Face checkpoint holds the model's facts")
        if (self.target == "tensorrt_llm") != (self.tensorrt_llm is not None):
            raise ValueError(f"tensorrt_llm: {'not for' if self.tensorrt_llm else 'needed by'} target {self.target}")
        return self

    def source(self, checkpoint: Path | None = None) -> Path:
        """Where the checkpoint lies on this machine: `checkpoint` if it is given, which must be the recipe's model.

        Raises:
            Missing: the package is not installed, or without that file; or the hub's cache has no such checkpoint.
            CheckpointRefused: `checkpoint` is another model.
        """
        if self.package:
            if checkpoint is not None:
                raise CheckpointRefused(
                    f"--checkpoint: recipe {self.name} takes its checkpoint from {self.package.distribution}; to build "
                    f"another, run: kvtool build {checkpoint}"
                )
            return _packaged(self.name, self.package)
        assert self.huggingface is not None and self.model is not None
        found = checkpoint or hub_snapshot(self.name, self.huggingface.repo, self.huggingface.revision)
        compare(self.model, _facts_at(found), str(found / "config.json"))
        return found


def _packaged(name: str, wanted: PackageSource) -> Path:
    try:
        distribution = metadata.distribution(wanted.distribution)
    except metadata.PackageNotFoundError:
        raise Missing(
            f"recipe {name}: the Python package {wanted.distribution}, which carries the checkpoint, is not "
            f"installed; run: {wanted.install}"
        ) from None
    path = Path(str(distribution.locate_file(wanted.file)))
    if not path.is_file():
        raise Missing(
            f"recipe {name}: {wanted.distribution} {distribution.version} is installed but has no "
            f"{wanted.file}; run: {wanted.install} --force-reinstall"
        )
    return path


def _facts_at(directory: Path) -> ModelFacts:
    path = directory / "config.json"
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"{path}: wanted the config of a Hugging Face checkpoint: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointRefused(f"{path}: wanted a JSON object, found {type(raw).__name__}")
    return facts_of(raw, str(path))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in asset_dir("engines").iterdir() if path.suffix in SUFFIXES)


def recipe_for(source: str | Path) -> Recipe | None:
    """The recipe that `source` means, by the name of one that ships with kvtool or the path of a file; else None.

    Raises:
        CheckpointRefused: the file is there but is no recipe.
    """
    path = Path(source)
    if path.suffix in SUFFIXES and path.is_file():
        return read_recipe(path)
    return None if path.exists() else find_recipe(str(source))


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
            return read_recipe(path)
    return None


def read_recipe(path: Path) -> Recipe:
    """The recipe in the file `path`.

    Raises:
        CheckpointRefused: it is no recipe.
    """
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        recipe = Recipe.model_validate(raw)
    except (yaml.YAMLError, ValidationError, UnicodeDecodeError) as error:
        raise CheckpointRefused(f"{path}: not a recipe: {error}") from None
    if recipe.name != path.stem:
        raise CheckpointRefused(f"{path}: name: wanted {path.stem!r} as the file is called, found {recipe.name!r}")
    return recipe
