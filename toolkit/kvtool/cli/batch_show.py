"""What `kvtool batch` prints while it works: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvtool.cli import console

if TYPE_CHECKING:
    from kvtool.batch.run import Counts

_NARROW, _BAR = 90, 10
"""Columns of a terminal that has no room for a wide bar, and the bar that it gets."""


@contextlib.contextmanager
def checking() -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes, while an input is checked."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("checking requests"),
        _bar_column(BarColumn),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    screen = console.err()
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:
        row = bars.add_task("", total=None)
        yield lambda done, total: bars.update(row, completed=done, total=total)


@contextlib.contextmanager
def working(quiet: bool) -> Iterator[Callable[[Counts], None]]:
    """A bar of requests with rate, hit ratio and what is left; lines of the same where there is no terminal."""
    from kvtool.batch import look

    screen = console.err()
    if quiet:
        yield lambda counts: None
        return
    if not screen.is_terminal:
        pace = look.Pace(time.monotonic())

        def say(counts: Counts) -> None:
            if pace.due(time.monotonic()):
                console.step(look.line(counts))

        yield say
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (_bar_column(BarColumn), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=screen, transient=True) as bars:
        row = bars.add_task("", total=None, said="loading")

        def tell(counts: Counts) -> None:
            bars.update(row, completed=counts.over, total=counts.requests, said=look.rates(counts))

        yield tell


def _bar_column(kind: Callable[..., Any]) -> Any:
    return kind(bar_width=_BAR if console.err().width < _NARROW else 40)
