"""`kvtool bench engine`: one engine in one process, beside its peers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvtool.cli import console

if TYPE_CHECKING:
    from kvtool.measure.engine import Row


def engine(
    directory: Path = typer.Argument(..., metavar="ENGINE", help="An engine directory."),
    against: str = typer.Option(
        "transformers", "--against", help="Peers to run in turns with it: transformers,llama.cpp; empty for none."
    ),
    threads: int = typer.Option(2, "--threads", min=1, help="Threads, the same for all."),
    rounds: int = typer.Option(5, "--rounds", min=1, help="Samples of each prefill; decode takes four times as many."),
    save: Path | None = typer.Option(None, "--save", help="Write raw samples, versions and command to this JSON file."),
    as_json: bool = typer.Option(False, "--json", help="Print the same JSON; the tables go to stderr."),
) -> None:
    """Prefill and decode speed of one engine in one process, beside transformers and llama.cpp, in turns.

    Also what shape stability costs: attention in tiles fixed by position, against one unconstrained call.
    """
    from kvtool.measure.engine import measure
    from kvtool.measure.facts import facts

    peers = [name.strip() for name in against.split(",") if name.strip()]
    rows, absent = measure(directory, peers, threads, rounds, console.step)
    found = {
        **facts(["kvtool", *sys.argv[1:]], seed=0),
        "threads": threads,
        "peers": _versions(),
        "absent": absent,
        "rows": [_row_json(row) for row in rows],
    }
    _show(rows, absent, to_stderr=as_json)
    if save is not None:
        save.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        console.done(f"raw samples in {save}")
    if as_json:
        console.print_json(found)


def _versions() -> dict[str, str]:
    from importlib import metadata

    versions = {}
    for package in ("transformers", "llama-cpp-python"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _row_json(row: Row) -> dict[str, Any]:
    from kvtool.measure.stats import ratio, summarise

    peers = {name: ratio(s, row.seconds["kvtool"]).to_json() for name, s in row.seconds.items() if name != "kvtool"}
    return {
        "what": row.what,
        "tokens": row.tokens,
        "seconds": {name: summarise(samples).to_json() for name, samples in row.seconds.items()},
        "peer_over_kvtool": peers,
        "samples": row.seconds,
    }


def _show(rows: list[Row], absent: list[str], to_stderr: bool) -> None:
    from kvtool.measure.stats import ratio, summarise

    cells = []
    for row in rows:
        ours = row.seconds["kvtool"]
        for name, samples in row.seconds.items():
            stats = summarise(samples)
            rate = f"{row.tokens / stats.median:.0f}" if row.what.startswith("prefill") else ""
            faster = "" if name == "kvtool" else str(ratio(samples, ours))
            ms = f"{stats.median * 1e3:.2f}", f"{stats.p90 * 1e3:.2f}"
            cells.append((row.what, name, faster, *ms, rate, str(stats.count)))
    columns = ("what", "engine", "kvtool is faster by", "median ms", "P90 ms", "tokens/s", "samples")
    target = console.err() if to_stderr else console.out()
    target.print(console.table("One engine, one process", columns, cells, right=(3, 4, 5, 6)))
    for sentence in absent:
        console.warn(sentence)
