"""The results: OpenAI's batch output and error files, in the order of the input.

Made from index and journal whenever they are asked for, and replaced whole, so making them twice, or being killed in
the middle, changes nothing.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kvtool.batch.intake import rejected_in
from kvtool.batch.job import Told, writing_results
from kvtool.batch.journal import Journal, sync
from kvtool.batch.store import Store
from kvtool.errors import Unavailable

NOT_DONE = {"code": "not_done", "message": "the job was stopped before this request was run; resume it"}


def errors_path(output: Path) -> Path:
    """results.jsonl -> results.errors.jsonl"""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def write_results(told: Told, folder: Path, store: Store, journal: Journal, output: Path) -> tuple[int, int]:
    """Write `output` and the errors beside it; how many lines each has. A file of errors without errors is not made.

    Raises:
        Unavailable: the disk is full; what was there before stays.
    """
    errors = errors_path(output)
    news = [path.with_name(f".{path.name}.{told.job_id}.new") for path in (output, errors)]
    with writing_results(folder):
        try:
            with news[0].open("wb") as good, news[1].open("wb") as bad:
                counts = _write(told, folder, store, journal, good, bad)
                for file in (good, bad):
                    file.flush()
                    os.fsync(file.fileno())
            news[0].replace(output)
            if counts[1]:
                news[1].replace(errors)
            else:
                errors.unlink(missing_ok=True)
            sync(output.parent)
        except OSError as error:
            raise Unavailable(
                f"{output}: the results cannot be written ({error.strerror or error}); they are safe in {folder}: make "
                f"room, then: kvtool batch results {folder}"
            ) from None
        finally:
            for path in news:
                path.unlink(missing_ok=True)
    return counts


def _write(told: Told, folder: Path, store: Store, journal: Journal, good: BinaryIO, bad: BinaryIO) -> tuple[int, int]:
    written = [0, 0]
    requests = _requests(told, store, journal)
    rejected = ((int(one["line"]), False, _rejected(told, one)) for one in rejected_in(folder))
    for _, fine, record in heapq.merge(requests, rejected, key=lambda item: item[0]):
        (good if fine else bad).write(json.dumps(record).encode() + b"\n")
        written[not fine] += 1
    return written[0], written[1]


def _requests(told: Told, store: Store, journal: Journal) -> Iterator[tuple[int, bool, dict[str, Any]]]:
    for entry in store.by_number():
        record = journal.record(entry.number)
        name = f"batch_req_{told.job_id}_{entry.number}"
        if record is None or "error" in record:
            error = NOT_DONE if record is None else record["error"]
            yield entry.line, False, _line(name, entry.custom_id, None, error) | {"line": entry.line}
        else:
            yield entry.line, True, _line(name, entry.custom_id, _response(told, name, entry.chat, record), None)


def _rejected(told: Told, one: dict[str, Any]) -> dict[str, Any]:
    error = {"code": one["code"], "message": one["message"]}
    return _line(f"batch_line_{told.job_id}_{one['line']}", one["custom_id"], None, error) | {"line": one["line"]}


def _line(name: str, custom_id: str | None, response: dict[str, Any] | None, error: Any) -> dict[str, Any]:
    return {"id": name, "custom_id": custom_id, "response": response, "error": error}


def _response(told: Told, name: str, chat: bool, record: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"message": {"role": "assistant", "content": record["text"]}} if chat else {}
    if not chat:
        said["text"] = record["text"]
    body = {
        "id": name,
        "object": "chat.completion" if chat else "text_completion",
        "created": record["created_s"],
        "model": told.model,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": record["finish"]}],
        "usage": usage_of(record["usage"]),
    }
    return {"status_code": 200, "request_id": name, "body": body}


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's names, and the tokens that each tier of the pool gave."""
    tokens_in, tokens_out = usage["prompt_tokens"], usage["completion_tokens"]
    hits = dict(usage["hit_tokens"])
    return {
        "prompt_tokens": tokens_in,
        "completion_tokens": tokens_out,
        "total_tokens": tokens_in + tokens_out,
        "prompt_tokens_details": {"cached_tokens": sum(hits.values()), "cached_tokens_by_tier": hits},
    }
