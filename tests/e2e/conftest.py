"""One deployment for all the tests of this folder that leave it whole, and what must be true after it ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parents[1] / each) for each in ("contract", "triton")]

from deployed import Deployed


@pytest.fixture(scope="package")
def deployment(smollm2_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    running = Deployed(tmp_path_factory.mktemp("deployment"), smollm2_engine)
    yield running
    running.down()
    assert running.left() == set()


@pytest.fixture(scope="session")
def tensorrt_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that says it is a TensorRT engine."""
    from bundles import as_engine, build_bundle, write_checkpoint

    folder = tmp_path_factory.mktemp("tensorrt")
    return as_engine(build_bundle(folder, write_checkpoint(folder / "checkpoint")), folder / "engine")
