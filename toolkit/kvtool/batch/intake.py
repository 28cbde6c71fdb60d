"""Intake: every line is checked once, before anything runs.

One pass over the input: each line is read, checked, turned into tokens for its place in the order, and indexed; bad
ones are written down with number and reason. Memory does not grow with the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import xxhash
from blake3 import blake3

from kvtool.batch.job import REJECTED, REQUESTS
from kvtool.batch.line import CHAT_URL, BadLine, Line, read_line
from kvtool.batch.order import path_of
from kvtool.batch.source import Raw, lines, rows
from kvtool.batch.store import Entry, Store
from kvtool.errors import Refused, RequestRefused, Unavailable
from kvtool.kv.block import block_keys

_SEED = blake3(b"kvtool batch order").digest()
_SHOWN = 3
_TELL_EVERY = 256


class Words(Protocol):
    """What of a model is needed to check a request."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def chat(self, messages: list[dict[str, str]]) -> str: ...


@dataclass
class Taken:
    """What intake found. `first`: the first few rejections, for a person. `digest`: of the input, hex."""

    requests: int = 0
    rejected: int = 0
    first: list[str] = field(default_factory=list)
    digest: str = ""


@dataclass(frozen=True)
class Checks:
    """`max_tokens`: for requests that do not say. `ids`: whether prompts may be token ids."""

    context_tokens_max: int
    block_tokens: int
    max_tokens: int
    ids: bool = True
    stop_at_bad: bool = False


def prompt_tokens(line: Line, words: Words) -> list[int]:
    """
    Raises:
        RequestRefused: the chat template refuses the messages, or there is no token.
    """
    if isinstance(line.prompt, tuple):
        return list(line.prompt)
    tokens = words.encode(line.prompt if isinstance(line.prompt, str) else words.chat(line.prompt))
    if not tokens:
        raise RequestRefused("the prompt is empty; at least 1 token is needed")
    return tokens


def spool(source: Path, kind: str, columns: dict[str, str], folder: Path) -> Path:
    """Rows of a table as JSON lines in the job's directory; the file they are read from."""
    if kind == "jsonl":
        return source
    path = folder / REQUESTS
    try:
        with path.open("w", encoding="ascii") as file:
            for row in rows(source, kind, columns):
                file.write(json.dumps(row, default=str) + "\n")
    except OSError as error:
        raise Unavailable(
            f"{path}: the rows cannot be written down ({error.strerror or error}); make room, then submit the job again"
        ) from None
    return path


def take_in(
    path: Path, folder: Path, store: Store, words: Words, checks: Checks, tell: Callable[[int, int], None]
) -> Taken:
    """Index the requests of the JSON-lines file `path`. `tell(bytes done, bytes in all)` every now and then.

    Raises:
        Refused: no line is a request, or one is not and `stop_at_bad` was asked for.
        Unavailable: a disk is full.
    """
    taken, hashed = Taken(), blake3()
    try:
        file, size = path.open("rb"), path.stat().st_size
    except OSError as error:
        raise Refused(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        with file, (folder / REJECTED).open("w", encoding="ascii") as bad:
            for count, raw in enumerate(lines(_Hashing(file, hashed))):  # type: ignore[arg-type]
                if count % _TELL_EVERY == 0:
                    tell(raw.at, size)
                try:
                    _index(raw, taken.requests, store, words, checks)
                    taken.requests += 1
                except BadLine as error:
                    _reject(raw, error, taken, bad, checks.stop_at_bad, path)
    except OSError as error:
        raise Unavailable(
            f"{folder}: the index of the job cannot be written ({error.strerror or error}); make room, then submit the "
            "job again"
        ) from None
    tell(size, size)
    taken.digest = hashed.hexdigest()
    if not taken.requests:
        found = "; ".join(taken.first) or "only blank lines"
        raise Refused(f"{path}: none of its lines is a request: {found}")
    return taken


class _Hashing:
    """A file whose lines are hashed as they are read."""

    def __init__(self, file: BinaryIO, hashed: blake3) -> None:
        self._file, self._hashed = file, hashed

    def readline(self, limit: int) -> bytes:
        data = self._file.readline(limit)
        self._hashed.update(data)
        return data


def _index(raw: Raw, number: int, store: Store, words: Words, checks: Checks) -> None:
    """
    Raises:
        BadLine: it is no request, or its custom_id was there before.
    """
    line = read_line(raw.data)
    try:
        tokens = prompt_tokens(line, words)
    except RequestRefused as error:
        raise BadLine("invalid_body", str(error), line.custom_id) from None
    _fits(line, tokens, words, checks)
    wanted = line.max_tokens if line.max_tokens is not None else checks.max_tokens
    out = min(wanted, checks.context_tokens_max - len(tokens))
    path = path_of(block_keys(_SEED, tokens, checks.block_tokens))
    chat = line.url == CHAT_URL
    at, size, mark = raw.at, len(raw.data), mark_of(raw.data)
    taken_by = store.add(Entry(number, line.custom_id, raw.line, at, size, mark, chat, len(tokens), out, path))
    if taken_by is not None:
        raise BadLine(
            "duplicate_custom_id",
            f"custom_id {line.custom_id!r:.60} is that of line {taken_by} already",
            line.custom_id,
        )


def _fits(line: Line, tokens: list[int], words: Words, checks: Checks) -> None:
    context = checks.context_tokens_max
    if len(tokens) >= context:
        raise BadLine(
            "prompt_too_long",
            f"the prompt has {len(tokens)} tokens; beside 1 to generate the context holds at most {context - 1}",
            line.custom_id,
        )
    if isinstance(line.prompt, tuple):
        if not checks.ids:
            raise BadLine(
                "unsupported",
                "body.prompt: token ids can be run on an engine (--engine), not on a deployment; give text",
                line.custom_id,
            )
        if max(tokens) >= words.vocab_size:
            said = f"body.prompt: token {max(tokens)} is outside the vocabulary of {words.vocab_size}"
            raise BadLine("invalid_body", said, line.custom_id)


def _reject(raw: Raw, error: BadLine, taken: Taken, bad: object, stop: bool, path: Path) -> None:
    said = f"line {raw.line}: {error}"
    if stop:
        raise Refused(f"{path}: {said}; mend it, or leave --strict out to go on without such lines")
    taken.rejected += 1
    if len(taken.first) < _SHOWN:
        taken.first.append(said)
    record = {"line": raw.line, "custom_id": error.custom_id, "code": error.code, "message": str(error)}
    bad.write(json.dumps(record) + "\n")  # type: ignore[attr-defined]


def rejected_in(folder: Path) -> Iterator[dict[str, Any]]:
    """What intake wrote down, in input order."""
    with (folder / REJECTED).open(encoding="ascii") as file:
        for line in file:
            yield json.loads(line)


def read_again(file: BinaryIO, entry: Entry) -> Line:
    """The request of `entry` from the open input.

    Raises:
        Refused: the file has something else there now.
    """
    file.seek(entry.at)
    data = file.read(entry.size)
    if mark_of(data) != entry.mark:
        raise Refused(
            f"line {entry.line} of the input ({entry.custom_id!r:.60}) was changed while the job ran; put the file "
            "back as it was, then resume the job"
        )
    return read_line(data)


def mark_of(data: bytes) -> int:
    """By which a line is known again; a whole number as SQLite holds it."""
    return xxhash.xxh3_64_intdigest(data) >> 1
