"""Trace files: what is read, and in which words the rest is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.errors import SpecRefused
from kvtool.sim.sample import conversations
from kvtool.sim.trace import Request, parse_trace, read_trace, write_trace

SAMPLE = Path(__file__).with_name("sample_trace.jsonl")
GOOD = '{"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}'


def test_a_request_is_read_and_its_partial_block_told_apart() -> None:
    (request,) = parse_trace([GOOD, ""], "t")
    assert request == Request(1.5, 1030, 7, (0, 1, 2))
    assert request.whole() == (0, 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2: Expecting value"),
        ("[1]", "line 2: wanted a JSON object with timestamp, .*, found list"),
        ('{"timestamp": 2000, "hash_ids": []}', "line 2: has no input_length, output_length"),
        (GOOD.replace("1500", '"noon"'), "timestamp: wanted milliseconds, found 'noon'"),
        (GOOD.replace("1500", "1499"), "timestamp: 1499 ms is before the line above it"),
        (GOOD.replace("1030", "-1"), "input_length: wanted a count of tokens, found -1"),
        (GOOD.replace("[0, 1, 2]", "[0, 1.5, 2]"), "hash_ids: wanted a list of integers"),
        (GOOD.replace("1030", "1536").replace("2]", "2, 3]"), "1536 tokens make 3 blocks of 512, found 4; .*--block-t"),
    ],
)
def test_a_line_that_is_no_request_is_refused_with_its_number(line: str, words: str) -> None:
    with pytest.raises(SpecRefused, match=words):
        list(parse_trace([GOOD, line], "t"))


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(SpecRefused, match="holds no request"):
        read_trace(tmp_path / "empty")
    with pytest.raises(SpecRefused, match="cannot be read as a trace"):
        read_trace(tmp_path / "none")


def test_the_sample_is_what_the_generator_makes(tmp_path: Path) -> None:
    write_trace(tmp_path / "made", conversations(160, seed=1))
    assert (tmp_path / "made").read_bytes() == SAMPLE.read_bytes()
    requests = read_trace(SAMPLE)
    assert len(requests) == 299 and requests[0].at_s > 0
