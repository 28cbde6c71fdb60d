"""`kvtool bench transfer`: how fast blocks move, by path, beside a yardstick for each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.console import out, print_json, step, table
from kvtool.units import parse_size, show_size


def transfer(
    block_size: Annotated[str, typer.Option(help="Bytes of one block, such as 720KiB.")] = "1MiB",
    blocks: Annotated[int, typer.Option(min=2, max=512, help="Blocks of a batch, beside one block.")] = 64,
    runs: Annotated[int, typer.Option(min=3, help="Turns of each pair.")] = 9,
    directory: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Where the block file is made; a real disk.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON, with hardware and versions.")] = False,
) -> None:
    """Shared memory, UCX and files beside memcpy, a plain socket and raw O_DIRECT, in turns on this machine."""
    from kvtool.measure.facts import facts
    from kvtool.measure.transfer import measure

    try:
        size = parse_size(block_size)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--block-size") from None
    if size < 4096:
        raise typer.BadParameter(f"wanted 4KiB or more, got {block_size}", param_hint="--block-size")
    context = facts(["kvtool", *sys.argv[1:]], seed=1)
    rows = measure(size, (1, blocks), runs, directory, step)
    if as_json:
        print_json({**context, "block_size": size, "runs": runs, "rows": [row.to_json() for row in rows]})
        return
    cells = [
        [row.path, str(row.blocks), str(row.rate_ratio), f"{row.ours_gb_s.median:.2f}",
         f"{row.yardstick_gb_s.median:.2f}", row.yardstick]
        for row in rows
    ]  # fmt: skip
    columns = ["path", "blocks", "ratio of rates", "GB/s", "its GB/s", "yardstick"]
    out().print(
        table(
            f"Checked blocks of {show_size(size)} beside a yardstick, {runs} turns each",
            columns,
            cells,
            right=(1, 2, 3, 4),
        )
    )
    hardware = context["hardware"]
    out().print(f"{hardware['cpu']}, {hardware['cores']} cores; load before {hardware['load_before']}", markup=False)
