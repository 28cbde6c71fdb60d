"""`kvtool config`: write a spec, show every value with its origin, export the schema, check against the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from kvtool.cli import console
from kvtool.cli.where import SetOption, SpecArgument, overrides
from kvtool.config.check import check as check_spec
from kvtool.config.load import flat, load_spec
from kvtool.config.spec import Spec, json_schema
from kvtool.errors import Refused
from kvtool.units import show_size

app = typer.Typer(no_args_is_help=True)


@app.command()
def show(
    spec: SpecArgument,
    settings: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, values in bytes and seconds.")] = False,
) -> None:
    """Each value of a spec, and whether a flag, the file or a default set it."""
    read, origins = load_spec(spec, overrides(settings))
    if as_json:
        console.print_json({key: {"value": value, "origin": str(origins[key])} for key, value in flat(read)})
        return
    rows = [(key, _shown(key, value), str(origins[key])) for key, value in flat(read)]
    console.out().print(console.table("", ("key", "value", "from"), rows))


@app.command()
def check(spec: SpecArgument, settings: SetOption = None) -> None:
    """Hold a spec against its engine, without starting anything."""
    from kvtool.engine.manifest import read_manifest

    read, _ = load_spec(spec, overrides(settings))
    manifest = read_manifest(read.engine)
    check_spec(read, manifest)
    console.done(f"{spec} fits {manifest.name} ({manifest.layout})")


@app.command()
def schema() -> None:
    """JSON Schema of the spec file, for editors and CI."""
    console.print_json(json_schema())


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("kvtool.yaml"),
    engine: Annotated[str, typer.Option(help="Engine directory, relative to the file.")] = "build/smollm2-135m",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write a commented spec with every key and its default."""
    if path.exists() and not force:
        raise Refused(f"{path} exists; give another name, or --force to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(commented(engine), encoding="utf-8")
    console.done(f"wrote {path}; next: kvtool config check {path}, then kvtool deploy up {path}")


def commented(engine: str) -> str:
    """Every key with its description; what has a default is there as a comment, ready to be changed."""
    import yaml

    lines = ["# A kvtool deployment. Keys behind a # have the default shown; take the # away to change them.", ""]
    for name, field in Spec.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += ["", f"# {field.description}", f"#{name}:", *_section_lines(kind, "  ")]
        elif name == "engine":
            lines.append(f"engine: {yaml.safe_dump(engine, default_style=chr(34)).strip()}  # {field.description}")
        elif name == "version":
            lines.append(f"version: {field.default}  # {field.description}")
        else:
            lines.append(f"#{name}: {_default(field.default)}  # {field.description}")
    return "\n".join(lines) + "\n"


def _section_lines(section: type[BaseModel], indent: str) -> Iterator[str]:
    for key, part in section.model_fields.items():
        kind = part.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield f"#{indent}{key}:  # {part.description}"
            yield from _section_lines(kind, indent + "  ")
        else:
            yield f"#{indent}{key}: {_default(part.default)}  # {part.description}"


def _default(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown(key: str, value: Any) -> str:
    if value is None or key.endswith("_fraction"):
        return _default(value)
    if key.endswith(("_size", "bandwidth", "memory")):
        return show_size(value)
    if isinstance(value, float):
        return f"{value:g} s"
    return _default(value)
