"""A job from its directory to its results, once: what `run`, `submit` and `resume` do."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvtool.batch.job import CANCEL, JOURNAL, Told, read_progress, working_on
from kvtool.batch.journal import Journal
from kvtool.batch.results import write_results
from kvtool.batch.rules import Limits
from kvtool.batch.run import Counts, Runner
from kvtool.batch.store import Store
from kvtool.batch.submit import reopen, requests_file
from kvtool.batch.target import Target
from kvtool.engine.manifest import read_manifest
from kvtool.engine.tokenizer import Tokenizer
from kvtool.errors import EngineRefused

KV_SIZE_MAX = 2 << 30
"""Bytes of the engine's own KV memory, at most; fewer requests run at once where that is little."""


@dataclass(frozen=True)
class Worked:
    """`why`: what the job stopped for, "" when it is done. `answered`, `failed`: lines of the two files."""

    counts: Counts
    why: str
    answered: int
    failed: int
    output: Path


def work(
    folder: Path,
    *,
    tell: Callable[[Counts], None] = lambda counts: None,
    stop: Callable[[], str] = lambda: "",
    limits: Limits | None = None,
    target: Target | None = None,
) -> Worked:
    """Do what is left of the job in `folder`, and write its results. `limits` replaces what the job was told.

    Raises:
        Refused: no job there, somebody else works on it, or its input or engine is another now.
        Unavailable: a disk is full; what was over stays so.
    """
    with working_on(folder):
        told, store = reopen(folder)
        with contextlib.closing(store), contextlib.closing(Journal(folder / JOURNAL, told.requests)) as journal:
            (folder / CANCEL).unlink(missing_ok=True)
            counts, why = _run(folder, told, store, journal, tell, stop, limits, target)
            output = Path(told.output)
            answered, failed = write_results(told, folder, store, journal, output)
    return Worked(counts, why, answered, failed, output)


def _run(
    folder: Path,
    told: Told,
    store: Store,
    journal: Journal,
    tell: Callable[[Counts], None],
    stop: Callable[[], str],
    limits: Limits | None,
    target: Target | None,
) -> tuple[Counts, str]:
    limits = limits or limits_of(told)
    worked_s = float(read_progress(folder).get("seconds", 0.0))
    with requests_file(told, folder).open("rb") as source:
        words = Tokenizer(Path(told.engine))
        done = len(journal) == told.requests
        target = target or (_Nothing() if done else open_target(told, store))
        try:
            runner = Runner(
                folder,
                source,
                store,
                journal,
                words,
                target,
                limits,
                max_tokens=told.max_tokens,
                concurrent=told.concurrent,
                worked_s=worked_s,
                stop=lambda: stop() or target.trouble(),
                tell=tell,
            )
            why = runner.run()
        finally:
            target.close()
    return runner.counts, why


class _Nothing:
    """Of a job of which all is over."""

    slots_max = 1

    def start(self, ready: object, tell: object) -> None:
        raise AssertionError("a job that is over started a request")

    def cancel(self, name: str) -> None:
        pass

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        pass


def limits_of(told: Told) -> Limits:
    return Limits(attempts=told.attempts, request_s=told.request_s, job_s=told.job_s, tokens=told.tokens)


def raised(limits: Limits, job_s: float | None, tokens: int | None) -> Limits:
    """With what a person gives on resuming."""
    return replace(limits, job_s=job_s or limits.job_s, tokens=tokens or limits.tokens)


def open_target(told: Told, store: Store) -> Target:
    """
    Raises:
        EngineRefused: the engine is another than the job was checked with.
        Unavailable: the deployment does not answer.
    """
    manifest = read_manifest(Path(told.engine))
    if manifest.model_digest != told.model_digest:
        raise EngineRefused(
            f"{told.engine}: the job was checked with model {told.model_digest[:12]}, this is "
            f"{manifest.model_digest[:12]}; build that engine again, or submit a new job"
        )
    if told.where == "deployment":
        from kvtool.batch.live import LiveTarget

        run_dir = Path(told.run_dir) if told.run_dir else None
        return LiveTarget(told.url, run_dir, slots=told.concurrent, model_digest=told.model_digest)
    from kvtool.batch.engine import EngineTarget

    slots, blocks = room(told, store, manifest.layout.block_size)
    return EngineTarget(
        Path(told.engine),
        slots=slots,
        threads=told.threads,
        kv_blocks=blocks,
        pool_size=told.pool_size,
        file_size=told.file_size,
    )


def room(told: Told, store: Store, block_size: int) -> tuple[int, int]:
    """How many requests run at once, and the KV blocks that takes: as many of the longest as `KV_SIZE_MAX` holds."""
    longest = max(1, -(-store.longest_tokens() // told.block_tokens))
    most = max(longest, KV_SIZE_MAX // block_size)
    slots = max(1, min(told.concurrent, told.requests, most // longest))
    return slots, min(most, longest * slots)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], str]]:
    """Ctrl-C and SIGTERM stop the job in order; the second time they end it at once. In the main thread."""
    said = threading.Event()

    def stop(number: int, frame: object) -> None:
        if said.is_set():
            raise KeyboardInterrupt
        said.set()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: "interrupted" if said.is_set() else ""
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
