"""`kvtool bench batch`: a job in its own order, beside the order of arrival."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.console import out, print_json, step, table


def batch(
    engine: Annotated[Path, typer.Option("--engine", "-e", help="Engine directory.", show_default=False)],
    requests: Annotated[int, typer.Option("--requests", min=20, help="In the job.")] = 2000,
    alone: Annotated[int, typer.Option("--alone", min=1, help="How many of them run one at a time too.")] = 100,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Compute threads.")] = 2,
    seed: Annotated[int, typer.Option("--seed", help="Of the job.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON, with hardware and versions.")] = False,
) -> None:
    """The same requests by prefix and as they came, with and without reuse. Exits 1 if an answer differs."""
    from kvtool.measure.batch import measure
    from kvtool.measure.facts import facts

    context = facts(["kvtool", *sys.argv[1:]], seed=seed)
    found = measure(engine, requests, min(alone, requests), seed, threads, step)
    if as_json:
        print_json({**context, **found})
    else:
        cells = [
            [
                way["name"],
                f"{way['seconds']:.1f}",
                f"{way['cpu_s']:.1f}",
                f"{way['requests_s']:.2f}",
                f"{way['hit_ratio']:.0%}",
            ]
            for way in found["ways"]
        ]
        title = f"{requests} requests, {found['work']['shared']:.0%} of prompt tokens in shared prefixes"
        out().print(table(title, ["way", "seconds", "CPU s", "requests/s", "hit"], cells, right=(1, 2, 3, 4)))
        out().print(
            f"{found['ratio_no_reuse']:.2f} x arrival order without reuse, {found['ratio_reuse']:.2f} x with reuse; "
            f"same answers in all three: {found['same_in_all_three']} of {requests}",
            markup=False,
        )
    same = found["same_in_all_three"] == requests and all(
        way["same"] == found["compared_with_one_at_a_time"] for way in found["ways"]
    )
    if not same:
        raise typer.Exit(1)
