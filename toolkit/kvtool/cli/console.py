"""Printing, in one place: answers on stdout, everything said about them on stderr, rich markup never by accident."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def out() -> Console:
    """The console for results. Made anew, so that a redirected stdout is followed."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def err() -> Console:
    """The console for progress and errors."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def step(text: str) -> None:
    """Say what is being done, as it is done."""
    err().print(f"[bold cyan]•[/] {escape(text)}")


def done(text: str) -> None:
    err().print(f"[bold green]✓[/] {escape(text)}")


def warn(text: str) -> None:
    err().print(f"[bold yellow]![/] {escape(text)}")


def fail(sentence: str) -> None:
    """Print the one sentence of an error. Text from the world is escaped: a path with [brackets] stays itself."""
    err().print(f"[bold red]error:[/] {escape(sentence)}")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = ()) -> Table:
    """A table of plain strings; columns whose index is in `right` are right-aligned."""
    made = Table(title=escape(title) if title else None, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        made.add_column(escape(column), justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(cell) for cell in row))
    return made


def print_json(value: Any) -> None:
    """`value` as JSON on stdout, nothing else: for --json flags and pipes."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
