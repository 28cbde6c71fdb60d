"""`kvtool build --explain`: what an engine will need and what fits, before anything is built."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kvtool.cli.console import out, print_json, table
from kvtool.engine.explain import Table, explain_torch
from kvtool.engine.recipe import recipe_for, recipe_names
from kvtool.engine.trtllm.explain import explain_trtllm
from kvtool.engine.trtllm.request import Asked, name_of, recipe_of, settings_of
from kvtool.engine.trtllm.source import read_source
from kvtool.errors import CheckpointRefused


def print_explained(name: str, tables: list[Table], as_json: bool) -> None:
    if as_json:
        print_json({"name": name, "tables": [asdict(one) for one in tables]})
        return
    for one in tables:
        rows = [(row.what, row.amount, row.how) for row in one.rows]
        out().print(table(one.title, (name, "", "from"), rows, right=(1,)))


def explained_trtllm(asked: Asked) -> tuple[str, list[Table]]:
    """Name and tables: from a recipe's own facts, or from the config.json of a checkpoint.

    Raises:
        CheckpointRefused: no such recipe or checkpoint.
        EngineRefused: it does not fit; with what would.
        SpecRefused: a setting that there is not, or none of the GPU.
    """
    recipe = recipe_of(asked)
    whole = settings_of(asked, recipe)
    settings = whole.of(asked.role) if asked.role else whole
    facts = recipe.model if recipe and recipe.model else read_source(asked.checkpoint or Path(asked.source)).facts
    name = name_of(asked, recipe)
    return name, explain_trtllm(name, facts, settings, asked.block_tokens or (recipe.block_tokens if recipe else 32))


def explained_torch(source: str, name: str | None, block_tokens: int | None) -> tuple[str, list[Table]]:
    """Name and tables of a recipe or checkpoint for the torch target.

    Raises:
        CheckpointRefused: no such recipe or checkpoint, or a model that the engine does not compute.
        Missing: a packaged recipe's checkpoint is not installed.
    """
    from kvtool.engine.checkpoint import open_checkpoint

    recipe = recipe_for(source)
    if recipe is None and not Path(source).exists():
        raise CheckpointRefused(
            f"{source}: wanted a Hugging Face directory, a GGUF file or a recipe ({', '.join(recipe_names())}), "
            "found nothing of that name"
        )
    checkpoint = open_checkpoint(recipe.source() if recipe else Path(source))
    tables = explain_torch(
        checkpoint.family, bool(checkpoint.codes), block_tokens or (recipe.block_tokens if recipe else 32)
    )
    return name or (recipe.name if recipe else Path(source).name), tables
