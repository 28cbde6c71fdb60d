"""Making a job: check the input whole, lay the order, write down what the job was told."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtool.batch.intake import Checks, Taken, spool, take_in
from kvtool.batch.job import INDEX, JOB, JOURNAL, Told, read_job, write_whole
from kvtool.batch.journal import Journal, sync
from kvtool.batch.order import Plan
from kvtool.batch.results import errors_path
from kvtool.batch.source import kind_of
from kvtool.batch.store import Store
from kvtool.engine.manifest import Manifest, read_manifest
from kvtool.engine.tokenizer import Tokenizer
from kvtool.errors import Refused, Unavailable

MAX_TOKENS = 256


@dataclass(frozen=True)
class Wanted:
    """A job as a person asks for it. `engine`: of the run in process, or the tokenizer of the deployment's model.
    `job`: the job's directory; None is OUTPUT.job."""

    source: Path
    output: Path
    engine: Path
    job: Path | None = None
    kind: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    run_dir: Path | None = None
    url: str | None = None
    max_tokens: int = MAX_TOKENS
    strict: bool = False
    attempts: int = 3
    request_s: float = 600.0
    job_s: float | None = None
    tokens: int | None = None
    ordered: bool = True
    pool_size: int = 1 << 30
    file_size: int = 0
    concurrent: int = 16
    threads: int = 2
    overwrite: bool = False

    @property
    def folder(self) -> Path:
        return (self.job or self.output.with_name(f"{self.output.name}.job")).absolute()

    @property
    def live(self) -> bool:
        return self.run_dir is not None or self.url is not None


@dataclass(frozen=True)
class Made:
    folder: Path
    told: Told
    plan: Plan
    taken: Taken
    estimate_s: float | None = None
    """From a short calibration, or the rates that a deployment has measured; None where there are none."""


