"""A batch job in its own order, beside the same requests in the order of arrival, with and without reuse.

The job is made from a seed: families of prompts that begin alike, two levels deep (an instruction, then an example),
in random order, with mixed lengths. Each way runs in a process of its own through the command line that people use;
what is compared is the job's own time, from its first request to its last, without loading the engine.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from kvtool.engine.manifest import read_manifest
from kvtool.errors import Unavailable
from kvtool.kv.block import block_keys

TOKENS_LOW, TOKENS_HIGH = 1000, 40000
"""Token ids of prompts: ordinary words, so no special ones."""
FAMILY = 20
"""Requests that begin alike, on average: so many that reuse pays, so few that their prefixes together do not fit into a
small pool."""
_OUT = (1, 2, 4, 4, 8, 8, 16, 32)


@dataclass(frozen=True)
class Work:
    """A made job. `shared`: share of prompt tokens that lie in prefixes which at least two requests have."""

    requests: int
    prompt_tokens: int
    shared: float
    distinct_blocks: int
    output_tokens: int


@dataclass(frozen=True)
class Way:
    """One way to run it. `seconds` of work; `cpu_s`: of the whole command; `same`: how many answers are those of the
    first way."""

    name: str
    seconds: float
    cpu_s: float
    requests_s: float
    hit_ratio: float
    same: int


def make_job(path: Path, requests: int, block_tokens: int, seed: int, shared: float = 0.7) -> Work:
    """Write a job of token prompts of a few blocks each; about `shared` of their tokens are in shared prefixes."""
    rng = Random(seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(TOKENS_LOW, TOKENS_HIGH) for _ in range(count)]

    families = [some(block_tokens * rng.randint(1, 3)) for _ in range(max(2, requests // FAMILY))]
    examples = [[some(block_tokens * rng.randint(0, 1)) for _ in range(2)] for _ in families]
    made: list[tuple[list[int], int]] = []
    for _ in range(requests):
        at = rng.randrange(len(families))
        head = families[at] + rng.choice(examples[at])
        own = max(2, round(len(head) * (1 - shared) / shared * rng.uniform(0.4, 1.6)))
        made.append((head + some(own), rng.choice(_OUT)))
    nodes, common, total = dict[bytes, int](), 0, 0
    for tokens, _ in made:
        for key in block_keys(b"", tokens, block_tokens):
            nodes[key] = nodes.get(key, 0) + 1
    for tokens, _ in made:
        total += len(tokens)
        common += block_tokens * sum(nodes[key] > 1 for key in block_keys(b"", tokens, block_tokens))
    with path.open("w", encoding="ascii") as file:
        for number, (tokens, out) in enumerate(made):
            body = {"prompt": tokens, "max_tokens": out, "ignore_eos": True}
            line = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    return Work(requests, total, common / total, len(nodes), sum(out for _, out in made))


def measure(
    engine: Path, requests: int, alone: int, seed: int, threads: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """`alone`: how many requests are run one at a time too, for their answers.

    Raises:
        Unavailable: a run failed; what it said is in the sentence.
    """
    layout = read_manifest(engine).layout
    with tempfile.TemporaryDirectory(prefix="kvtool-bench-batch-") as folder:
        job = Path(folder) / "job.jsonl"
        work = make_job(job, requests, layout.block_tokens, seed)
        tenth = max(work.distinct_blocks * layout.block_size // 10, 16 * layout.block_size)
        common = ["--engine", str(engine), "--threads", str(threads)]
        tell(f"{work.requests} requests, {work.prompt_tokens} prompt tokens, {work.shared:.0%} in shared prefixes")
        some = Path(folder) / "alone.jsonl"
        some.write_text("".join(job.read_text().splitlines(keepends=True)[:alone]))
        ways: list[Way] = []
        answers: dict[str, dict[str, str]] = {}
        for name, source, options in (
            ("one at a time, no reuse", some, ["--arrival-order", "--pool-size", "0", "--concurrent", "1"]),
            ("arrival order, no reuse", job, ["--arrival-order", "--pool-size", "0"]),
            ("arrival order, pool of a tenth", job, ["--arrival-order", "--pool-size", str(tenth)]),
            ("kvtool batch, pool of a tenth", job, ["--pool-size", str(tenth)]),
        ):
            tell(name)
            began = _cpu_s()
            summary = _run(source, Path(folder) / f"{len(ways)}.jsonl", [*common, *options])
            cpu_s = _cpu_s() - began
            answers[name] = _answers(Path(summary["output"]))
            first = answers["one at a time, no reuse"]
            same = sum(answers[name].get(key) == text for key, text in first.items())
            count = summary["answered"]
            ways.append(Way(name, summary["seconds"], cpu_s, count / summary["seconds"], summary["hit_ratio"], same))
    arrival, reuse, ours = (answers[way.name] for way in ways[1:])
    return {
        "work": asdict(work),
        "pool_bytes": tenth,
        "ways": [asdict(way) for way in ways],
        "compared_with_one_at_a_time": alone,
        "same_in_all_three": sum(arrival[key] == reuse.get(key) == ours.get(key) for key in arrival),
        "ratio_no_reuse": ways[1].seconds / ways[3].seconds,
        "ratio_reuse": ways[2].seconds / ways[3].seconds,
        "cpu_ratio_no_reuse": ways[1].cpu_s / ways[3].cpu_s,
        "cpu_ratio_reuse": ways[2].cpu_s / ways[3].cpu_s,
    }


def _cpu_s() -> float:
    """That ended children took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(source: Path, output: Path, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvtool.cli.main", "batch", "run", str(source), "-o", str(output), "--json"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Unavailable(f"kvtool batch run {' '.join(options)}: {ran.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def _answers(path: Path) -> dict[str, str]:
    found = {}
    with path.open(encoding="ascii") as file:
        for line in file:
            record = json.loads(line)
            found[record["custom_id"]] = record["response"]["body"]["choices"][0]["text"]
    return found
