"""Open an engine directory: the one door to every target's engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvtool.engine.base import Engine
from kvtool.engine.manifest import read_manifest
from kvtool.errors import EngineRefused


def load_engine(directory: Path, *, threads: int, blocks: int, prompt_threads: int | None = None) -> Engine:
    """The engine in `directory`, ready to serve. `threads` compute decode steps, `prompt_threads` (None: as many)
    prefill; torch's thread count is set for the whole process.

    It is loaded in a thread that ends with it. OpenMP keeps a team of threads for every thread that ever ran a parallel
    region, and once there are more of them than cores it stops spinning: a team left over from loading made each decode
    step of the worker's thread 65 ms instead of 28 on two cores.

    Raises:
        EngineRefused: no engine there, a damaged one, or one for a target that this version does not serve.
    """
    manifest = read_manifest(directory)
    if manifest.target == "torch":
        from kvtool.engine.torch.engine import TorchEngine

        with ThreadPoolExecutor(1, thread_name_prefix="engine-load") as loader:
            return loader.submit(
                TorchEngine, directory, manifest, threads=threads, blocks=blocks, prompt_threads=prompt_threads
            ).result()
    raise EngineRefused(
        f"{directory}: an engine for {manifest.target!r}, which is loaded by TensorRT-LLM on a GPU host, not in this "
        "process; for a machine without GPUs build it again with --target torch"
    )
