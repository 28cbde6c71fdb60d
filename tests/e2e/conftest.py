"""One deployment for all the tests of this folder that leave it whole, and what must be true after it ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from deployed import Deployed


@pytest.fixture(scope="package")
def deployment(smollm2_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    running = Deployed(tmp_path_factory.mktemp("deployment"), smollm2_engine)
    yield running
    running.down()
    assert running.left() == set()
