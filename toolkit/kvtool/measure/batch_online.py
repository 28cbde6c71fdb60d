"""Online streams on one deployment, with and without a batch job beside them, in alternating windows.

Arrivals are an open loop: Poisson, from a seed, and no later for a slow answer (a closed loop would hide the waiting
that is to be measured). TTFT counts from when a request was due. Windows without and with a job follow each other as
in A B B A, so that what the machine does meanwhile falls on both; the windows of a pair have the same arrivals and
lengths but other texts, so that what the pool has of them is alike. The job is started, looked at and cancelled by the
command line that people use. Silent: callers print.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from kvtool.batch.job import read_progress
from kvtool.errors import KvtoolError, Unavailable
from kvtool.measure.serve import made_prompt
from kvtool.measure.stats import Summary, percentile, summarise
from kvtool.triton.client import client_async, stream_async

TARGET = 1.2
"""TTFT P99 with a job over that without."""
_PROMPT_TOKENS = (24, 32, 48, 64, 96, 160)
_OUT_TOKENS = (2, 4, 6, 8)
_HEAD_TOKENS = 40
_FAMILIES = 3
"""Of a window: half of its prompts begin with one of so many texts."""
_LOOK_S, _START_S = 0.25, 60.0
_JOB_REQUESTS = 400

Count = Callable[[str], int]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Arrival:
    """One online request: due `at_s` after its window began. `head`: the text that it shares with others, if any."""

    at_s: float
    head: int | None
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Seen:
    """What came of it. Times in seconds after it was due; `late_s`: of sending it. `stages`: seconds in the servers."""

    late_s: float
    token_at_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    hit_tokens: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_at_s[0]


@dataclass
class Window:
    """`stalled_s`: the longest time in which the job finished no request; `finished`: how many it did."""

    pair: int
    with_job: bool
    seconds: float = 0.0
    seen: list[Seen] = field(default_factory=list)
    finished: int = 0
    generated: int = 0
    stalled_s: float = 0.0


def arrivals(seed: int, pair: int, count: int, rate: float) -> list[Arrival]:
    rng, at_s, made = Random(f"{seed}/{pair}"), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        head = rng.randrange(_FAMILIES) if rng.random() < 0.5 else None
        made.append(Arrival(at_s, head, rng.choice(_PROMPT_TOKENS), rng.choice(_OUT_TOKENS)))
    return made


class Texts:
    """Prompts that were never seen: new from their first word in each window, but for what a window's own share."""

    def __init__(self, seed: int, count: Count) -> None:
        self._seed, self._count, self._made = seed, count, 0
        self._heads: dict[tuple[int, int], str] = {}

    def new(self, tokens: int) -> str:
        self._made += 1
        return made_prompt(self._seed, self._made, tokens, self._count)

    def of(self, window: int, arrival: Arrival) -> str:
        if arrival.head is None:
            return self.new(arrival.prompt_tokens)
        key = (window, arrival.head)
        if key not in self._heads:
            self._heads[key] = self.new(_HEAD_TOKENS)
        return f"{self._heads[key]} {self.new(max(8, arrival.prompt_tokens - _HEAD_TOKENS))}"


