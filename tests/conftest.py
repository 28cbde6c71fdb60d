"""Fixtures that several rooms share."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest

# pytest puts this folder on the path for this file's sake, and then tests/triton answers to torch's `import triton`.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]


@pytest.fixture(scope="session")
def smollm2_engine(request: pytest.FixtureRequest) -> Path:
    """The engine directory of SmolLM2-135M, built once and kept in pytest's cache; a changed source is built again.

    Read-only: tests that change files copy it first.
    """
    from kvtool.engine.build import build

    assert request.config.cache is not None
    folder = request.config.cache.mkdir("kvtool-engines")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test runs side by side build it once
        return build("smollm2-135m", folder / "smollm2-135m", force=True).directory
