"""`kvtool doctor`: the findings as a table, the fixes below it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from kvtool.cli import console
from kvtool.doctor.checks import SERVERS_SHM, SHM_DEFAULT, Finding, State, Wants, examine
from kvtool.doctor.host import this_host
from kvtool.errors import SpecRefused
from kvtool.units import parse_size

STYLE = {State.OK: "green", State.MISSING: "red", State.WRONG: "red", State.NOTE: "yellow"}


def doctor(
    spec: Path | None = typer.Option(None, "--spec", help="Check for this deployment: its shared memory and ports."),
    shm: str | None = typer.Option(
        None, "--shm", help="Shared memory wanted, such as 2GiB. Default: as the spec asks."
    ),
    port: list[int] = typer.Option([], "--port", min=1, max=65535, help="Check that this port is free; repeatable."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Check what this machine has and lacks, with the fix for each.

    Exits 1 when something needed is missing or wrong; notes do not count.
    """
    findings = examine(this_host(), _wants(spec, shm, tuple(port)))
    if as_json:
        console.print_json([{**asdict(finding), "failed": finding.failed} for finding in findings])
    else:
        _show(findings)
    if any(finding.failed for finding in findings):
        raise typer.Exit(1)


def _wants(spec_file: Path | None, shm: str | None, ports: tuple[int, ...]) -> Wants:
    shm_size, pool = SHM_DEFAULT, True
    if spec_file is not None:
        from kvtool.config.load import load_spec

        spec, _ = load_spec(spec_file)
        pool = spec.pool.enabled
        shm_size = SERVERS_SHM + (spec.pool.ranks * spec.pool.dram_size if pool else 0)
        front = (spec.front.http_port, spec.front.grpc_port, spec.front.metrics_port)
        ports = (*ports, *(number for number in front if number))
    if shm is not None:
        try:
            shm_size = parse_size(shm)
        except ValueError as error:
            raise SpecRefused(f"--shm: {error}") from None
    return Wants(shm_size, ports, pool)


def _show(findings: list[Finding]) -> None:
    from rich.text import Text

    grid = console.table("", ["", "component", "found"], [])
    for finding in findings:
        state = Text(finding.state.value, style=STYLE[finding.state])
        grid.add_row(state, Text(finding.name), Text(finding.found))
    out = console.out()
    out.print(grid)
    failed = [finding for finding in findings if finding.failed]
    for finding in failed:
        out.print(Text.assemble((finding.name, "bold red"), ": ", finding.fix))
    if not failed:
        out.print("All that is needed is here.")
