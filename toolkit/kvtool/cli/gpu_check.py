"""`kvtool gpu-check`: prove on a GPU host what cannot be proven without, and write a report to send back."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.console import done, err, fail, out, print_json, warn
from kvtool.doctor.gpu.report import Report, Result, Status, Step
from kvtool.doctor.gpu.steps import STEPS, check
from kvtool.errors import SpecRefused


def gpu_check(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="This step and what it needs; repeatable.", show_default="all"),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face checkpoint directory to serve.", show_default="a tiny one, made here"),
    ] = None,
    output: Annotated[Path, typer.Option("--out", "-o", help="Where the report goes: OUT.txt and OUT.json.")] = Path(
        "gpu-check"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the work directory with the steps' full logs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    list_steps: Annotated[
        bool, typer.Option("--list", help="Print the steps and what each shows; run nothing.")
    ] = False,
) -> None:
    """Check TensorRT-LLM, connector, copies and transfers on this GPU host, and write a report.

    Exits 0 when every step passed, 1 when one failed, 3 when none failed but some were skipped: those show nothing.
    """
    if list_steps:
        for step in STEPS:
            typer.echo(f"{step.name:<12} {step.shows}")
        return
    unknown = set(only or ()) - {step.name for step in STEPS}
    if unknown:
        names = ", ".join(step.name for step in STEPS)
        raise SpecRefused(f"--only: wanted one of {names}, found {', '.join(sorted(unknown))}")
    if model is not None and not (model / "config.json").is_file():
        raise SpecRefused(f"--model: wanted a Hugging Face checkpoint directory, found no config.json in {model}")
    work = Path(tempfile.mkdtemp(prefix="kvtool-gpu-check-"))
    try:
        options = {"model": str(model.resolve()) if model else None}
        report = check(work, options, only or (), tell=_tell)
        _write(report, output)
    finally:
        if keep:
            warn(f"the steps' logs are in {work}; they were not scrubbed")
        else:
            shutil.rmtree(work, ignore_errors=True)
    if as_json:
        print_json(_loaded(report))
    else:
        out().print(report.text(), markup=False)
    err().print(f"report: {output}.txt, {output}.json", markup=False)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _tell(step: Step, result: Result) -> None:
    say = {Status.PASS: done, Status.FAIL: fail, Status.SKIPPED: warn}[result.status]
    say(f"{step.name}: {result.status.value}: {result.detail}")


def _write(report: Report, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in ((".txt", report.text()), (".json", report.json())):
        output.with_name(output.name + suffix).write_text(text, encoding="utf-8")


def _loaded(report: Report) -> object:
    import json

    return json.loads(report.json())
