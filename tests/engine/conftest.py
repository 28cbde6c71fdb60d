from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool.engine.torch.engine import TorchEngine


@pytest.fixture(scope="session")
def smollm2(smollm2_engine: Path) -> Iterator[TorchEngine]:
    """SmolLM2 loaded for the whole run, with room for 160 blocks."""
    from kvtool.engine.load import load_engine

    engine = load_engine(smollm2_engine, threads=2, blocks=160)
    assert isinstance(engine, TorchEngine)
    yield engine
    assert engine.blocks_free == engine.blocks_total, "a test left a sequence open"
