"""The transfer benchmark runs on every path and compares like with like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvtool.cli.bench_transfer import transfer
from kvtool.measure.transfer import measure


@pytest.mark.real
def test_every_path_is_measured_beside_its_yardstick(tmp_path, capsys):
    said: list[str] = []
    rows = measure(64 * 1024, (1, 4), 3, tmp_path, said.append)
    paths = [row.path for row in rows if row.blocks == 4]
    assert len(rows) == 20 and [path.split(",")[0] for path in paths] == [
        "shm get", "shm put", "TCP get", "TCP put", "Unix socket get", "Unix socket put", "UCX read", "UCX read",
        "file read", "file write",
    ], said  # fmt: skip
    assert all(0 < row.rate_ratio.low <= row.rate_ratio.median <= row.rate_ratio.high for row in rows)
    assert len({json.dumps(row.to_json()) for row in rows}) == 20
    assert not list(tmp_path.iterdir()) and not list(Path("/dev/shm").glob("kvtool-bench-*"))


def test_a_bad_block_size_is_a_usage_error():
    import typer

    app = typer.Typer()
    app.command()(transfer)
    for size, word in [("many", "wanted a size such as"), ("1KiB", "wanted 4KiB or more")]:
        result = CliRunner().invoke(app, ["--block-size", size])
        assert result.exit_code == 2 and word in result.output
