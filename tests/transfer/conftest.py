"""Shared by the transfer tests: nothing may be left behind, and small file systems that really run full."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SHM = Path("/dev/shm")


@pytest.fixture
def prefix() -> Iterator[str]:
    """A prefix for names in /dev/shm; the test fails if it leaves any of them behind."""
    mine = f"kvtool-test-{uuid.uuid4().hex[:8]}-"
    yield mine
    left = sorted(path.name for path in SHM.glob(f"{mine}*"))
    for name in left:
        (SHM / name).unlink()
    assert not left, f"left in /dev/shm: {left}"


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a tmpfs of the size given, such as "8m"; skips where this user may not mount."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        at = tmp_path / f"small{len(mounted)}"
        at.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "kvtool-test", str(at)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"cannot mount a small tmpfs here: {done.stderr.strip()}")
        mounted.append(at)
        return at

    yield mount
    for at in mounted:
        subprocess.run(["umount", "-l", str(at)], check=True)
