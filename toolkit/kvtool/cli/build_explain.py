"""`kvtool build --explain`: what an engine will need and what fits, before anything is built."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kvtool.cli.console import out, print_json, table
from kvtool.engine.explain import Table, explain_torch
from kvtool.engine.recipe import Recipe, recipe_for, recipe_names
from kvtool.errors import CheckpointRefused, EngineRefused


def print_explained(source: str, target: str | None, block_tokens: int | None, as_json: bool) -> None:
    """Print the tables of `explained`, as JSON if wanted."""
    name, tables = explained(source, target, block_tokens)
    if as_json:
        print_json({"name": name, "tables": [asdict(one) for one in tables]})
        return
    for one in tables:
        rows = [(row.what, row.amount, row.how) for row in one.rows]
        out().print(table(one.title, (name, "", "from"), rows, right=(1,)))


def explained(source: str, target: str | None, block_tokens: int | None) -> tuple[str, list[Table]]:
    """Name and tables of a recipe, or of a checkpoint for the torch target.

    Raises:
        CheckpointRefused: no such recipe or checkpoint.
        EngineRefused: it does not fit, or the target needs a recipe.
        Missing: a packaged recipe's checkpoint is not installed.
    """
    recipe = recipe_for(source)
    if recipe is None and not Path(source).exists():
        raise CheckpointRefused(
            f"{source}: wanted a Hugging Face directory, a GGUF file or a recipe ({', '.join(recipe_names())}), "
            "found nothing of that name"
        )
    target = target or (recipe.target if recipe else "torch")
    block_tokens = block_tokens or (recipe.block_tokens if recipe else 32)
    name = recipe.name if recipe else Path(source).name
    if target == "torch":
        return name, _torch(recipe, source, block_tokens)
    if recipe is None or recipe.model is None or recipe.tensorrt_llm is None:
        raise EngineRefused(
            f"{source}: --explain for {target} needs a recipe that says on which GPUs it is to run: copy one of "
            "kvtool's (kvtool build --explain llama-3.1-8b-h100 shows one), change it, and give the file"
        )
    from kvtool.engine.trtllm.explain import explain_trtllm

    return name, explain_trtllm(name, recipe.model, recipe.tensorrt_llm, block_tokens)


def _torch(recipe: Recipe | None, source: str, block_tokens: int) -> list[Table]:
    from kvtool.engine.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(recipe.source() if recipe else Path(source))
    return explain_torch(checkpoint.family, bool(checkpoint.codes), block_tokens)
