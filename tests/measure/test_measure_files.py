"""The file tier's benchmark measures what it says, and loses nothing."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvtool.cli.main import app


@pytest.mark.real
def test_files_are_measured_beside_raw_disk_io_and_no_block_is_lost(tmp_path):
    command = [
        "bench",
        "files",
        "--sizes",
        "16KiB",
        "--blocks",
        "8",
        "--runs",
        "3",
        "--directory",
        str(tmp_path),
        "--json",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["what"] for row in rows] == ["put, back", "cold get", "put, through"]
    assert all(row["gb_s"]["median"] > 0 and row["raw_gb_s"]["median"] > 0 and row["lost"] == 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
