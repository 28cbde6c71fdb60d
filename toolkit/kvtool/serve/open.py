"""Workers from an engine directory and a running pool: what Triton's models and the command line call.

A pool that cannot be reached is not an error here: the worker starts, computes everything itself, and `status()` says
so. An engine that cannot be served is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.serve.options import DecodeOptions, PoolOptions, PrefillOptions

if TYPE_CHECKING:
    from kvtool.engine.base import Engine
    from kvtool.pool.base import Pool
    from kvtool.serve.decode import DecodeWorker
    from kvtool.serve.prefill import PrefillWorker


def open_prefill(
    engine_dir: Path,
    pool_state: Path | None,
    options: PrefillOptions | None = None,
    *,
    namespace: str = "default",
    name: str = "prefill-0",
) -> PrefillWorker:
    """A prefill worker on the engine in `engine_dir` and the pool whose state file is `pool_state` (None: no pool).

    The worker owns both; its `close()` closes them. `name` is what the pool's audit calls this client.

    Raises:
        EngineRefused: no engine there that this machine can serve.
    """
    from kvtool.engine.load import load_engine
    from kvtool.serve.prefill import PrefillWorker

    options = options or PrefillOptions()
    engine = load_engine(engine_dir, threads=options.threads, blocks=options.kv_blocks)
    pool = _pool(pool_state, engine, options.pool, name, namespace)
    return PrefillWorker(engine, pool, namespace, options, close_pool=True)


def open_decode(
    engine_dir: Path,
    pool_state: Path | None,
    options: DecodeOptions | None = None,
    *,
    namespace: str = "default",
    name: str = "decode-0",
) -> DecodeWorker:
    """A decode worker, likewise, with the engine directory's tokenizer for stop strings and held-back characters.

    Raises:
        EngineRefused: no engine there that this machine can serve.
    """
    from kvtool.engine.load import load_engine
    from kvtool.engine.tokenizer import Tokenizer
    from kvtool.serve.decode import DecodeWorker

    options = options or DecodeOptions()
    engine = load_engine(
        engine_dir, threads=options.threads, blocks=options.kv_blocks, prompt_threads=options.prompt_threads
    )
    pool = _pool(pool_state, engine, options.pool, name, namespace)
    return DecodeWorker(engine, Tokenizer(engine_dir), pool, namespace, options, close_pool=True)


def _pool(state: Path | None, engine: Engine, options: PoolOptions, name: str, namespace: str) -> Pool | None:
    if state is None:
        return None
    from kvtool.pool.client import PoolClient

    return PoolClient(state, engine.layout, path=options.path, client_name=name, namespace=namespace)
