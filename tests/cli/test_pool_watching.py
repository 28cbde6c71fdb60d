"""`kvtool pool top`, `bench` and `metrics` on a real pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtool.cli.main import main

pytestmark = pytest.mark.real

LAYOUT = "layers=1,kv_heads=1,head_dim=32,block_tokens=128"


@pytest.fixture
def pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_dir = ["--run-dir", str(tmp_path / "run")]
    assert main(["pool", "up", "--layout", LAYOUT, "--dram-size", "4MiB", "--file-size", "0", *run_dir]) == 0
    capsys.readouterr()
    yield run_dir
    assert main(["pool", "down", *run_dir]) == 0


def test_a_pool_is_measured_and_watched(pool: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pool", "bench", "--sizes", "8KiB,16KiB,1MiB", "--blocks", "4", "--runs", "3", "--json", *pool]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(row["what"], row["size"], row["blocks"]) for row in found["rows"]} == {
        (what, size, blocks) for what in ("put", "get", "view") for size in (8192, 16384) for blocks in (1, 4)
    }, "sizes that the pool holds"
    assert all(row["rate_ratio"]["median"] > 0 for row in found["rows"]) and found["match_us"]["median"] > 0
    assert main(["pool", "bench", "--sizes", "1MiB", *pool]) == 2
    assert "holds blocks of up to 16.0 KiB" in capsys.readouterr().err

    assert main(["pool", "top", "--once", "--json", "--interval", "100ms", *pool]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in seen["ranks"]] == [0, 1] and seen["silent"] == [] and seen["alarms"] == []
    assert seen["hit_ratio"] == 1.0, "the bench reads what it put"
    assert all(rank["dram_share"] == 0 and rank["in_bytes_s"] == 0 for rank in seen["ranks"]), "and deletes it again"
    assert main(["pool", "top", "--once", "--interval", "100ms", *pool]) == 0
    assert "100.0% of the tokens asked for were there" in capsys.readouterr().out

    assert main(["pool", "metrics", *pool]) == 0
    page = capsys.readouterr().out
    assert page.count('kvtool_pool_rank_info{rank="') == 2 and "# TYPE kvtool_pool_asked_tokens_total counter" in page
