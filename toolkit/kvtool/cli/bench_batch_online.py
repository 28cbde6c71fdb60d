"""`kvtool bench batch-online`: online streams on one deployment, with and without a batch job beside them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import console
from kvtool.cli.running import running
from kvtool.errors import Refused

if TYPE_CHECKING:
    from kvtool.measure.deployed import Deployed


def batch_online(
    spec: Annotated[Path | None, typer.Option("--spec", help="Start this deployment.", show_default=False)] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Measure the deployment that runs here instead.")
    ] = None,
    work_dir: Annotated[Path, typer.Option("--dir", help="Where a default engine, spec and state go.")] = Path(
        "run/bench"
    ),
    requests: Annotated[int, typer.Option("--requests", min=10, help="Online requests of each kind.")] = 240,
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows of each kind.")] = 4,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Online requests a second.", show_default="by --busy")
    ] = None,
    busy: Annotated[
        float, typer.Option("--busy", min=0.01, max=0.95, help="Share of the time that online requests take.")
    ] = 0.4,
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals, lengths and texts.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON; the tables go to stderr.")] = False,
) -> None:
    """TTFT of online streams with a batch job on the same deployment, beside without.

    Windows without and with a job alternate; both have the same arrivals and lengths, and texts of their own."""
    settings = {"requests": requests, "windows": windows, "rate": rate, "busy": busy, "seed": seed}
    if run_dir is not None:
        if spec is not None:
            raise Refused("--spec starts a deployment and --run-dir takes a running one; give one of the two")
        from kvtool.measure.deployed import Deployed

        found = _measure(Deployed(run_dir.absolute()), run_dir.absolute(), settings)
    else:
        from kvtool.cli.bench_serve import default_spec
        from kvtool.config.load import load_spec

        spec_file = spec or default_spec(work_dir.resolve())
        loaded, _ = load_spec(spec_file)
        with running(spec_file, loaded.state_dir) as deployed:
            found = _measure(deployed, loaded.state_dir, settings)
    _show(found, as_json)
    if as_json:
        console.print_json(found)


def _measure(deployed: Deployed, run_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    from kvtool.engine.tokenizer import Tokenizer
    from kvtool.measure.batch_online import measure
    from kvtool.measure.facts import facts
    from kvtool.measure.processes import settle
    from kvtool.triton.state import engine_of

    words = Tokenizer(engine_of(run_dir))
    about = facts(["kvtool", *sys.argv[1:]], settings["seed"])
    with tempfile.TemporaryDirectory(prefix="kvtool-bench-batch-online-") as folder:
        found = measure(
            deployed.url,
            run_dir,
            Path(folder),
            lambda text: len(words.encode(text)),
            settle=lambda: settle(deployed.id),
            say=console.done,
            **settings,
        )
    return {**about, **settings, **found}


def _show(found: dict[str, Any], as_json: bool) -> None:
    out = console.err() if as_json else console.out()
    rows = []
    for name, label in (("without", "without a job"), ("with", "with a job beside")):
        online = found["online"][name]
        ttft, tbt = online["ttft_ms"], online["tbt_ms"]
        rows.append(
            (
                label, str(ttft["count"]), str(online["failed"]), f"{online['hit_ratio']:.0%}", f"{ttft['median']:.0f}",
                f"{ttft['p90']:.0f}", f"{ttft['p99']:.0f}", f"{tbt['median']:.0f}", f"{tbt['p99']:.0f}",
            )
        )  # fmt: skip
    columns = ["online", "n", "failed", "hit", "TTFT ms P50", "P90", "P99", "TBT ms P50", "P99"]
    out.print(console.table(f"{found['rate']:.2f} requests/s", columns, rows, right=range(1, 9)))
    batch = found["batch"]
    out.print(
        f"TTFT P99 with a job is {found['ttft_p99_ratio']:.2f} x that without (target: at most {found['target']:.1f})",
        markup=False,
    )
    out.print(
        f"the job finished {batch['finished']} requests in {batch['seconds']:.0f} s; the longest time without one: "
        f"{batch['longest_without_progress_s']:.1f} s",
        markup=False,
    )
    hardware, versions = found["hardware"], found["versions"]
    out.print(f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory']}, GPU: {hardware['gpu']}")
    out.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    out.print(f"commit {found['commit']}, seed {found['seed']}: {found['command']}", markup=False)
