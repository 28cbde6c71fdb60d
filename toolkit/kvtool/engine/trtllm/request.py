"""What one build for TensorRT-LLM is asked to make: model, settings, version, worked out from what a person gave.

A recipe has all of it; a checkpoint directory needs settings beside it. Settings may be changed one by one
(`tensor_parallel=4`), and a role takes the recipe's part for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvtool.engine.recipe import Recipe, recipe_for, recipe_names
from kvtool.engine.trtllm.check import check
from kvtool.engine.trtllm.digest import Covers, digest
from kvtool.engine.trtllm.settings import Role, TrtllmSettings
from kvtool.engine.trtllm.sizing import check as check_fits
from kvtool.engine.trtllm.source import Source, read_source
from kvtool.engine.trtllm.version import Can, can, installed
from kvtool.errors import CheckpointRefused, EngineRefused, Missing, SpecRefused

UNKNOWN_DIGEST = "(known once the checkpoint is there)"


@dataclass(frozen=True)
class Request:
    """All checked. `digest` is UNKNOWN_DIGEST in a rehearsal without the checkpoint."""

    name: str
    source: Source
    settings: TrtllmSettings
    role: Role | None
    stored_parallel: int
    block_tokens: int
    version: str
    able: Can
    covers: Covers
    digest: str


@dataclass(frozen=True)
class Asked:
    """What a person gave; None where the recipe or a default decides."""

    source: str
    name: str | None = None
    checkpoint: Path | None = None
    role: Role | None = None
    version: str | None = None
    block_tokens: int | None = None
    changes: tuple[str, ...] = ()
    covers: Covers = "headers"


def roles_of(asked: Asked) -> list[Role | None]:
    """The engines that `asked` means: the role that was named, or those whose settings differ.

    Raises:
        CheckpointRefused, SpecRefused: as `prepare`.
    """
    return [asked.role] if asked.role else settings_of(asked, recipe_of(asked)).roles()


def prepare(asked: Asked, role: Role | None, *, rehearse: bool = False) -> Request:
    """Everything that the build of one role needs. `rehearse`: a recipe's checkpoint need not be there.

    Raises:
        CheckpointRefused: no such checkpoint or recipe, or one that cannot be built.
        EngineRefused: settings that do not fit.
        SpecRefused: a setting that there is not.
        Missing: a recipe's checkpoint that is not on this machine.
    """
    recipe = recipe_of(asked)
    whole = settings_of(asked, recipe)
    settings = whole.of(role)
    block_tokens = asked.block_tokens or (recipe.block_tokens if recipe else 32)
    version = asked.version or settings.version or installed()
    if version is None:
        raise EngineRefused(
            "version: tensorrt_llm is not installed here, so name the TensorRT-LLM that will run: "
            "--tensorrt-llm-version 1.2.1"
        )
    able = can(version, settings.backend)
    source = _source(asked, recipe, settings, rehearse)
    check(source, settings, block_tokens, able)
    name = name_of(asked, recipe)
    if settings.context_parallel == 1:
        check_fits(source.facts, settings, block_tokens, f"{name}{f' ({role})' if role else ''}")
    return Request(
        name=f"{name}-{role}" if role else name,
        source=source,
        settings=settings,
        role=role,
        stored_parallel=whole.stored_parallel if whole.roles() != [None] else settings.tensor_parallel,
        block_tokens=block_tokens,
        version=version,
        able=able,
        covers=asked.covers,
        digest=UNKNOWN_DIGEST if source.path is None else digest(source.path, asked.covers),
    )


def recipe_of(asked: Asked) -> Recipe | None:
    """The recipe that was named; None: a checkpoint was.

    Raises:
        CheckpointRefused: neither.
    """
    recipe = recipe_for(asked.source)
    if recipe is None and not Path(asked.source).exists():
        raise CheckpointRefused(
            f"{asked.source}: wanted a checkpoint directory or a recipe ({', '.join(recipe_names())}), "
            "found nothing of that name"
        )
    return recipe


def settings_of(asked: Asked, recipe: Recipe | None) -> TrtllmSettings:
    """The recipe's block with the changes that were asked for.

    Raises:
        SpecRefused: a change that is no KEY=VALUE, of a key that there is not, or to a value that does not fit.
    """
    held = recipe.tensorrt_llm if recipe else None
    raw: dict[str, Any] = held.model_dump() if held else {}
    for change in asked.changes:
        key, equals, text = change.partition("=")
        if not equals or not key:
            raise SpecRefused(f"--set: wanted KEY=VALUE, such as tensor_parallel=4, found {change!r}")
        table, parts = raw, key.split(".")
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = yaml.safe_load(text)
    try:
        return TrtllmSettings.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        found = "" if first["type"] == "missing" else f", found {first['input']!r}"
        raise SpecRefused(
            f"{recipe.name if recipe else asked.source}: {key}: {first['msg']}{found}; set it with --set {key}=VALUE"
        ) from None


def _source(asked: Asked, recipe: Recipe | None, settings: TrtllmSettings, rehearse: bool) -> Source:
    if recipe is None:
        return read_source(asked.checkpoint or Path(asked.source))
    try:
        return read_source(recipe.source(asked.checkpoint))
    except Missing:
        if not rehearse or recipe.huggingface is None or recipe.model is None:
            raise
    pytorch = settings.backend == "pytorch"
    return Source(
        name=recipe.huggingface.repo,
        path=None,
        kind="huggingface",
        facts=recipe.model,
        dtype=settings.kv_dtype if settings.kv_dtype in ("bfloat16", "float16") else "bfloat16",
        quantisation=settings.quantisation if pytorch else "none",
        kv_dtype=settings.kv_dtype if pytorch and settings.kv_dtype == "fp8" else None,
    )


def name_of(asked: Asked, recipe: Recipe | None) -> str:
    return asked.name or (recipe.name if recipe else _plain(Path(asked.source).resolve().name))


def _plain(name: str) -> str:
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in name.lower())
    return kept.strip("-.") or "engine"
