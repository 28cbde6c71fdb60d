"""`kvtool sim pool`: the whole pool under virtual time, with faults drawn from seeds. Exits 1 when an oracle spoke."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvtool.cli import console
from kvtool.errors import SpecRefused
from kvtool.sim.run import Result, prepared, run_seed
from kvtool.sim.seeds import run_seeds


def pool(
    seeds: Annotated[str, typer.Option("--seeds", help="How many seeds, or A..B for those from A up to B.")] = "100",
    seed: Annotated[int | None, typer.Option("--seed", help="This one only.", show_default=False)] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Calls of clients in a run, about; else the seed's.", show_default=False),
    ] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Print every event of --seed.")] = False,
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many processes.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Run ranks and clients of a pool in one thread, with every fault drawn from a seed."""
    if seed is not None:
        _one(seed, steps, replay)
        return
    if replay:
        raise SpecRefused("--replay: wanted the --seed to replay as well")
    begun_s, chosen = time.monotonic(), _range(seeds)
    found = run_seeds(chosen, processes, steps)
    if as_json:
        broken = {result.seed: result.broken for result in found.broken}
        console.print_json({"seeds": found.seeds, "calls": found.calls, "broken": broken, "counts": dict(found.counts)})
    else:
        rows = [[what, f"{count:,}"] for what, count in sorted(found.counts.items())]
        console.out().print(console.table("what happened", ["what", "times"], rows, right=[1]))
        console.out().print(
            f"{found.seeds} seeds, {found.calls:,} calls of clients, {found.virtual_s:,.0f} virtual seconds in "
            f"{time.monotonic() - begun_s:.1f} s"
        )
    for result in found.broken:
        _show(result, steps)
    if found.broken:
        raise typer.Exit(1)


def _one(seed: int, steps: int | None, replay: bool) -> None:
    with prepared() as run_dir:
        result = run_seed(seed, run_dir, steps, every_line=replay)
    if replay:
        for line in result.tail:
            console.out().print(line, markup=False)
    console.out().print(f"seed {seed}: {result.lines} events, {result.calls} calls, hash {result.digest}")
    if result.broken:
        if not replay:
            _show(result, steps)
        raise typer.Exit(1)


def _show(result: Result, steps: int | None) -> None:
    """An oracle's sentence, what led to it, and how to see it again."""
    for line in result.tail[-20:]:
        console.err().print(line, markup=False)
    console.fail(f"seed {result.seed}: {result.broken}")
    again = f"kvtool sim pool --seed {result.seed}" + (f" --steps {steps}" if steps else "") + " --replay"
    console.step(f"again, with every event: {again}")


def _range(text: str) -> range:
    first, dots, last = text.partition("..")
    try:
        found = range(int(first), int(last)) if dots else range(int(first))
    except ValueError:
        raise SpecRefused(f"--seeds {text}: wanted a count, or A..B") from None
    if not found:
        raise SpecRefused(f"--seeds {text}: wanted at least one seed")
    return found
