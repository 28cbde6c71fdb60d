"""The benchmark of device copies: that it runs, and says plainly when there is nothing to run on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from kvtool.kv.layout import KVLayout  # noqa: E402
from kvtool_trtllm.kernel import Kernel  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "bench" / "copies.py"


def _load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_copies", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_copies", module)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_nothing_is_measured_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert _load(monkeypatch).main([]) == 0
    assert capsys.readouterr().out == "no GPU: device copies were not measured\n"


def test_every_combination_is_measured(monkeypatch: pytest.MonkeyPatch, on_cpu: Kernel) -> None:
    """With the kernels' source on this CPU, in small: the harness, not a speed."""
    page = KVLayout(layers=2, kv_heads=4, head_dim=4, block_tokens=2)
    rows = _load(monkeypatch).measure(torch.device("cpu"), on_cpu, page, rounds=1)
    assert [(row.what, row.blocks, row.shards) for row in rows[:5]] == [
        ("gather", 1, 1), ("scatter", 1, 1), ("gather", 1, 4), ("scatter", 1, 4), ("checksum", 1, 1),
    ]  # fmt: skip
    assert len(rows) == 15 and all(row.gigabytes_s > 0 and str(row) for row in rows)
