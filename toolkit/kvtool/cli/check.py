"""`kvtool check`: everything that is wrong with a deployment, in one go, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli import console
from kvtool.cli.where import SetOption, SpecArgument, read_spec
from kvtool.errors import KvtoolError


def check(
    spec: SpecArgument,
    settings: SetOption = None,
    repositories: Annotated[
        Path | None,
        typer.Option(
            "--repositories", help="Rendered repositories to check in place of fresh ones.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON: a list of key and sentence.")] = False,
) -> None:
    """Hold a spec against its engines, its hosts, and the TensorRT-LLM there, over both servers. Starts nothing.

    Every fault is told, each with the key to change. Exits 1 when there is one."""
    from kvtool.config.fault import Fault
    from kvtool.triton.check import faults

    try:
        found = faults(read_spec(spec, settings), repositories)
    except KvtoolError as error:
        found = [Fault(*_parted(line)) for line in str(error).splitlines()]
    if as_json:
        console.print_json([{"key": fault.key, "says": fault.says} for fault in found])
    else:
        for fault in found:
            console.fail(str(fault))
        if not found:
            console.done(f"{spec}: nothing is wrong")
    if found:
        raise typer.Exit(1)


def _parted(line: str) -> tuple[str, str]:
    """FILE:LINE: KEY: SENTENCE, as specs are refused, into key and sentence; the file is known."""
    match = re.match(r"(?:--set |\S+?:\d+: |\S+: )?([\w.\[\]]+): (.*)", line)
    return (match[1], match[2]) if match else ("spec", line)
