"""Open an engine directory: the one door to every target's engine."""

from __future__ import annotations

from pathlib import Path

from kvtool.engine.base import Engine
from kvtool.engine.manifest import read_manifest
from kvtool.errors import EngineRefused


def load_engine(directory: Path, *, threads: int, blocks: int) -> Engine:
    """The engine in `directory`, ready to serve. torch's thread count is set for the whole process.

    Raises:
        EngineRefused: no engine there, a damaged one, or one for a target that this version does not serve.
    """
    manifest = read_manifest(directory)
    if manifest.target == "torch":
        from kvtool.engine.torch.engine import TorchEngine

        return TorchEngine(directory, manifest, threads=threads, blocks=blocks)
    raise EngineRefused(
        f"{directory}: an engine for {manifest.target!r}; this kvtool serves torch. Build it again with --target torch"
    )
