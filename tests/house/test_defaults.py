"""A default is stated for workers and for the spec; the two may not drift apart."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from kvtool.config.spec import PoolSpec, Spec
from kvtool.kv.layout import KVLayout
from kvtool.kv.policy import AUTO, CHOICES
from kvtool.pool.config import PoolConfig
from kvtool.serve.options import DecodeOptions, PoolOptions, PrefillOptions

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=8, dtype="float32")


def test_the_spec_and_the_workers_have_the_same_defaults() -> None:
    spec = Spec.model_validate({"version": 1, "engine": Path("engine")})
    prefill, decode, pool = PrefillOptions(), DecodeOptions(), PoolOptions()
    for name in ("threads", "kv_blocks", "chunk_tokens"):
        assert getattr(spec.prefill, name) == getattr(prefill, name), f"prefill.{name}"
    for name in ("threads", "prompt_threads", "kv_blocks", "batch_max"):
        assert getattr(spec.decode, name) == getattr(decode, name), f"decode.{name}"
    assert (spec.budgets.match, spec.budgets.fetch, spec.budgets.put) == (
        pool.match_budget_s,
        pool.fetch_budget_s,
        pool.put_budget_s,
    )
    assert spec.pool.path == pool.path


def test_the_spec_names_every_eviction_policy() -> None:
    wanted = PoolSpec.model_fields["evict"]
    assert get_args(wanted.annotation) == CHOICES and wanted.default == AUTO == PoolConfig(LAYOUT).evict
