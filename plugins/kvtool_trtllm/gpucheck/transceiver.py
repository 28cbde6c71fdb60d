"""Step `transceiver`: a context and a generation server at once, KV by TensorRT-LLM's own transfer between them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

from kvtool.engine.trtllm.bundle import Bundle, read_bundle
from kvtool_trtllm.gpucheck.account import Context, Evidence, Wrong, gpu
from kvtool_trtllm.gpucheck.answer import ANSWER_S, START_S, Job
from kvtool_trtllm.gpucheck.serving import TOKENS, answer, compare, prompts, read_answers, start

BACKEND = "UCX"


def show_transceiver(context: Context) -> tuple[str, Evidence]:
    gpu()
    bundle, work = read_bundle(context.work / "bundle"), context.work
    asked = prompts(bundle, 2)
    plain = answer(work, "whole", bundle, asked, rounds=2)
    decoded = between(work, bundle, asked)
    cold = compare(plain, decoded, "of the two servers")
    tokens = sum(map(len, decoded))
    return f"{cold} of {len(asked)} as one cold process, {BACKEND}", {"prompts": len(asked), "tokens": tokens}


def between(work: Path, bundle: Bundle, asked: list[list[int]]) -> list[list[int]]:
    """Answers of a generation server whose KV a context server computed. The latter stays until they are there."""
    handoff, stop = work / "handoff.json", work / "context.stop"
    common: dict[str, Any] = {
        "bundle": str(bundle.directory),
        "prompts": asked,
        "transceiver": BACKEND,
        "handoff": str(handoff),
    }
    outs = {role: work / f"{role}.answers.json" for role in ("context", "generation")}
    first = Job(**common, out=str(outs["context"]), role="prefill", max_tokens=1, stop=str(stop))
    process = start(first, work / "context.job.json", bundle, None)
    try:
        _await(outs["context"], process, "context server")
        second = Job(**common, out=str(outs["generation"]), role="decode", max_tokens=TOKENS)
        other = start(second, work / "generation.job.json", bundle, None)
        try:
            code = other.wait(START_S + ANSWER_S)
        except subprocess.TimeoutExpired:
            raise Wrong("the generation server did not answer in time") from None
        finally:
            other.kill()
            other.wait()
        return read_answers("generation server", code, outs["generation"])[0]
    finally:
        stop.touch()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(out: Path, process: subprocess.Popen[bytes], name: str) -> None:
    until_s = time.monotonic() + START_S + ANSWER_S
    while not out.is_file():
        if process.poll() is not None:
            raise Wrong(f"the {name} ended with exit code {process.returncode} before it answered")
        if time.monotonic() > until_s:
            raise Wrong(f"the {name} did not answer in time")
        time.sleep(0.2)
