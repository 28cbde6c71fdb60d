"""A job's directory, and who may work on it.

job.json        what the job was told; written once, locked by whoever writes the results
requests.jsonl  the rows of a table as JSON lines; absent where the input is JSON lines already
index.sqlite    which requests there are and in which order they run; never changed
rejected.jsonl  lines that are no requests, with number and reason
journal         what came of each request
progress.json   for `status`, replaced about once a second
lock, cancel    held by whoever works on it; asks it to stop
log             what a job in the background said
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from kvtool.batch.journal import sync
from kvtool.errors import Refused, Unavailable

JOB, INDEX, JOURNAL, REJECTED, REQUESTS = "job.json", "index.sqlite", "journal", "rejected.jsonl", "requests.jsonl"
PROGRESS, CANCEL, LOCK = "progress.json", "cancel", "lock"
_PROBE_S = 0.5
"""Whoever only looks holds the lock for an instant; whoever wants to work outwaits that."""


class Told(BaseModel):
    """`job.json`. Sizes in bytes, times in seconds; null: no limit, or the default of whoever runs it."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    version: Literal[1] = 1
    job_id: str
    source: str
    """Absolute path of the input."""
    source_size: int
    source_digest: str
    """BLAKE3 of the input, hex: a job is resumed on the file that it was checked on, or not at all."""
    output: str
    """Absolute path of the results; errors go beside it."""
    kind: Literal["jsonl", "parquet", "csv"]
    columns: dict[str, str] = {}
    where: Literal["engine", "deployment"]
    engine: str
    """Absolute path of the engine directory; with a deployment, its tokenizer's."""
    run_dir: str | None = None
    url: str | None = None
    model: str
    model_digest: str
    block_tokens: int
    max_tokens: int
    """For requests that do not say."""
    requests: int
    """That are to be done."""
    rejected: int
    """Lines that are none."""
    attempts: int
    request_s: float
    job_s: float | None
    tokens: int | None
    ordered: bool
    pool_size: int
    file_size: int
    concurrent: int
    threads: int
    created_s: float
    """Unix time."""


def read_job(folder: Path) -> Told:
    """
    Raises:
        Refused: no job there, or one of another version.
    """
    path = folder / JOB
    if not path.is_file():
        raise Refused(f"{folder}: no batch job here ({JOB} is missing); start one with: kvtool batch run INPUT")
    try:
        return Told.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(
            f"{path}: {'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}; it was made by another version or "
            "changed by hand; submit the job again"
        ) from None


def write_whole(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, never a part, after a power cut too."""
    new = path.with_name(f".{path.name}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    new.replace(path)
    sync(path.parent)


def write_progress(folder: Path, progress: dict[str, Any]) -> None:
    """Not synced: it is news, not truth."""
    new = folder / f".{PROGRESS}.new"
    new.write_text(json.dumps(progress))
    new.replace(folder / PROGRESS)


def read_progress(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / PROGRESS).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def working_on(folder: Path, wait_s: float = _PROBE_S) -> Iterator[None]:
    """Nobody else works on the job meanwhile; ends with the process, however it ends.

    Raises:
        Refused: somebody does already.
        Unavailable: the job's directory cannot be written to.
    """
    until_s = time.monotonic() + wait_s
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"{folder}: the job cannot be locked: {error.strerror or error}") from None
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise Refused(
                        f"{folder}: another process works on this job; look with: kvtool batch status {folder}"
                    ) from None
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def is_worked_on(folder: Path) -> bool:
    try:
        with working_on(folder, 0.0):
            return False
    except Refused:
        return True
    except Unavailable:
        return False


@contextmanager
def writing_results(folder: Path) -> Iterator[None]:
    """One writer at a time, or two would fill one file; the other waits for as long as writing takes."""
    handle = os.open(folder / JOB, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
