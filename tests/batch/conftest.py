"""A model so small that a job on it takes a second: real engine, real command, no meaning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "engine"))


@pytest.fixture(scope="session")
def small_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokens are words: w2, w3, ... w159. 512 tokens of context, blocks of 16."""
    from engine_samples import write_checkpoint

    from kvtool.engine.build import build

    folder = tmp_path_factory.mktemp("small")
    checkpoint = write_checkpoint(folder / "checkpoint", "LlamaForCausalLM")
    return build(checkpoint, folder / "engine", block_tokens=16).directory
