"""A disk that is full, really: at each place where a job writes, a sentence, nothing lost, and on with more room."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from made import Echo, answer, full_work, make_job, prompts, write_input

from kvtool.batch.journal import Journal
from kvtool.batch.look import write_so_far
from kvtool.cli.main import main
from kvtool.errors import Unavailable

COUNT = 60
SIZE = 128 << 10
"""Bytes of the disk."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, but: int = 0) -> Path:
    """A file that takes all the room but for `but` bytes, in whole pages."""
    path, free = disk / "filler", os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
    path.write_bytes(bytes(max(0, free - but)))
    return path


def assert_whole(output: Path) -> None:
    found = [json.loads(line) for line in output.read_text().splitlines()]
    said = [(one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in found]
    assert said == [(f"r{number}", answer(prompt)) for number, prompt in enumerate(prompts(COUNT))]


def test_a_job_that_does_not_fit_is_not_made(
    disk: Path, tmp_path: Path, smollm2_engine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write_input(tmp_path / "in.jsonl", ["A few words. " * 30] * 1000)
    command = ["batch", "run", str(source), "-o", str(disk / "out.jsonl"), "--engine", str(smollm2_engine)]
    assert main(command) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "make room on that disk, then submit the job again" in said and "should not have happened" not in said
    assert not list(disk.iterdir())


@pytest.mark.parametrize("room", [0, 4096])
def test_a_journal_that_does_not_fit_stops_the_job_and_it_goes_on_with_room(
    disk: Path, tmp_path: Path, room: int
) -> None:
    job = disk / "job"
    make_job(job, write_input(tmp_path / "in.jsonl", prompts(COUNT)), output=str(tmp_path / "out.jsonl"))
    filler = fill(disk, room)
    with pytest.raises(Unavailable, match=r"No space left on device.*make room, then: kvtool batch resume .*/job"):
        full_work(job, Echo())
    journal = Journal.reading(job / "journal", COUNT)
    assert len(journal) < COUNT and (len(journal) > 0) == (room > 0)
    kept = {record["number"]: record["text"] for record in journal.records()}
    journal.close()
    filler.unlink()
    target = Echo()
    assert full_work(job, target).why == ""
    assert sorted([*target.started, *kept]) == list(range(COUNT)), "what was answered before is kept, all else run once"
    assert_whole(tmp_path / "out.jsonl")


def test_results_that_do_not_fit_are_safe_in_the_job(disk: Path, tmp_path: Path) -> None:
    job, output = tmp_path / "job", disk / "out.jsonl"
    make_job(job, write_input(tmp_path / "in.jsonl", prompts(COUNT)), output=str(output))
    output.write_text("of another time\n")
    filler = fill(disk, 8192)
    with pytest.raises(Unavailable, match=r"No space left on device.*safe in .*/job: make room, then: kvtool batch"):
        full_work(job, Echo())
    assert sorted(path.name for path in disk.iterdir()) == ["filler", "out.jsonl"]
    assert output.read_text() == "of another time\n", "the old file stays until the new one is whole"
    filler.unlink()
    assert write_so_far(job, None).answered == COUNT
    assert_whole(output)
    idle = Echo()
    assert full_work(job, idle).why == "" and not idle.started
    assert_whole(output)
