"""`kvtool build --target tensorrt_llm`: engines and bundles for TensorRT-LLM, printed or built."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from kvtool.cli.console import done, err, print_json, step
from kvtool.engine.manifest import FILE
from kvtool.engine.trtllm.build import Plan, build, describe, plan, source_digest
from kvtool.engine.trtllm.request import Asked, Request, prepare, roles_of
from kvtool.units import show_size


def build_trtllm(asked: Asked, out: Path | None, *, force: bool, dry_run: bool, as_json: bool) -> None:
    """One engine, or one for each role where a recipe has them differ (NAME-prefill, NAME-decode)."""
    roles = roles_of(asked)
    requests = [prepare(asked, role, rehearse=dry_run) for role in roles]
    places = [_place(out, request, many=len(roles) > 1) for request in requests]
    if dry_run:
        _print_plans([plan(r, place) for r, place in zip(requests, places, strict=True)], as_json)
        return
    results = [_build_one(request, place, force) for request, place in zip(requests, places, strict=True)]
    if as_json:
        print_json([{"directory": str(r.directory), "built": r.built, **r.manifest.model_dump()} for r in results])
        return
    for result in results:
        typer.echo(str(result.directory))


def _place(out: Path | None, request: Request, many: bool) -> Path:
    if out is None:
        return (Path("build") / request.name).absolute()
    return (out.with_name(f"{out.name}-{request.role}") if many else out).absolute()


def _build_one(request: Request, out: Path, force: bool) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    kind = "engine" if request.able.engine_build else "bundle"
    step(f"{request.name}: {kind} for TensorRT-LLM {request.version}, {_gpus(request)}, in {out}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as bars:
        rows: dict[str, TaskID] = {}

        def show(what: str, amount: int, total: int) -> None:
            if what not in rows:
                rows[what] = bars.add_task(what, total=total or None)
            bars.update(rows[what], completed=amount)

        result = build(
            request, out, force=force, progress=show, log=lambda line: bars.console.print(f"[dim]{escape(line)}[/]")
        )
    size = show_size(sum(result.manifest.files.values()))
    if result.built:
        done(f"{request.name}: {result.manifest.architecture}, {size}, in {result.seconds:.1f} s")
    else:
        done(f"{request.name}: already built from these inputs, nothing to do")
    return result


def _gpus(request: Request) -> str:
    size = request.settings.world_size
    return f"{size} GPU" + ("s" if size > 1 else "")


def _print_plans(plans: list[Plan], as_json: bool) -> None:
    if as_json:
        print_json([_as_table(one) for one in plans])
        return
    for one in plans:
        request = one.request
        head = f"{request.name}: TensorRT-LLM {request.version} ({request.able.adapter.value}), in {one.directory}"
        typer.echo(f"# {head}")
        if request.source.path is None:
            typer.echo(f"# rehearsed from the recipe: {request.source.name} is not on this machine")
        for command in one.commands:
            extra = [f"{key}={value}" for key, value in one.environment.items()]
            typer.echo(f"\n# {command.title}")
            typer.echo(shlex.join([*(["env", *extra] if extra else []), *command.argv]))
        for name, text in _files(one).items():
            typer.echo(f"\n# file {name}")
            typer.echo(text.rstrip("\n"))
        copied = ", ".join(sorted(one.copies)) or "tokenizer files of the checkpoint"
        typer.echo(f"\n# copied: {copied}\n")


def _files(one: Plan) -> dict[str, str]:
    manifest = describe(one.request, source_digest(one.request), files={}, digests={})
    return {**one.texts, FILE: manifest.model_dump_json(indent=2)}


def _as_table(one: Plan) -> dict[str, Any]:
    return {
        "name": one.request.name,
        "directory": str(one.directory),
        "version": one.request.version,
        "adapter": one.request.able.adapter.value,
        "rehearsed": one.request.source.path is None,
        "environment": one.environment,
        "commands": [command.argv for command in one.commands],
        "files": _files(one),
        "copied": sorted(one.copies),
    }