def make(wanted: Wanted, tell: Callable[[int, int], None] = lambda done, total: None) -> Made:
    """Nothing is there afterwards unless all went well.

    Raises:
        Refused: the input, the output's place or a setting is wrong, in words.
        Unavailable: a disk is full.
    """
    kind = kind_of(wanted.source, wanted.kind)
    folder = wanted.folder
    _may_write(wanted, folder)
    manifest, words = read_manifest(wanted.engine), Tokenizer(wanted.engine)
    new = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.new")
    try:
        new.mkdir(parents=True, mode=0o700)
        made = _make(wanted, new, kind, manifest, words, tell)
        for path in new.iterdir():
            sync(path)
        sync(new)
        new.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise Unavailable(f"{folder}: the job cannot be written there: {error.strerror or error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return Made(folder, made.told, made.plan, made.taken, _live_estimate_s(wanted, made.plan))


def planned(wanted: Wanted, tell: Callable[[int, int], None] = lambda done, total: None) -> Made:
    """What `make` would make, and how long it would take; nothing is kept."""
    kind = kind_of(wanted.source, wanted.kind)
    manifest, words = read_manifest(wanted.engine), Tokenizer(wanted.engine)
    with tempfile.TemporaryDirectory(prefix="kvtool-plan-") as folder:
        made = _make(wanted, Path(folder), kind, manifest, words, tell)
    if wanted.live:
        return replace(made, estimate_s=_live_estimate_s(wanted, made.plan))
    from kvtool.batch.calibrate import calibrate, estimate_s

    return replace(made, estimate_s=estimate_s(made.plan, calibrate(wanted.engine, wanted.threads, wanted.concurrent)))


def _live_estimate_s(wanted: Wanted, plan: Plan) -> float | None:
    if wanted.run_dir is None:
        return None
    from kvtool.batch.calibrate import estimate_s
    from kvtool.batch.measured import measured

    speed = measured(wanted.run_dir)
    return estimate_s(plan, speed) if speed is not None else None


def _may_write(wanted: Wanted, folder: Path) -> None:
    output = wanted.output
    if folder.exists():
        said = "kvtool batch resume" if (folder / JOB).is_file() else "choose another place than"
        raise Refused(f"{folder}: there is a job there already, or something else; {said} {folder}")
    if output.exists() and not wanted.overwrite:
        raise Refused(f"{output}: the output is there already; choose another --output, or say --overwrite")
    if output.exists() and output.samefile(wanted.source):
        raise Refused(f"{output}: the output would replace the input; choose another --output")
    errors = errors_path(output)
    if errors.exists() and not wanted.overwrite:
        raise Refused(f"{errors}: a file of errors is there already; choose another --output, or say --overwrite")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise Refused(f"{output}: wanted a file in a directory that is there, found no such place")
    if not os.access(output.absolute().parent, os.W_OK):
        raise Refused(f"{output.absolute().parent}: wanted a directory that can be written to, found none")


def _make(
    wanted: Wanted, folder: Path, kind: str, manifest: Manifest, words: Tokenizer, tell: Callable[[int, int], None]
) -> Made:
    path = spool(wanted.source, kind, wanted.columns, folder)
    checks = Checks(
        manifest.context_tokens_max, manifest.kv.block_tokens, wanted.max_tokens, not wanted.live, wanted.strict
    )
    store = Store.make(folder / INDEX)
    try:
        taken = take_in(path, folder, store, words, checks, tell)
        plan = store.arrange(checks.block_tokens, wanted.pool_size // manifest.layout.block_size, wanted.ordered)
    finally:
        store.close()
    told = Told(
        job_id=uuid.uuid4().hex[:12],
        source=str(wanted.source.absolute()),
        source_size=wanted.source.stat().st_size,
        source_digest=taken.digest,
        output=str(wanted.output.absolute()),
        kind=kind,  # type: ignore[arg-type]
        columns=wanted.columns,
        where="deployment" if wanted.live else "engine",
        engine=str(wanted.engine.absolute()),
        run_dir=str(wanted.run_dir.absolute()) if wanted.run_dir else None,
        url=wanted.url,
        model=manifest.name,
        model_digest=manifest.model_digest,
        block_tokens=manifest.kv.block_tokens,
        max_tokens=wanted.max_tokens,
        requests=taken.requests,
        rejected=taken.rejected,
        attempts=wanted.attempts,
        request_s=wanted.request_s,
        job_s=wanted.job_s,
        tokens=wanted.tokens,
        ordered=wanted.ordered,
        pool_size=wanted.pool_size,
        file_size=wanted.file_size,
        concurrent=wanted.concurrent,
        threads=wanted.threads,
        created_s=time.time(),
    )
    Journal.make(folder / JOURNAL)
    write_whole(folder / JOB, told.model_dump_json(indent=2).encode() + b"\n")
    return Made(folder, told, plan, taken)


def requests_file(told: Told, folder: Path) -> Path:
    """Where the job's lines are read from: the input, or its rows as lines.

    Raises:
        Refused: the input is gone, or another than the job was checked on.
    """
    if told.kind != "jsonl":
        return folder / "requests.jsonl"
    path = Path(told.source)
    if not path.is_file():
        raise Refused(f"{path}: the job's input is gone; put it back, its BLAKE3 is {told.source_digest[:16]}…")
    if path.stat().st_size != told.source_size or _digest(path) != told.source_digest:
        raise Refused(
            f"{path}: wanted the file that the job was checked on (BLAKE3 {told.source_digest[:16]}…, "
            f"{told.source_size} bytes), found another; put it back, or submit a new job"
        )
    return path


def _digest(path: Path) -> str:
    from blake3 import blake3

    hashed = blake3()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            hashed.update(data)
    return str(hashed.hexdigest())


def reopen(folder: Path) -> tuple[Told, Store]:
    """A job's settings and index, for whoever goes on with it.

    Raises:
        Refused: no job there, or one whose index was damaged.
    """
    told = read_job(folder)
    path = folder / INDEX
    if not path.is_file():
        raise Refused(f"{path}: the job's index is gone; submit the job again with another --output")
    store = Store(path)
    try:
        found = len(store)
        if found != told.requests:
            raise Refused(f"{path}: wanted {told.requests} requests, found {found}; submit the job again")
    except BaseException:
        store.close()
        raise
    return told, store