def measure(
    url: str,
    run_dir: Path,
    folder: Path,
    count: Count,
    *,
    requests: int,
    windows: int,
    rate: float | None,
    busy: float,
    seed: int,
    settle: Callable[[], bool],
    say: Say,
) -> dict[str, Any]:
    """`requests` and `windows` of each kind. `rate`: arrivals a second; None: such that requests one after the other
    would take the share `busy` of the time.

    Raises:
        Unavailable: the deployment does not answer, or the job failed; in words.
    """
    texts = Texts(seed, count)
    service_s = _calibrate(url, texts, seed)
    rate = rate or busy / service_s
    say(f"a request alone takes {service_s:.2f} s; {rate:.2f} arrive a second")
    each = -(-requests // windows)
    found: list[Window] = []
    for index, with_job in enumerate(order(windows)):
        pair = index // 2
        due = arrivals(seed, pair, each, rate)
        window = Window(pair, with_job)
        prompts = [texts.of(index, arrival) for arrival in due]
        if not settle():
            raise Unavailable("the deployment did not come to rest within a minute; is somebody else using it?")
        if with_job:
            with _job(run_dir, folder / f"job-{index}.jsonl", texts, seed + index) as job:
                _fill(window, url, due, prompts, job)
        else:
            _fill(window, url, due, prompts, None)
        found.append(window)
        say(_told(window, index, 2 * windows))
    return {"rate": rate, "service_s": service_s, **summary(found)}


def order(windows: int) -> list[bool]:
    """Without, with, with, without, and so on: `windows` of each, in pairs."""
    return [with_job for pair in range(windows) for with_job in ((False, True) if pair % 2 == 0 else (True, False))]


def summary(windows: Sequence[Window]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, with_job in (("without", False), ("with", True)):
        seen = [one for window in windows if window.with_job is with_job for one in window.seen]
        good = [one for one in seen if one.token_at_s]
        if not good:
            raise Unavailable(f"no online request was answered {name} a job: {seen[0].error if seen else 'none came'}")
        gaps = [later - earlier for one in good for earlier, later in pairwise(one.token_at_s)]
        found[name] = {
            "failed": len(seen) - len(good),
            "ttft_ms": _ms(summarise([one.ttft_s for one in good])),
            "tbt_ms": _ms(summarise(gaps)),
            "sent_late_ms_p99": 1e3 * percentile([one.late_s for one in good], 0.99),
            "hit_ratio": sum(one.hit_tokens for one in good) / max(1, sum(one.prompt_tokens for one in good)),
            "stages_ms": _stages(good),
        }
    kept = [window for window in windows if window.with_job]
    seconds = sum(window.seconds for window in kept)
    finished = sum(window.finished for window in kept)
    return {
        "ttft_p99_ratio": found["with"]["ttft_ms"]["p99"] / found["without"]["ttft_ms"]["p99"],
        "target": TARGET,
        "online": found,
        "batch": {
            "finished": finished,
            "generated_tokens": sum(window.generated for window in kept),
            "seconds": seconds,
            "requests_s": finished / seconds if seconds else 0.0,
            "longest_without_progress_s": max((window.stalled_s for window in kept), default=0.0),
        },
        "windows": [_window_fields(window) for window in windows],
    }


def _ms(found: Summary) -> dict[str, float]:
    return {name: value if name == "count" else value * 1e3 for name, value in found.to_json().items()}


def _stages(seen: Sequence[Seen]) -> dict[str, dict[str, float]]:
    """Where first tokens waited: each stage's P50 and P99."""
    names = sorted({name for one in seen for name in one.stages})
    every = {name: [one.stages.get(name, 0.0) * 1e3 for one in seen] for name in names}
    return {name: {"p50": percentile(each, 0.5), "p99": percentile(each, 0.99)} for name, each in every.items()}


def _window_fields(window: Window) -> dict[str, Any]:
    fields = asdict(window)
    fields["seen"] = [
        {
            **asdict(one),
            "late_s": round(one.late_s, 4),
            "token_at_s": [round(at_s, 4) for at_s in one.token_at_s],
            "stages": {name: round(took, 4) for name, took in one.stages.items()},
        }
        for one in window.seen
    ]
    return fields


def _told(window: Window, index: int, count: int) -> str:
    ttfts = [one.ttft_s * 1e3 for one in window.seen if one.token_at_s]
    said = f"window {index + 1} of {count}, {'with' if window.with_job else 'without'} a job: "
    said += f"TTFT {percentile(ttfts, 0.5):.0f} ms, P99 {percentile(ttfts, 0.99):.0f} ms" if ttfts else "no answer"
    return said + (f"; the job finished {window.finished}" if window.with_job else "")


# Online requests.


def _calibrate(url: str, texts: Texts, seed: int) -> float:
    """Mean seconds of one request alone, after two that warm up."""
    took = []
    for arrival in arrivals(seed, -1, 14, 1.0):
        seen = asyncio.run(_one(url, None, texts.new(arrival.prompt_tokens), arrival.max_tokens, time.perf_counter()))
        if seen.error:
            raise Unavailable(f"{url}: an online request failed: {seen.error}")
        took.append(seen.token_at_s[-1])
    return sum(took[2:]) / len(took[2:])


def _fill(window: Window, url: str, due: Sequence[Arrival], prompts: Sequence[str], job: Job | None) -> None:
    began_s = time.perf_counter()
    if job is not None:
        job.begin()
    window.seen = asyncio.run(_all(url, due, prompts))
    window.seconds = time.perf_counter() - began_s
    if job is not None:
        window.finished, window.generated, window.stalled_s = job.end()


async def _all(url: str, due: Sequence[Arrival], prompts: Sequence[str]) -> list[Seen]:
    client = client_async(url)
    began_s = time.perf_counter() + 0.1
    tasks = []
    try:
        for arrival, prompt in zip(due, prompts, strict=True):
            await asyncio.sleep(max(0.0, began_s + arrival.at_s - time.perf_counter()))
            tasks.append(asyncio.create_task(_one(url, client, prompt, arrival.max_tokens, began_s + arrival.at_s)))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await client.close()


async def _one(url: str, client: Any, prompt: str, max_tokens: int, due_s: float) -> Seen:
    late_s, token_at_s = time.perf_counter() - due_s, list[float]()
    pieces = stream_async(url, prompt, client=client, max_tokens=max_tokens, ignore_eos=True)
    usage: dict[str, Any] = {}
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                token_at_s += [time.perf_counter() - due_s] * len(piece.tokens)
                usage = dict(piece.usage)
    except KvtoolError as error:
        return Seen(late_s, error=f"{type(error).__name__}: {error}")
    seconds = usage.get("seconds", {})
    stages = {f"{stage} {name}": took for stage, parts in seconds.items() for name, took in parts.items()}
    hits = sum(usage.get("hit_tokens", {}).values())
    return Seen(late_s, tuple(token_at_s), int(usage.get("prompt_tokens", 0)), hits, stages)


# The job.


class Job:
    """One that runs in a process of its own; looked at from outside, as `kvtool batch status` does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._began = self._last = (0, 0)
        self._changed_s = self._stalled_s = 0.0

    def begin(self) -> None:
        self._began = self._last = self._counts()
        self._changed_s = time.perf_counter()
        self._thread.start()

    def end(self) -> tuple[int, int, float]:
        """Requests that ended with an answer and tokens generated since `begin`, and the longest time without one."""
        self._over.set()
        self._thread.join(5)
        self._note()
        stalled_s = max(self._stalled_s, time.perf_counter() - self._changed_s)
        return self._last[0] - self._began[0], self._last[1] - self._began[1], stalled_s

    def runs(self) -> bool:
        return bool(read_progress(self._folder).get("running"))

    def _counts(self) -> tuple[int, int]:
        progress = read_progress(self._folder)
        return int(progress.get("done", 0)), int(progress.get("tokens_out", 0))

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._note()

    def _note(self) -> None:
        now, now_s = self._counts(), time.perf_counter()
        if now[0] > self._last[0]:
            self._stalled_s, self._changed_s = max(self._stalled_s, now_s - self._changed_s), now_s
        self._last = now


@contextmanager
def _job(run_dir: Path, source: Path, texts: Texts, seed: int) -> Iterator[Job]:
    """A job that is under way, and cancelled on the way out."""
    write_job(source, texts, seed)
    folder = Path(_kvtool("submit", str(source), "--run-dir", str(run_dir)).strip().splitlines()[-1])
    try:
        job, until_s = Job(folder), time.monotonic() + _START_S
        while not job.runs():
            if time.monotonic() > until_s:
                raise Unavailable(f"{folder}: the job did not start within {_START_S:g} s; its log is there")
            time.sleep(_LOOK_S)
        yield job
    finally:
        _kvtool("cancel", str(folder))


def write_job(path: Path, texts: Texts, seed: int) -> None:
    """Families of prompts that begin alike, longer than the online ones; more than a window can finish."""
    rng = Random(seed)
    with path.open("w", encoding="utf-8") as file:
        head = ""
        for number in range(_JOB_REQUESTS):
            if number % 10 == 0:
                head = texts.new(rng.choice((96, 160, 224)))
            prompt = f"{head} {texts.new(rng.choice((16, 32, 64)))}"
            body = {"prompt": prompt, "max_tokens": rng.choice((8, 16, 24)), "ignore_eos": True}
            line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def _kvtool(*words: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "kvtool.cli.main", "batch", *words], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise Unavailable(f"kvtool batch {words[0]}: {ran.stderr.strip()[-500:]}")
    return ran.stdout
