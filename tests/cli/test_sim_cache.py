"""`kvtool sim cache`, as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtool.cli.main import main

SAMPLE = str(Path(__file__).parents[1] / "sim" / "sample_trace.jsonl")


def test_it_prints_one_row_a_policy_and_one_column_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "cache", SAMPLE, "--policy", "lru", "--policy", "s3-fifo", "--sizes", "50,500"]) == 0
    said = capsys.readouterr()
    assert "5,016 blocks asked for" in said.out and "lru" in said.out and "s3-fifo" in said.out
    assert "fifo " not in said.out.replace("s3-fifo", "") and "4 replays" in said.err


def test_it_says_what_auto_chose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "cache", SAMPLE, "--policy", "auto", "--sizes", "100"]) == 0
    assert " at the end, after " in capsys.readouterr().err


def test_as_json_every_ratio_has_its_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "cache", SAMPLE, "--policy", "lru", "--sizes", "500", "--no-tails", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["asked"] == 5016 and row["prefix_ratio"] == row["prefix_hits"] / 5016
    assert 0 < row["prefix_hits"] <= row["block_hits"] < 5016


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--policy", "mru"], "--policy mru: wanted one of auto, fifo, lru"),
        (["--sizes", "1,x"], "--sizes 1,x: wanted block counts"),
        (["--block-tokens", "16"], "tokens make"),
    ],
)
def test_what_it_cannot_do_is_refused(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "cache", SAMPLE, *flags]) == 2
    assert words in capsys.readouterr().err
