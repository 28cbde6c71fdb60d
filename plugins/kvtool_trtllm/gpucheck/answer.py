"""One LLM in a process of its own: `python -m kvtool_trtllm.gpucheck.answer JOB`, a JSON file; its answers in another.

A process for each, since GPU memory and TensorRT-LLM's MPI state end only with it. It goes through kvtool's own doors:
the bundle, the arguments of a role, the LLM of the engine room.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtool.engine.trtllm.bundle import read_bundle
from kvtool.engine.trtllm.llm import Llm
from kvtool.engine.trtllm.llm_args import Role, Transceiver, llm_args
from kvtool.engine.trtllm.signatures import fields
from kvtool.engine.trtllm.version import installed
from kvtool.serve.trtllm_terms import context_keywords, generation_keywords, handoff_state

START_S = 300.0
ANSWER_S = 120.0
STAY_S = 300.0


@dataclass(frozen=True)
class Job:
    """`rounds`: how often the prompts are asked, one after another. `transceiver`: its backend, for a context or a
    generation server. `handoff`: where the former leaves what the latter needs; `stop`: a context server stays until
    that file is there, since its KV is pulled."""

    bundle: str
    out: str
    prompts: list[list[int]]
    max_tokens: int
    role: Role = "both"
    connector: bool = False
    rounds: int = 1
    memory_fraction: float = 0.3
    transceiver: str | None = None
    handoff: str | None = None
    stop: str | None = None


def run(job: Job) -> None:
    bundle, version = read_bundle(Path(job.bundle)), installed()
    longest = bundle.fields.max_seq_len
    args = llm_args(
        bundle,
        role=job.role,
        version=version,
        memory_fraction=job.memory_fraction,
        transceiver=Transceiver(job.transceiver, longest, 60.0) if job.transceiver else None,
        connector=job.connector,
        cuda_graphs=False,
    )
    llm = Llm(args, [0], start_timeout_s=START_S, where="gpu-check")
    try:
        answers = asyncio.run(_ask(llm, job, str(version)))
        half = Path(job.out).with_suffix(".half")
        half.write_text(json.dumps(answers), encoding="utf-8")
        half.replace(job.out)
        until_s = time.monotonic() + STAY_S
        while job.stop and not Path(job.stop).exists() and time.monotonic() < until_s:
            time.sleep(0.1)
    finally:
        llm.close()


async def _ask(llm: Llm, job: Job, version: str) -> list[list[list[int]]]:
    """[rounds][prompts] of token ids. Of a context server, the hand-offs go to their file."""
    own_ids = "disagg_request_id" in fields("DisaggregatedParams", version)
    states = json.loads(Path(job.handoff).read_text()) if job.handoff and job.role == "decode" else None
    left, answers = [], []
    for _ in range(job.rounds):
        these = []
        for index, prompt in enumerate(job.prompts):
            extra: dict[str, Any] | None = None
            if job.transceiver:
                extra = generation_keywords(states[index]) if states is not None else context_keywords(own_ids)
            output = await asyncio.wait_for(_one(llm, prompt, job.max_tokens, extra), ANSWER_S)
            these.append([int(token) for token in output.outputs[0].token_ids])
            if job.handoff and states is None:
                left.append(handoff_state(output.outputs[0].disaggregated_params, output.outputs[0].finish_reason))
        answers.append(these)
    if left:
        assert job.handoff is not None
        Path(job.handoff).write_text(json.dumps(left), encoding="utf-8")
    return answers


async def _one(llm: Llm, prompt: Sequence[int], max_tokens: int, extra: dict[str, Any] | None) -> Any:
    sampling = {"max_tokens": max_tokens, "end_id": -1, "pad_id": 0, "detokenize": False, "ignore_eos": True}
    output = llm.generate(prompt, sampling, streaming=False, handoff=extra)
    return await output


def write_job(job: Job, path: Path) -> Path:
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")
    return path


if __name__ == "__main__":
    run(Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
