"""`kvtool bench serve`: a deployment beside one process, in turns on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvtool.cli import console
from kvtool.cli.running import running
from kvtool.errors import Refused, Unavailable
from kvtool.units import show_size

if TYPE_CHECKING:
    from rich.console import Console

    from kvtool.config.spec import Spec
    from kvtool.measure.deployed import Deployed
    from kvtool.measure.processes import Cost
    from kvtool.measure.serve import Comparison

RECIPE = "smollm2-135m"
TARGETS = {
    "TTFT, one process cold / full hit": ">= 10",
    "TTFT, deployment cold / one process cold": "<= 1.10",
    "TBT, deployment / one process": "<= 1.05",
}
STREAM_TOKENS = 128
"""Length of the short-prompt stream whose CPU is counted."""


def serve(
    spec: Path | None = typer.Option(None, "--spec", help="Start this deployment. Default: one of the small model."),
    run_dir: Path | None = typer.Option(None, "--run-dir", help="Measure the deployment that runs here instead."),
    work_dir: Path = typer.Option(Path("run/bench"), "--dir", help="Where the default engine, spec and state go."),
    prompt_tokens: int = typer.Option(2048, "--prompt-tokens", min=64, help="Length of each prompt."),
    max_tokens: int = typer.Option(64, "--max-tokens", min=2, help="Tokens generated for each."),
    rounds: int = typer.Option(5, "--rounds", min=1, help="Prompts; each is asked cold, in one process, and warm."),
    idle: float = typer.Option(
        20.0, "--idle", min=1.0, help="Seconds over which the idle deployment's CPU is counted."
    ),
    seed: int = typer.Option(1, "--seed", help="Of the made-up prompts."),
    as_json: bool = typer.Option(False, "--json", help="Print raw results as JSON; the tables go to stderr."),
) -> None:
    """A deployment against one process: TTFT, TBT, overheads.

    Each round asks one new prompt cold through the deployment, in one process with the same engine and threads, and
    again through the deployment with its KV in the pool. Ratios are of neighbours.
    """
    if run_dir is not None:
        if spec is not None:
            raise Refused("--spec starts a deployment and --run-dir takes a running one; give one of the two")
        found = _measure_running(run_dir.resolve(), prompt_tokens, max_tokens, rounds, idle, seed, as_json)
    else:
        spec_file = spec or default_spec(work_dir.resolve())
        from kvtool.config.load import load_spec

        loaded, _ = load_spec(spec_file)
        with running(spec_file, loaded.state_dir) as deployed:
            found = _measure(deployed, loaded, prompt_tokens, max_tokens, rounds, idle, seed, as_json)
    if as_json:
        console.print_json(found)
    if not found["same_tokens"]:
        console.fail("the deployment's tokens differ from one process's; these speeds mean nothing")
        raise typer.Exit(1)


def default_spec(work_dir: Path) -> Path:
    from kvtool.engine.build import build

    console.step(f"kvtool build {RECIPE}")
    build(RECIPE, work_dir / "engine")
    spec = work_dir / "spec.yaml"
    spec.write_text("version: 1\nname: bench\nengine: engine\nrun_dir: state\n", encoding="utf-8")
    return spec


def _measure_running(run_dir: Path, *settings: Any) -> dict[str, Any]:
    from kvtool.config.spec import Spec
    from kvtool.measure.deployed import Deployed

    deployed = Deployed(run_dir, ignore_eos=True)
    try:
        raw = json.loads((run_dir / "spec.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unavailable(f"{run_dir / 'spec.json'} cannot be read: {error}; start the deployment anew") from None
    return _measure(deployed, Spec.model_validate(raw), *settings)


def _measure(
    deployed: Deployed,
    spec: Spec,
    prompt_tokens: int,
    max_tokens: int,
    rounds: int,
    idle_s: float,
    seed: int,
    as_json: bool,
) -> dict[str, Any]:
    from kvtool.measure.alone import Alone
    from kvtool.measure.facts import facts
    from kvtool.measure.processes import settle, watch
    from kvtool.measure.serve import compare, made_prompt
    from kvtool.serve.options import DecodeOptions

    deployed.ignore_eos = True
    about = facts(["kvtool", *sys.argv[1:]], seed)  # before the load of measuring
    console.step(f"idle: CPU of every process over {idle_s:g} s")
    settle(deployed.id)
    idle = watch(deployed.id, idle_s, [deployed.supervisor])
    console.step("one process: load the engine")
    options = DecodeOptions(
        threads=spec.decode.threads,
        prompt_threads=spec.prefill.threads,
        kv_blocks=spec.decode.kv_blocks,
        chunk_tokens=spec.prefill.chunk_tokens,
    )
    alone = Alone(spec.engine, options, ignore_eos=True)

    def count(text: str) -> int:
        return len(alone.tokenizer.encode(text))

    try:
        found = compare(
            deployed,
            alone,
            prompts=lambda index: made_prompt(seed, index, prompt_tokens, count),
            rounds=rounds,
            max_tokens=max_tokens,
            settle=lambda: _settled(deployed),
            said=console.done,
        )
    finally:
        alone.close()
    _settled(deployed)
    streaming = _cpu_of_a_stream(deployed, made_prompt(seed, rounds, 16, count))
    _show(console.err() if as_json else console.out(), found, idle, idle_s, streaming, about)
    return {
        **about,
        **found.to_json(),
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "threads": {"prefill": spec.prefill.threads, "decode": spec.decode.threads},
        "idle": {"seconds": idle_s, "processes": [_cost_fields(cost) for cost in idle]},
        "cpu_ms_per_streamed_token": streaming,
    }


def _settled(deployed: Deployed) -> None:
    """Raises Unavailable: something in the deployment keeps working, and would spoil every measurement."""
    from kvtool.measure.processes import settle

    if not settle(deployed.id):
        raise Unavailable("the deployment did not come to rest within a minute; is somebody else using it?")


def _cpu_of_a_stream(deployed: Deployed, prompt: str) -> dict[str, float]:
    """CPU milliseconds a token by process, over one stream from a short prompt."""
    from kvtool.measure.processes import Watch

    with Watch(deployed.id, [deployed.supervisor]) as watch:
        answer = deployed(prompt, STREAM_TOKENS)
    return {
        f"{cost.name} ({cost.pid})": round(cost.cpu_s * 1e3 / len(answer.tokens), 3)
        for cost in watch.costs
        if cost.cpu_s > 0
    }


def _show(
    out: Console,
    found: Comparison,
    idle: list[Cost],
    idle_s: float,
    streaming: dict[str, float],
    about: dict[str, Any],
) -> None:
    ratios = [
        (name, f"{each.median:.2f}", f"{each.low:.2f} to {each.high:.2f}", TARGETS.get(name, ""))
        for name, each in found.ratios().items()
    ]
    out.print(console.table("Ratios", ["", "median", "spread", "target"], ratios, right=(1, 2, 3)))
    out.print(f"same tokens as one process: {'yes' if found.same_tokens else 'NO'}")
    raw = [
        (name, f"{hit:.0%}", str(s.count), f"{s.median:.1f}", f"{s.p90:.1f}", f"{s.p99:.1f}", f"{s.max:.1f}")
        for name, (s, hit) in found.raw().items()
    ]
    overhead = found.stream_overhead_ms()
    raw.append(
        (
            "front and Triton, ms a streamed token", "", str(overhead.count), f"{overhead.median:.2f}",
            f"{overhead.p90:.2f}", f"{overhead.p99:.2f}", f"{overhead.max:.2f}",
        )
    )  # fmt: skip
    columns = ["", "hit", "n", "median", "P90", "P99", "max"]
    out.print(console.table("Raw", columns, raw, right=range(1, 7)))
    rows = [
        (
            str(cost.pid), cost.name, f"{cost.cpu_s / idle_s:.2%}", show_size(cost.resident), show_size(cost.shared),
            f"{streaming.get(f'{cost.name} ({cost.pid})', 0.0):.2f}",
        )
        for cost in idle
    ]  # fmt: skip
    total = sum(cost.cpu_s for cost in idle) / idle_s
    rows.append(("", "all", f"{total:.2%}", "", "", f"{sum(streaming.values()):.2f}"))
    columns = ["pid", "process", f"CPU idle, {idle_s:g} s", "resident", "of it shared", "CPU ms a streamed token"]
    out.print(console.table("Processes", columns, rows, right=(0, 2, 3, 4, 5)))
    hardware, versions = about["hardware"], about["versions"]
    out.print(f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory']}, GPU: {hardware['gpu']}")
    out.print(", ".join(f"{name} {version}" for name, version in versions.items()))
    out.print(f"commit {about['commit']}, seed {about['seed']}: {about['command']}", markup=False)


def _cost_fields(cost: Cost) -> dict[str, Any]:
    return {"name": cost.name, "cpu_s": round(cost.cpu_s, 4), "resident": cost.resident, "shared": cost.shared}
