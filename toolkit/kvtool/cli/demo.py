"""`kvtool demo`: the whole way once, said step by step, and nothing left behind.

Doctor, build, deploy, a long prompt cold, the same prompt with its KV in the pool, the same prompt in one process, and
a table. It fails when the tokens differ: speed that changes the answer is no speed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvtool.cli import console
from kvtool.cli.demo_text import QUESTION, document
from kvtool.cli.running import running, short
from kvtool.errors import Missing
from kvtool.units import show_size

if TYPE_CHECKING:
    from kvtool.measure.deployed import Deployed
    from kvtool.measure.serve import Answer, Prompt

RECIPE = "smollm2-135m"
SPEC = """version: 1
name: demo
engine: engine
run_dir: state
"""


def demo(
    keep: bool = typer.Option(False, "--keep", help="Leave the deployment running, and say how to talk to it."),
    run_dir: Path = typer.Option(Path("run/demo"), "--dir", help="Where engine, spec, state and logs go."),
    entries: int = typer.Option(
        44, "--entries", min=1, max=200, help="Length of the made-up document; 1 is ~33 tokens."
    ),
    max_tokens: int = typer.Option(64, "--max-tokens", min=2, help="Length of each answer."),
) -> None:
    """Build, deploy, stream, compare: the whole way in one command.

    Everything is stopped at the end, also after Ctrl-C or a failure.
    """
    run_dir = run_dir.resolve()
    prompt = [{"role": "user", "content": f"{document(entries)}\n\n{QUESTION}"}]
    _check_machine()
    engine = run_dir / "engine"
    block_size = _build(engine)
    spec = run_dir / "spec.yaml"
    spec.write_text(SPEC, encoding="utf-8")
    with running(spec, run_dir / "state", keep) as deployed:
        cold, warm = _ask_twice(deployed, prompt, max_tokens)
        alone = _ask_alone(engine, prompt, max_tokens)
        same = cold.tokens == warm.tokens == alone.tokens
        _show(cold, warm, alone, same, block_size)
        if keep:
            _say_how_to_talk(run_dir / "state", spec)
    if not same:
        raise typer.Exit(1)


def _check_machine() -> None:
    """Raises Missing: something needed is not here."""
    from kvtool.doctor.checks import examine
    from kvtool.doctor.host import this_host

    console.step("kvtool doctor: does this machine have what is needed?")
    findings = examine(this_host())
    failed = [finding for finding in findings if finding.failed]
    for finding in failed:
        console.warn(f"{finding.name}: {finding.found}; {finding.fix}")
    if failed:
        raise Missing(f"the demo needs {', '.join(finding.name for finding in failed)}; the fixes are above")
    console.done(f"{len(findings)} things looked at, all that is needed is here")


def _build(directory: Path) -> int:
    """Build the small model's engine; bytes of one of its KV blocks."""
    from kvtool.engine.build import build

    console.step(f"kvtool build {RECIPE}: checkpoint to engine directory (some 20 s, once)")
    result = build(RECIPE, directory)
    size = show_size(sum(result.manifest.files.values()))
    how = f"built in {result.seconds:.0f} s" if result.built else "built before, used again"
    console.done(f"{result.manifest.architecture}, {size}, KV {result.manifest.layout}: {how}")
    return result.manifest.layout.block_size


def _ask_twice(deployed: Deployed, prompt: Prompt, max_tokens: int) -> tuple[Answer, Answer]:
    from kvtool.measure.processes import settle

    answers = []
    for text in ("a prompt that nobody asked before", "the same prompt again, its KV is in the pool now"):
        console.step(f"kvtool generate: {text}")
        answer = deployed(prompt, max_tokens, on_text=_stream_out)
        sys.stdout.write("\n")
        console.done(
            f"{answer.prompt_tokens} prompt tokens, {answer.hit_tokens} of them from the pool; "
            f"first token after {answer.ttft_s * 1e3:.0f} ms"
        )
        answers.append(answer)
        settle(deployed.id)
    return answers[0], answers[1]


def _ask_alone(engine: Path, prompt: Prompt, max_tokens: int) -> Answer:
    from kvtool.measure.alone import Alone
    from kvtool.serve.options import DecodeOptions, PrefillOptions

    console.step("kvtool generate --local: the same prompt in one process, without servers and pool")
    alone = Alone(engine, DecodeOptions(chunk_tokens=PrefillOptions().chunk_tokens))
    try:
        answer = alone(prompt, max_tokens)
    finally:
        alone.close()
    console.done(f"first token after {answer.ttft_s * 1e3:.0f} ms")
    return answer


def _show(cold: Answer, warm: Answer, alone: Answer, same: bool, block_size: int) -> None:
    from kvtool.measure.stats import summarise

    def gap(answer: Answer) -> str:
        if not answer.gaps_s:
            return "-"
        gaps = summarise([gap_s * 1e3 for gap_s in answer.gaps_s])
        return f"{gaps.median:.1f} / {gaps.p90:.1f} ms"

    answers = (cold, warm, alone)
    rows = [
        ("TTFT", *(f"{answer.ttft_s * 1e3:.0f} ms" for answer in answers)),
        ("TTFT, one process = 1", *(f"{answer.ttft_s / alone.ttft_s:.2f}" for answer in answers)),
        ("TBT, median / P90", *(gap(answer) for answer in answers)),
        ("prompt tokens from the pool", *(f"{a.hit_tokens} of {a.prompt_tokens}" for a in (cold, warm)), "-"),
        ("blocks put into the pool", str(cold.blocks_put), str(warm.blocks_put), "-"),
        ("blocks read from it, by path", _paths(cold, block_size), _paths(warm, block_size), "-"),
    ]
    out = console.out()
    out.print()
    out.print(console.table("", ["", "cold", "KV in the pool", "one process"], rows, right=(1, 2, 3)))
    out.print(f"same tokens as one process: {'yes' if same else 'NO'}")


def _paths(answer: Answer, block_size: int) -> str:
    shown = [
        f"{size // block_size} by {path}, {show_size(size)}" for path, size in sorted(answer.path_bytes.items()) if size
    ]
    return "; ".join(shown) or "none"


def _say_how_to_talk(state_dir: Path, spec: Path) -> None:
    console.out().print(
        f"\nIt runs on. Talk to it, then stop it:\n"
        f"  kvtool generate --run-dir {short(state_dir)} --prompt 'What is a harbour?'\n"
        f"  kvtool chat --run-dir {short(state_dir)}\n"
        f"  kvtool deploy status --run-dir {short(state_dir)}\n"
        f"  kvtool deploy down --run-dir {short(state_dir)}",
        markup=False,
    )


def _stream_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
