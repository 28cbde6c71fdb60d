"""docs/reference.md, made from the commands and the spec themselves: `scripts/docs` writes it, a test keeps it fresh.

Nothing is described twice: a flag's words are its --help, a key's words are its field's description.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

from kvtool.cli.lazy import LazyGroup, load
from kvtool.cli.main import app
from kvtool.config.spec import Spec, json_schema
from kvtool.units import show_size

HEAD = """# Reference

Made by `scripts/docs` from the commands' own help and the spec's own descriptions; do not edit.

"""


def render() -> str:
    """The whole page, the same for the same code."""
    parts = [HEAD, "## Commands\n\n"]
    parts.extend(_command(path, command) for path, command in commands())
    parts.append(_spec())
    return "".join(parts).rstrip() + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    """("kvtool pool up", click command) of every command and group, each loaded."""
    yield from _walk("kvtool", get_command(app))


def options(command: Any) -> Iterator[Any]:
    """The flags and arguments that --help shows, but for --help itself."""
    for parameter in command.params:
        if not getattr(parameter, "hidden", False) and parameter.name not in ("install_completion", "show_completion"):
            yield parameter


def spec_keys() -> Iterator[tuple[str, str, str]]:
    """("pool.ranks", "2", description) of every key of the spec, in its order."""
    yield from _keys(Spec, "")


def _walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield path, command
    if isinstance(command, LazyGroup):
        for name, entry in command.entries.items():
            yield from _walk(f"{path} {name}", load(name, entry))
    else:
        for name, child in getattr(command, "commands", {}).items():
            if not child.hidden:
                yield from _walk(f"{path} {name}", child)


def _command(path: str, command: Any) -> str:
    words = [f"### `{path}`\n\n{_plain(command.help)}\n\n"]
    rows = [_option_row(parameter) for parameter in options(command)]
    if rows:
        words.append("| | default | |\n|---|---|---|\n" + "".join(rows) + "\n")
    return "".join(words)


def _option_row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {_default(parameter)} | {_cell(_plain(parameter.help))} |\n"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if value is None or callable(value) or value is False or value in ("", [], ()):
        return ""
    if value is True:
        return "on"
    return f"`{value}`"


def _spec() -> str:
    rows = "".join(f"| `{key}` | {default} | {_cell(text)} |\n" for key, default, text in spec_keys())
    return f"## Deployment spec\n\n{json_schema()['description']}\n\n| key | default | |\n|---|---|---|\n{rows}\n"


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else f"`{_value(name, field.default)}`"
        yield f"{prefix}{name}", default, field.description or ""


def _value(name: str, default: Any) -> str:
    if default is None:
        return "null"
    if isinstance(default, bool):
        return str(default).lower()
    if name.endswith("_size") and isinstance(default, int):
        return show_size(default)
    return str(default)


def _plain(text: str | None) -> str:
    return "\n".join(line.strip() for line in (text or "").strip().splitlines())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(render(), end="")
