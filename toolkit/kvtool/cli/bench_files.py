"""`kvtool bench files`: a pool that holds more than its memory, beside raw O_DIRECT on the same disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.console import out, print_json, step, table
from kvtool.errors import SpecRefused
from kvtool.units import parse_size, show_size


def files(
    sizes: Annotated[str, typer.Option("--sizes", help="Bytes of a block.")] = "256KiB,1MiB,4MiB",
    blocks: Annotated[int, typer.Option("--blocks", min=2, max=512, help="Blocks in each turn.")] = 64,
    runs: Annotated[int, typer.Option("--runs", min=3, help="Turns of each pair.")] = 9,
    directory: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Where the files are made; a real disk.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON, with hardware and versions.")] = False,
) -> None:
    """Puts under eviction and cold gets of a pool, in turns with four raw O_DIRECT threads. Exits 1 if one is lost."""
    from kvtool.measure.facts import facts
    from kvtool.measure.files import measure

    context = facts(["kvtool", *sys.argv[1:]], seed=1)
    rows = measure(_sizes(sizes), blocks, runs, directory, step)
    if as_json:
        print_json({**context, "runs": runs, "rows": [row.to_json() for row in rows]})
    else:
        cells = [
            [row.what, show_size(row.size), str(row.rate_ratio), f"{row.gb_s.median:.2f}", f"{row.raw_gb_s.median:.2f}",
             str(row.lost)]
            for row in rows
        ]  # fmt: skip
        columns = ["what", "block", "ratio of rates", "GB/s", "raw GB/s", "lost"]
        title = f"{blocks} checked blocks a turn beside raw O_DIRECT, {runs} turns"
        out().print(table(title, columns, cells, right=(2, 3, 4, 5)))
        hardware = context["hardware"]
        out().print(
            f"{hardware['cpu']}, {hardware['cores']} cores; load before {hardware['load_before']}", markup=False
        )
    if any(row.lost for row in rows):
        raise typer.Exit(1)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [parse_size(each) for each in text.split(",")]
    except ValueError as error:
        raise SpecRefused(f"--sizes {text}: {error}") from None
    if min(sizes) < 4096 or any(size % 2 for size in sizes):
        raise SpecRefused(f"--sizes {text}: wanted even numbers of bytes, 4KiB or more")
    return sizes
