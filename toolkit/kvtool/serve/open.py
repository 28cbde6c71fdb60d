"""Workers from an engine directory and a running pool: what Triton's models and the command line call.

A pool that cannot be reached is not an error here: the worker starts, computes everything itself, and `status()` says
so. An engine that cannot be served is.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool.serve.options import DecodeOptions, LlmOptions, PoolOptions, PrefillOptions

if TYPE_CHECKING:
    from kvtool.engine.base import Engine
    from kvtool.engine.trtllm.llm import Llm
    from kvtool.pool.base import Pool
    from kvtool.serve.decode import DecodeWorker
    from kvtool.serve.prefill import PrefillWorker
    from kvtool.serve.trtllm import Facts, Generator
    from kvtool.serve.trtllm_decode import LlmDecodeWorker
    from kvtool.serve.trtllm_prefill import LlmPrefillWorker


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


@dataclass(frozen=True)
class LlmPlace:
    """One instance over TensorRT-LLM. `engine`: the bundle; `llm_file` and `connector_file`: what its role adds to it,
    as rendered. `gpus`: ids on this host, none to leave the choice to the environment."""

    engine: Path
    llm_file: Path
    connector_file: Path
    gpus: tuple[int, ...] = ()
    pool_state: Path | None = None
    name: str = "instance-0"


def open_llm_prefill(place: LlmPlace, options: LlmOptions) -> LlmPrefillWorker:
    """A prefill worker over TensorRT-LLM, which this imports and starts.

    Raises:
        Missing: TensorRT-LLM is not installed.
        EngineRefused: no bundle there, or one that the installed version does not take.
        EngineFailed: TensorRT-LLM did not start.
    """
    from kvtool.serve.residence import open_residence
    from kvtool.serve.trtllm_prefill import LlmPrefillWorker

    facts, llm = _facts(place.engine), _llm(place, options)
    residence = None
    if options.handoff == "pool" and place.pool_state is not None:
        residence = open_residence(place.connector_file, place.pool_state, place.name, options.match_budget_s)
    return LlmPrefillWorker(llm, facts, options, residence, own_ids=llm.own_ids)


def open_llm_decode(place: LlmPlace, options: LlmOptions) -> LlmDecodeWorker:
    """A decode worker over TensorRT-LLM, likewise, with the bundle's tokenizer for stop strings and held-back
    characters."""
    from kvtool.engine.tokenizer import Tokenizer
    from kvtool.serve.trtllm_decode import LlmDecodeWorker

    facts, tokenizer = _facts(place.engine), Tokenizer(place.engine)
    return LlmDecodeWorker(_llm(place, options), facts, options, tokenizer)


def open_llm_over(generator: Generator, engine: Path, *, queue_max: int) -> LlmDecodeWorker:
    """A decode worker over an engine that something else runs, such as models of Triton's C++ backend."""
    from kvtool.engine.tokenizer import Tokenizer
    from kvtool.serve.trtllm_decode import LlmDecodeWorker

    return LlmDecodeWorker(generator, _facts(engine), LlmOptions(queue_max=queue_max), Tokenizer(engine))


def _llm(place: LlmPlace, options: LlmOptions) -> Llm:
    """TensorRT-LLM with what the connector needs in its environment, which every rank that it starts inherits."""
    from kvtool.engine.trtllm.connector import CONTROL_ENV, POOL_ENV, SETTINGS_ENV, read_settings
    from kvtool.engine.trtllm.llm import Llm, read_llm_args

    args = read_llm_args(place.llm_file)
    if "kv_connector_config" in args:
        os.environ.setdefault(SETTINGS_ENV, str(place.connector_file))
        if place.pool_state is not None:
            os.environ[POOL_ENV] = str(place.pool_state)
        if CONTROL_ENV not in os.environ and not read_settings(place.connector_file).control:
            folder = tempfile.mkdtemp(prefix="kvtool-control-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            os.environ[CONTROL_ENV] = f"{folder}/socket"
    tells = (SETTINGS_ENV, POOL_ENV, CONTROL_ENV) if "kv_connector_config" in args else ()
    where = str(place.llm_file)
    return Llm(args, place.gpus, start_timeout_s=options.start_timeout_s, where=where, tells=tells)


def _facts(engine: Path) -> Facts:
    """Raises EngineRefused: no engine for TensorRT-LLM there."""
    from kvtool.engine.manifest import read_manifest
    from kvtool.errors import EngineRefused
    from kvtool.serve.trtllm import Facts

    manifest = read_manifest(engine)
    target = manifest.tensorrt_llm
    if target is None:
        raise EngineRefused(f"{engine}: wanted an engine for tensorrt_llm, found one for {manifest.target}")
    return Facts(
        vocab_size=manifest.vocab_size,
        context_tokens_max=min(manifest.context_tokens_max, target.max_seq_len),
        block_tokens=manifest.kv.block_tokens,
        eos_token_ids=frozenset(manifest.eos_token_ids),
    )
