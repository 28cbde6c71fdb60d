"""Workers as Triton's models open them."""

from __future__ import annotations

import threading

import pytest
from serving import WAIT_S

from kvtool.errors import EngineRefused
from kvtool.serve.open import open_decode, open_prefill
from kvtool.serve.options import PrefillOptions
from kvtool.serve.request import Request


def test_a_directory_without_an_engine_is_refused(tmp_path):
    for opened in (open_prefill, open_decode):
        with pytest.raises(EngineRefused, match="no engine here"):
            opened(tmp_path, None)


def test_a_worker_starts_and_answers_when_the_pool_is_not_there(smollm2_engine, tmp_path):
    """The state file names a pool that never came: everything is computed here, and status says so."""
    worker = open_prefill(smollm2_engine, tmp_path / "pool.json", PrefillOptions(kv_blocks=4))
    done, ended = [], threading.Event()
    worker.submit(Request("r", tuple(range(40, 80)), 3), lambda result: (done.append(result), ended.set())[0])
    assert ended.wait(WAIT_S)
    assert done[0].error is None and (done[0].handoff.blocks, done[0].handoff.tail) == (0, 0)
    assert worker.wait_idle(WAIT_S)
    assert worker.status()["pool"]["puts"] == {"failed": 2}
    worker.close()
