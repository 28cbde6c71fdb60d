"""Steps `equality` and `pair`: answers with the pool are those without it, and blocks of the pool made them.

TensorRT-LLM's own reuse may round the first logits after a hit otherwise than a cold run, so an answer counts as equal
when it is that of the cold run or that of a run in which the engine reused the same blocks by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from kvtool.engine.trtllm.bundle import CONNECTOR_FILE, Bundle, read_bundle
from kvtool.engine.trtllm.connector import POOL_ENV, SETTINGS_ENV
from kvtool.engine.trtllm.llm_args import Role
from kvtool.kv.shard import stored_layout
from kvtool_trtllm.gpucheck.account import Context, Evidence, Wrong, gpu
from kvtool_trtllm.gpucheck.answer import ANSWER_S, START_S, Job, write_job
from kvtool_trtllm.gpucheck.pools import blocks_served, pool

PROMPTS, TOKENS = 6, 24
Answers = list[list[list[int]]]
"""[rounds][prompts][tokens]"""


def show_equality(context: Context) -> tuple[str, Evidence]:
    """A process without a pool, one that fills the pool, and one that finds its blocks there."""
    gpu()
    return equality(context.work)


def equality(work: Path) -> tuple[str, Evidence]:
    bundle = read_bundle(work / "bundle")
    asked = prompts(bundle, 0)
    plain = answer(work, "plain", bundle, asked, rounds=2)
    with connected_pool(work, bundle) as (run_dir, state):
        first = answer(work, "first", bundle, asked, state=state)
        before = blocks_served(run_dir)
        again = answer(work, "again", bundle, asked, state=state)
        hits = blocks_served(run_dir) - before
    compare(plain, first[0], "with an empty pool")
    cold = compare(plain, again[0], "from the pool")
    others = "" if cold == len(asked) else ", the others as with the engine's own reuse"
    return f"{cold} of {len(asked)} as cold{others}; {hits} blocks from the pool", {
        "prompts": len(asked),
        "tokens": sum(map(len, again[0])),
        "hit_blocks": hits,
        "as_cold": cold,
    }


def show_pair(context: Context) -> tuple[str, Evidence]:
    """Prefill and decode roles: the first process computes prompts, the second finds their KV in the pool."""
    gpu()
    return pair(context.work)


def pair(work: Path) -> tuple[str, Evidence]:
    bundle = read_bundle(work / "bundle")
    asked = prompts(bundle, 1)
    plain = answer(work, "one", bundle, asked, rounds=2)
    with connected_pool(work, bundle) as (run_dir, state):
        answer(work, "prefill", bundle, asked, state=state, role="prefill", max_tokens=1)
        before = blocks_served(run_dir)
        decoded = answer(work, "decode", bundle, asked, state=state, role="decode")
        hits = blocks_served(run_dir) - before
    cold = compare(plain, decoded[0], "of the pair")
    return f"{cold} of {len(asked)} as one cold process; {hits} blocks from the pool", {
        "prompts": len(asked),
        "tokens": sum(map(len, decoded[0])),
        "hit_blocks": hits,
        "as_cold": cold,
    }


def prompts(bundle: Bundle, seed: int) -> list[list[int]]:
    """Prompts of 3 to 12 blocks, half of them with a beginning in common, none a whole number of blocks."""
    rng, block = Random(seed), bundle.manifest.layout.block_tokens
    top = min(bundle.manifest.vocab_size, 32000)
    shared = [rng.randrange(2, top) for _ in range(3 * block)]
    made = []
    for index in range(PROMPTS):
        own = [rng.randrange(2, top) for _ in range(rng.randrange(3, 9) * block + rng.randrange(1, block))]
        made.append(shared + own if index % 2 else own)
    longest = bundle.fields.max_seq_len - TOKENS
    return [prompt[:longest] for prompt in made]


def compare(plain: Answers, got: Sequence[Sequence[int]], what: str) -> int:
    """How many of `got` are those of the cold run.

    Raises:
        Wrong: one is neither that of the cold run nor that of the engine's own reuse.
    """
    cold, warm = plain[0], plain[-1]
    if len(got) != len(cold) or not all(got):
        raise Wrong(f"answers {what}: wanted {len(cold)}, with tokens, found lengths {[len(one) for one in got]}")
    for index, tokens in enumerate(got):
        if list(tokens) not in (cold[index], warm[index]):
            at = next((n for n, (a, b) in enumerate(zip(tokens, cold[index], strict=False)) if a != b), 0)
            raise Wrong(
                f"answers {what}: prompt {index} differs from token {at} on: {list(tokens)[at : at + 4]} instead of "
                f"{cold[index][at : at + 4]}"
            )
    return sum(list(tokens) == cold[index] for index, tokens in enumerate(got))


@contextmanager
def connected_pool(work: Path, bundle: Bundle) -> Iterator[tuple[Path, Path]]:
    """A pool for the blocks of `bundle`; its run directory and state file."""
    layout = stored_layout(bundle.manifest.layout, bundle.connector.stored_parallel)
    with pool(layout, work / "pool") as handle:
        yield handle.run_dir, handle.state_file


def answer(
    work: Path,
    name: str,
    bundle: Bundle,
    asked: list[list[int]],
    *,
    state: Path | None = None,
    role: Role = "both",
    rounds: int = 1,
    max_tokens: int = TOKENS,
) -> Answers:
    """Answers of one LLM process; `state`: of the pool, with which the connector is used."""
    out = work / f"{name}.answers.json"
    job = Job(
        bundle=str(bundle.directory),
        out=str(out),
        prompts=asked,
        max_tokens=max_tokens,
        role=role,
        connector=state is not None,
        rounds=rounds,
    )
    process = start(job, work / f"{name}.job.json", bundle, state)
    limit_s = START_S + ANSWER_S
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise Wrong(f"the LLM {name} did not answer within {limit_s:g} s") from None
    return read_answers(name, code, out)


def start(job: Job, path: Path, bundle: Bundle, state: Path | None) -> subprocess.Popen[bytes]:
    """The process of `job`, with the connector's settings in its environment."""
    environment = dict(os.environ)
    if state is not None:
        environment |= {SETTINGS_ENV: str(bundle.directory / CONNECTOR_FILE), POOL_ENV: str(state)}
    argv = [sys.executable, "-m", "kvtool_trtllm.gpucheck.answer", str(write_job(job, path))]
    return subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)


def read_answers(name: str, code: int | None, out: Path) -> Answers:
    if code or not out.is_file():
        raise Wrong(f"the LLM {name} ended with exit code {code} {'after' if out.is_file() else 'without'} its answers")
    found: Answers = json.loads(out.read_text(encoding="utf-8"))
    return found
