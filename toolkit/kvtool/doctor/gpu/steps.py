"""The steps of the GPU check, in order, and the check itself.

A step that needs another is skipped unless that one passed. Each one's evidence is what a pass must bring along, so
that an output equality without a single hit, or a round trip of no bytes, shows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtool import __version__
from kvtool.doctor.gpu.machine import machine, scrub
from kvtool.doctor.gpu.report import Report, Result, Status, Step
from kvtool.doctor.gpu.runner import command, run_step

STEPS = (
    Step("versions", "versions that an adapter drives, and a GPU that torch computes on", 120, {"gpus": 1}),
    Step("import", "tensorrt_llm is imported without joining an MPI job", 300, {"names": 3}, ("versions",)),
    Step(
        "build",
        "kvtool build makes a bundle that TensorRT-LLM's own classes accept",
        300,
        {"files": 3, "classes": 3},
        ("import",),
    ),
    Step(
        "connector",
        "blocks go from GPU pages to a real pool and back to other pages by the connector pair, byte for byte",
        300,
        {"blocks": 8, "bytes": 1, "found_tokens": 1},
        ("build",),
    ),
    Step(
        "kernels",
        "gather and scatter on the GPU give the bytes of their CPU twin, in every shape tried",
        300,
        {"cases": 20, "bytes": 1, "kernel_cases": 20},
        ("versions",),
    ),
    Step(
        "equality",
        "an LLM with the pool answers as one without, tokens equal, with blocks from the pool",
        900,
        {"prompts": 4, "tokens": 1, "hit_blocks": 1},
        ("build", "connector"),
    ),
    Step(
        "pair",
        "prefill in one process and decode in another, KV by the pool: tokens equal to one process",
        900,
        {"prompts": 4, "tokens": 1, "hit_blocks": 1},
        ("equality",),
    ),
    Step(
        "transceiver",
        "prefill and decode in two processes, KV by TensorRT-LLM's transceiver: tokens equal to one process",
        900,
        {"prompts": 4, "tokens": 1},
        ("build",),
    ),
    Step(
        "nixl",
        "NIXL reads GPU memory of another process, byte for byte",
        180,
        {"bytes": 1 << 20},
        ("versions",),
    ),
    Step("gds", "GPU memory goes to a file and back without passing the host", 180, {"bytes": 1 << 20}, ("versions",)),
)

Run = Callable[[Step], Result]
Tell = Callable[[Step, Result], None]


def check(
    work: Path, options: Mapping[str, Any], only: Sequence[str] = (), tell: Tell | None = None, run: Run | None = None
) -> Report:
    """Run all steps, or those named in `only` with what they need; the others are skipped and say so.

    `work`: a directory of the check's own. `tell` hears of each step as it ends.
    """
    clean = scrub(work)

    def run_here(step: Step) -> Result:
        return run_step(step, command(step.name, work, options), work, clean)

    began = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    wanted, results = _with_needs(only), dict[str, Result]()
    for step in STEPS:
        result = _reason_to_skip(step, wanted, results) or (run or run_here)(step)
        results[step.name] = result
        if tell:
            tell(step, result)
    return Report(__version__, began, clean.value(machine()), STEPS, list(results.values()))


def _with_needs(only: Sequence[str]) -> set[str]:
    wanted = set(only) or {step.name for step in STEPS}
    for step in reversed(STEPS):
        if step.name in wanted:
            wanted |= set(step.needs)
    return wanted


def _reason_to_skip(step: Step, wanted: set[str], results: Mapping[str, Result]) -> Result | None:
    if step.name not in wanted:
        return Result(step.name, Status.SKIPPED, "not asked for")
    for need in step.needs:
        if results[need].status is not Status.PASS:
            how = "failed" if results[need].status is Status.FAIL else "was skipped"
            return Result(step.name, Status.SKIPPED, f"needs {need}, which {how}")
    return None
