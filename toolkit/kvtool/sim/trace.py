"""Traces of requests, in the format of Mooncake's FAST '25 release: one JSON object a line.

`timestamp` (ms since the start), `input_length` and `output_length` (tokens), `hash_ids` (one id for each block of the
prompt, where equal ids mean equal prefixes up to that block; the last block may be partial). A line that says anything
else is refused with its number, so that a result is never about half a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import SpecRefused

BLOCK_TOKENS = 512
"""Tokens of a block in the released traces."""
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `blocks`: ids from the first block on, the partial one at the end included."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def whole(self, block_tokens: int = BLOCK_TOKENS) -> tuple[int, ...]:
        """The blocks without a trailing partial one."""
        return self.blocks[: self.input_tokens // block_tokens]


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> list[Request]:
    """Every request of a trace file, in the order of the file.

    Raises:
        SpecRefused: the file cannot be read, or a line is not a request.
    """
    try:
        with path.open(encoding="utf-8") as file:
            requests = list(parse_trace(file, str(path), block_tokens))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecRefused(f"{path}: cannot be read as a trace: {error}") from None
    if not requests:
        raise SpecRefused(f"{path}: holds no request; wanted one JSON object a line with {', '.join(FIELDS)}")
    return requests


def parse_trace(lines: Iterable[str], name: str, block_tokens: int = BLOCK_TOKENS) -> Iterator[Request]:
    """The requests in `lines`; `name` is what errors call the file."""
    before_s = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(json.loads(line), block_tokens)
            if request.at_s < before_s:
                raise ValueError(f"timestamp: {request.at_s * 1000:.0f} ms is before the line above it")
        except ValueError as error:  # JSONDecodeError is one
            raise SpecRefused(f"{name}, line {number}: {error}") from None
        before_s = request.at_s
        yield request


def _request(row: Any, block_tokens: int) -> Request:
    if not isinstance(row, dict):
        raise ValueError(f"wanted a JSON object with {', '.join(FIELDS)}, found {type(row).__name__}")
    missing = [field for field in FIELDS if field not in row]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}; wanted {', '.join(FIELDS)}")
    at_ms, blocks = row["timestamp"], row["hash_ids"]
    if isinstance(at_ms, bool) or not isinstance(at_ms, (int, float)) or not 0 <= at_ms < float("inf"):
        raise ValueError(f"timestamp: wanted milliseconds, found {at_ms!r}")
    input_tokens, output_tokens = _count(row, "input_length"), _count(row, "output_length")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids: wanted a list of integers")
    wanted = -(-input_tokens // block_tokens)
    if len(blocks) != wanted:
        raise ValueError(
            f"hash_ids: {input_tokens} tokens make {wanted} blocks of {block_tokens}, found {len(blocks)}; "
            "if the trace has blocks of another size, say so (--block-tokens)"
        )
    return Request(at_ms / 1000, input_tokens, output_tokens, tuple(blocks))


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write `requests` as `read_trace` reads them, bar what a millisecond rounds off."""
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            values = (round(request.at_s * 1000), request.input_tokens, request.output_tokens, list(request.blocks))
            file.write(json.dumps(dict(zip(FIELDS, values, strict=True))) + "\n")


def _count(row: dict[str, Any], field: str) -> int:
    value = row[field]
    if type(value) is not int or value < 0:
        raise ValueError(f"{field}: wanted a count of tokens, found {value!r}")
    return value
