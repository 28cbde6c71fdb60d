"""`kvtool build`: turn a checkpoint into an engine directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtool.cli.console import done, err, print_json
from kvtool.units import show_size


def build(
    source: Annotated[
        str, typer.Argument(help="A recipe's name (smollm2-135m) or file, a Hugging Face directory, or a GGUF file.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The engine directory.", show_default="./build/NAME")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name.", show_default="from the source")] = None,
    target: Annotated[
        str | None, typer.Option(help="torch, or tensorrt_llm.", show_default="the recipe's, else torch")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a KV block.", show_default="the recipe's, else 32")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another engine that is there.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print what it will need and what fits, from its facts; build nothing.")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Where a recipe's checkpoint lies.", show_default="the Hugging Face cache")
    ] = None,
    role: Annotated[
        Literal["prefill", "decode"] | None,
        typer.Option(help="Build for this role only.", show_default="all that the recipe has"),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="KEY=VALUE of the recipe's tensorrt_llm block, such as tensor_parallel=4; gpu=h200 at least, where "
            "there is no recipe.",
            show_default="the recipe's",
        ),
    ] = None,
    trtllm_version: Annotated[
        str | None,
        typer.Option(
            "--tensorrt-llm-version",
            help="TensorRT-LLM that will run, such as 1.2.1.",
            show_default="the recipe's, else what is installed",
        ),
    ] = None,
    digest: Annotated[
        Literal["headers", "bytes"],
        typer.Option(
            help="What of a referenced checkpoint is digested: headers and a sample of each tensor, or every byte."
        ),
    ] = "headers",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the commands and files of a tensorrt_llm build; write nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Turn a checkpoint into an engine directory. Doing it again does nothing.

    For TensorRT-LLM: a bundle that its PyTorch backend loads, made on any machine, or (backend: tensorrt, up to 1.2)
    an engine, compiled where tensorrt_llm and the GPU are. That takes the example scripts of the same release from
    /app/tensorrt_llm/examples, or from where KVTOOL_TRTLLM_EXAMPLES says. Where prefill and decode differ there are
    two: NAME-prefill and NAME-decode.
    """
    target = _target(source, target)
    if target == "tensorrt_llm":
        from kvtool.cli.build_trtllm import build_trtllm
        from kvtool.engine.trtllm.request import Asked

        asked = Asked(source, name, checkpoint, role, trtllm_version, block_tokens, tuple(settings or ()), digest)
        if explain:
            from kvtool.cli.build_explain import explained_trtllm, print_explained

            print_explained(*explained_trtllm(asked), as_json)
            return
        build_trtllm(asked, out, force=force, dry_run=dry_run, as_json=as_json)
        return
    _refuse_for_torch(
        checkpoint=checkpoint, role=role, set=settings, tensorrt_llm_version=trtllm_version, dry_run=dry_run or None
    )
    if explain:
        from kvtool.cli.build_explain import explained_torch, print_explained

        print_explained(*explained_torch(source, name, block_tokens), as_json)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from kvtool.engine.build import build as build_engine

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as bars:
        rows: dict[str, TaskID] = {}

        def show(what: str, amount: int, total: int) -> None:
            if what not in rows:
                rows[what] = bars.add_task(what, total=total or None)
            bars.update(rows[what], completed=amount)

        result = build_engine(
            source, out, name=name, target=target, block_tokens=block_tokens, force=force, progress=show
        )
    manifest = result.manifest
    if as_json:
        print_json({"directory": str(result.directory), "built": result.built, **manifest.model_dump()})
        return
    size = show_size(sum(manifest.files.values()))
    if result.built:
        done(f"{manifest.name}: {manifest.architecture} for {manifest.target}, {size}, in {result.seconds:.1f} s")
    else:
        done(f"{manifest.name}: already built from these inputs, nothing to do")
    typer.echo(str(result.directory))


def _target(source: str, target: str | None) -> str | None:
    from kvtool.engine.recipe import recipe_for

    recipe = None if target else recipe_for(source)
    return recipe.target if recipe else target


def _refuse_for_torch(**options: object) -> None:
    from kvtool.errors import SpecRefused

    for name, value in options.items():
        if value is not None:
            raise SpecRefused(f"--{name.replace('_', '-')}: for --target tensorrt_llm, this build is for torch")
