"""`kvtool pool`: up, status, audit and down on a real pool, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from kvtool.cli.main import main
from kvtool.pool.state import runs, started_at

LAYOUT = "layers=2,kv_heads=1,head_dim=64,block_tokens=32"


@pytest.mark.real
def test_a_pool_is_started_looked_at_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = ["--run-dir", str(tmp_path / "run")]
    sizes = ["--ranks", "2", "--dram-size", "1MiB", "--file-size", "1MiB"]
    try:
        assert main(["pool", "up", "--layout", LAYOUT, *sizes, *run_dir]) == 0
        said = capsys.readouterr()
        assert "2 ranks answer" in said.err and str(tmp_path / "run" / "pool.json") in said.err

        assert main(["pool", "up", "--layout", LAYOUT, *sizes, *run_dir]) == 2
        assert f"a pool runs in {tmp_path / 'run'} already" in capsys.readouterr().err

        assert main(["pool", "status", "--json", *run_dir]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [rank["answer"]["rank"] for rank in found["ranks"]] == [0, 1] and found["launcher_runs"]
        started_at_first = started_at(found["ranks"][0]["pid"])
        assert started_at_first is not None
        assert main(["pool", "audit", *run_dir]) == 0
        assert "nothing is held" in capsys.readouterr().err

        os.kill(found["keeper"]["pid"], signal.SIGKILL)
        assert main(["pool", "status", *run_dir]) == 0
        assert "no keeper runs" in capsys.readouterr().err
        assert main(["pool", "up", "--layout", LAYOUT, *sizes, *run_dir]) == 0
        assert "it had no keeper" in capsys.readouterr().err
        assert main(["pool", "drain", "1", "--leave", *run_dir]) == 0
        assert "rank 1 has left" in capsys.readouterr().err
        assert main(["pool", "drain", "0", *run_dir]) == 2
        assert "all that take blocks" in capsys.readouterr().err
        assert main(["pool", "resize", "--ranks", "2", *run_dir]) == 0
        assert "started: rank 1" in capsys.readouterr().err

        os.kill(found["ranks"][0]["pid"], signal.SIGKILL)
        deadline_s = time.monotonic() + 5
        while runs(found["ranks"][0]["pid"], started_at_first) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert main(["pool", "status", *run_dir]) == 1
        said = capsys.readouterr()
        assert "dead" in said.out and "rank 0 is dead" in said.err
    finally:
        assert main(["pool", "down", *run_dir]) == 0
    capsys.readouterr()
    assert main(["pool", "status", *run_dir]) == 1
    assert "no pool runs there; start one with: kvtool pool up" in capsys.readouterr().err
    assert main(["pool", "down", *run_dir]) == 0, "nothing to stop is fine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --engine DIRECTORY or --layout FIELDS"),
        (["--layout", "layers"], "wanted name=value, found 'layers'"),
        (["--layout", "layers=2"], "missing 3 required"),
        (["--layout", LAYOUT + ",dtype=int3"], "dtype 'int3' is not one of"),
        (["--layout", LAYOUT, "--dram-size", "much"], "--dram-size much: wanted a size such as"),
        (["--layout", LAYOUT, "--dram-size", "1KiB"], "no room for one block of 16.0 KiB"),
        (["--layout", LAYOUT, "--dram-size", "500TiB"], "left; lower pool.dram_size or pool.ranks"),
        (["--layout", LAYOUT, "--ranks", "0"], "pool.ranks: wanted 1 to 1024, found 0"),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pool", "up", *arguments, "--run-dir", str(tmp_path / "run")]) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("run/*.json"))
