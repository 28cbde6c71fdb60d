"""kvtool's own connector between the executor and a real pool: settings, arguments, and one engine's run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import random
from pathlib import Path
from typing import Any

import adversary
import yaml

from kvtool.engine.trtllm.connector import (
    MODULE,
    SCHEDULER_CLASS,
    SETTINGS_ENV,
    WORKER_CLASS,
    ConnectorSettings,
)
from kvtool.kv.layout import KVLayout
from kvtool.kv.shard import stored_layout

ROOT = Path(__file__).resolve().parents[2]
LORA = 7


def kv_of(model: Any) -> KVLayout:
    names = ("layers", "kv_heads", "head_dim", "block_tokens", "dtype", "kv_factor")
    return KVLayout(**{name: getattr(model, name) for name in names})


def pool_layout(model: Any, stored: int) -> KVLayout:
    return stored_layout(kv_of(model), stored)


def settings(
    path: Path, model: Any, state: Path | str | None, *, tp: int, stored: int, namespace: str, **more: Any
) -> Path:
    """The file that a bundle would hold; `more` replaces fields."""
    kv = kv_of(model)
    made: dict[str, Any] = {
        "pool_state": None if state is None else str(state),
        "namespace": namespace,
        "model_digest": "ab" * 32,
        "kv": dataclasses.asdict(kv),
        "tensor_parallel": tp,
        "stored_parallel": stored,
        "claim_budget_s": 2.0,
        "staging_bytes": 1 << 22,
        "control": str(path.parent / "control.sock"),
    }  # fmt: skip
    if "lora" in ConnectorSettings.model_fields:
        made["lora"] = {str(LORA): "cd" * 32}
    path.write_text(yaml.safe_dump({**made, **more}))
    return path


def llm_args(setup: Any, tp: int = 1, **more: Any) -> Any:
    """As the bundle of an engine with the connector sets them; checked by the recorded classes."""
    args = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    names = {
        "connector_module": MODULE,
        "connector_scheduler_class": SCHEDULER_CLASS,
        "connector_worker_class": WORKER_CLASS,
    }
    cache = {"tokens_per_block": setup.model.block_tokens, "enable_partial_reuse": False, "enable_block_reuse": True}
    if setup.v2:
        cache["use_kv_cache_manager_v2"] = True
    given: dict[str, Any] = {
        "model": "fake",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": tp,
        "kv_cache_config": cache,
        "kv_connector_config": names,
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "cuda_graph_config": {"enable_padding": True} if setup.graphs else None,
        "disable_overlap_scheduler": not setup.overlap,
        "max_beam_width": 1,
        **more,
    }
    return args.TorchLlmArgs(**given)


def connector() -> tuple[Any, Any]:
    """By name, as TensorRT-LLM loads it."""
    module = importlib.import_module(MODULE)
    return getattr(module, WORKER_CLASS), getattr(module, SCHEDULER_CLASS)


@contextlib.contextmanager
def environment(**values: str) -> Any:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def engine(
    setup: Any, requests: list[Any], file: Path, *, tp: int = 1, seed: int = 0, what: str = "", **how: Any
) -> Any:
    """One engine with the connector, on `requests`; its answers are checked by `play`."""
    work = adversary.Work(seed, requests, **how)
    with environment(**{SETTINGS_ENV: str(file)}):
        return adversary.play(
            setup, work, connector(), tp=tp, llm_args=llm_args(setup, tp), what=what or f"seed {seed}"
        )


def drawn(
    seed: int, *, v2: bool, tp: int = 1, count: int = 12, tenants: bool = True, **fixed: Any
) -> tuple[Any, list[Any]]:
    """Set-up and requests of `seed`; blocks of 4 tokens and 4 heads, so that few pools serve all seeds."""
    rng = random.Random(seed)
    model, groups = adversary.fake("model"), ()
    if v2 and rng.random() < 0.6 and "groups" not in fixed:
        groups = (model.Group((0, 2)), model.Group((1, 3), window=rng.choice([9, 12])))
    setup = adversary.setup_of(rng, v2=v2, tp=tp, groups=fixed.pop("groups", groups), size=4, **fixed)
    return setup, adversary.requests_of(rng, setup, count, tenants=tenants)


def dumped(played: Any) -> str:
    stats = {"wrong": [line for one in played.executors for line in one.wrong], **played.stats}
    return json.dumps(stats)
