"""Command groups that import a command only when it runs.

`kvtool --help` should appear at once, and most commands stand on packages that take seconds to import. So a group holds
a table of names, help lines and "module:attribute", and loads the attribute when that command is called. The attribute
is a function (one command) or a `typer.Typer` (a group of commands).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group


@dataclass(frozen=True)
class Entry:
    """One row of a group: where the command lives, and what `--help` says about it without loading it."""

    target: str
    help: str


def load(name: str, entry: Entry) -> Any:
    """The click command behind `entry`, under the name it has in the table."""
    module, _, attribute = entry.target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if isinstance(found, typer.Typer):
        command: Any = get_group(found)
        command.no_args_is_help = not command.invoke_without_command
    elif isinstance(found, type) and issubclass(found, LazyGroup):
        command = found()
        command.no_args_is_help = True
    else:
        single = typer.Typer(add_completion=False)
        single.command(name)(found)
        command = get_command(single)
    command.name = name
    command.help = command.help or entry.help
    return command


class LazyGroup(TyperGroup):
    """A typer group over `entries`. Listing it, and suggesting a near name for a typo, load nothing."""

    entries: ClassVar[dict[str, Entry]] = {}

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in self.entries.items():
            self.commands[name] = TyperCommand(name, help=entry.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.entries:
            command = load(name, self.entries[name])
        return name, command, rest
