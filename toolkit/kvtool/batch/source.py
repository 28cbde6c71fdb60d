"""Where requests come from: JSON lines, Parquet, or CSV, a piece at a time.

JSON lines are read in place, by offset, when a request's turn comes. Rows of a table are turned into such lines once,
in the job's own directory, under a mapping from columns to fields:

    custom_id=id,prompt=question,max_tokens=limit

`prompt` makes completions, `messages` (JSON, or a list of structs in Parquet) and `user` (text of one user message,
with an optional `system`) make chats.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvtool.batch.line import CHAT_URL, LINE_SIZE_MAX, TEXT_URL
from kvtool.errors import Missing, Refused

BODY = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")
FIELDS = ("custom_id", "prompt", "messages", "user", "system", *BODY)
_WHOLE, _REAL = ("max_tokens", "top_k", "seed"), ("temperature", "top_p")


@dataclass(frozen=True)
class Raw:
    """One line of a JSON-lines file. `line` counts from 1."""

    line: int
    at: int
    data: bytes


def kind_of(path: Path, given: str | None = None) -> str:
    """jsonl, parquet or csv.

    Raises:
        Refused: no such file, nothing in it, or a kind that cannot be told.
    """
    if not path.is_file():
        raise Refused(f"{path}: wanted a file of requests, found {'a directory' if path.is_dir() else 'nothing'}")
    if path.stat().st_size == 0:
        raise Refused(f"{path}: the file is empty; wanted one request a line")
    suffixes = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".csv": "csv"}
    kind = given or suffixes.get(path.suffix.lower())
    if kind not in ("jsonl", "parquet", "csv"):
        raise Refused(f"{path}: wanted .jsonl, .parquet or .csv, found {path.suffix or 'no suffix'}; say --format")
    return kind


def read_mapping(text: str | None) -> dict[str, str]:
    """Field -> column.

    Raises:
        Refused: not FIELD=COLUMN,..., or an unknown field.
    """
    mapping: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, column = part.partition("=")
        if not equals or name not in FIELDS or not column or name in mapping:
            raise Refused(f"--columns: wanted FIELD=COLUMN with one of {', '.join(FIELDS)}, found {part!r}")
        mapping[name] = column
    return mapping


def lines(file: BinaryIO) -> Iterator[Raw]:
    """Every line that is not blank; one that is too long comes cut, one byte over the limit, and is refused as such."""
    at, number = 0, 0
    while data := file.readline(LINE_SIZE_MAX + 2):
        start, number = at, number + 1
        at += len(data)
        while not data.endswith(b"\n") and len(data) > LINE_SIZE_MAX:
            rest = file.readline(1 << 20)
            at += len(rest)
            if not rest or rest.endswith(b"\n"):
                break
        text = data.strip()
        if text:
            yield Raw(number, start, text if len(data) <= LINE_SIZE_MAX else data[: LINE_SIZE_MAX + 1])


def rows(path: Path, kind: str, mapping: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Requests, as JSON lines would have them, from the rows of a table. Values that do not fit stay as they are, for
    `line.read_request` to refuse by line.

    Raises:
        Refused: a column is not there, or the mapping has no prompt.
        Missing: Parquet, without pyarrow.
    """
    if not {"prompt", "messages", "user"} & set(mapping):
        raise Refused(f"{path}: say which column is the prompt: --columns custom_id=ID,prompt=TEXT (or user, messages)")
    read = _parquet(path, mapping) if kind == "parquet" else _csv(path, mapping)
    for number, row in enumerate(read, 1):
        given = {name: _plain(row[column]) for name, column in mapping.items() if row.get(column) not in (None, "")}
        yield _request(given, number, kind == "csv")


def _plain(value: Any) -> Any:
    """Bytes of a binary column as the text that they are; None, which is refused by line, where they are none."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _request(given: dict[str, Any], number: int, text: bool) -> dict[str, Any]:
    custom_id = given.get("custom_id", f"row-{number}")
    body = {name: _value(name, given[name], text) for name in BODY if name in given}
    if "prompt" in given:
        return {"custom_id": str(custom_id), "url": TEXT_URL, "body": {"prompt": given["prompt"], **body}}
    if "messages" in given:
        messages = given["messages"]
        if isinstance(messages, str):
            try:
                messages = json.loads(messages)
            except ValueError:
                pass  # refused by line, as what it is
    else:
        messages = [{"role": "user", "content": given.get("user")}]
        if "system" in given:
            messages.insert(0, {"role": "system", "content": given["system"]})
    return {"custom_id": str(custom_id), "url": CHAT_URL, "body": {"messages": messages, **body}}


def _value(name: str, value: Any, text: bool) -> Any:
    if not text:
        return value.tolist() if hasattr(value, "tolist") else value
    try:
        if name in _WHOLE:
            return int(value)
        if name in _REAL:
            return float(value)
    except ValueError:
        return value
    return {"true": True, "false": False}.get(value.lower(), value) if name == "ignore_eos" else value


def _csv(path: Path, mapping: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(LINE_SIZE_MAX)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.DictReader(file, strict=True)
            _columns_there(path, mapping, reader.fieldnames or ())
            yield from reader
        except (csv.Error, UnicodeDecodeError) as error:
            raise Refused(f"{path}: not CSV in UTF-8: {error}") from None


def _parquet(path: Path, mapping: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as found
    except ModuleNotFoundError:
        raise Missing("Parquet files need pyarrow; run: pip install 'kvtool[batch]'") from None
    except (ImportError, AttributeError) as error:  # built for another numpy
        raise Missing(
            f"Parquet files need pyarrow, and the one that is installed does not load: {error}; run: pip install "
            "'kvtool[batch]'"
        ) from None
    parquet: Any = found  # typed in some releases, and in part
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises many kinds
        raise Refused(f"{path}: not a Parquet file: {error}") from None
    with file:
        _columns_there(path, mapping, file.schema_arrow.names)
        for batch in file.iter_batches(256, columns=sorted(set(mapping.values()))):
            yield from batch.to_pylist()


def _columns_there(path: Path, mapping: Mapping[str, str], there: Any) -> None:
    missing = [column for column in mapping.values() if column not in there]
    if missing:
        raise Refused(f"{path}: no column {', '.join(missing)}; there are: {', '.join(map(str, there))}")
