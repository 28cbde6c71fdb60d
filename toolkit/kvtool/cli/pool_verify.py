"""`kvtool pool verify`: everything that a pool holds, checked against its checksums."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli import console
from kvtool.config.spec import default_run_dir
from kvtool.errors import Refused, SpecRefused
from kvtool.pool.filetier import files_of
from kvtool.pool.rundir import pool_runs
from kvtool.pool.verify import Verified, verify_file, verify_ranks
from kvtool.units import parse_seconds, show_size


def verify(
    run_dir: Annotated[Path | None, typer.Option("--run-dir", help="Run directory.", show_default=False)] = None,
    timeout: Annotated[str, typer.Option("--timeout", help="Longest time to check for.")] = "10m",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Check all that a pool holds, in memory and files, against its checksums. Exits 1 when something was damaged.

    What is damaged is forgotten, and a miss from then on. While no pool runs there its block files are checked."""
    folder = run_dir.absolute() if run_dir is not None else default_run_dir("pool")
    found = _verified(folder, timeout)
    if as_json:
        console.print_json([{**asdict(each), "damaged": each.damaged} for each in found])
    else:
        _show(folder, found)
    if any(each.damaged or each.why for each in found):
        raise typer.Exit(1)


def _verified(folder: Path, timeout: str) -> list[Verified]:
    try:
        timeout_s = parse_seconds(timeout)
    except ValueError as error:
        raise SpecRefused(f"--timeout {timeout}: {error}") from None
    if pool_runs(folder):
        return verify_ranks(folder, timeout_s)
    found = [verify_file(path) for path in files_of(folder)]
    if not found:
        raise Refused(f"{folder}: no pool runs there, and no block files are left of one; give --run-dir")
    return found


def _show(folder: Path, found: list[Verified]) -> None:
    columns = ["where", "in memory", "damaged", "in files", "damaged", "bytes"]
    names = ("dram", "dram_damaged", "file", "file_damaged")
    rows = [
        [each.name, *(str(each.found.get(name, 0)) for name in names), show_size(each.found.get("bytes", 0))]
        for each in found
    ]
    console.out().print(console.table(f"blocks checked in {folder}", columns, rows, right=range(1, 6)))
    for each in found:
        if each.why:
            console.warn(f"{each.name}: {each.why}")
