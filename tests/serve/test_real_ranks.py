"""The output-equality oracle over real ranks under mpiexec, by shared memory and by UCX, one killed on the way."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from serving import BLOCK, DECODE, LAYOUT, POOL, PREFILL, WAIT_S, Stream, alone, prompt, serving

from kvtool.pool.base import Outcome, Put
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import pool_status, start_pool
from kvtool.serve.request import Finish, Request

pytestmark = pytest.mark.real

PROMPTS = [prompt(count, count) for count in (1, 2, 7, 8, 9, 33, 64, 65, 130, 257)] + [
    (*prompt(900, 48), *prompt(seed, extra)) for seed, extra in enumerate((1, 8, 16, 33))
]


@pytest.fixture
def pool_dir(tmp_path):
    handle = start_pool(PoolConfig(LAYOUT, ranks=2, dram_size=4 << 20, file_size=4 << 20), tmp_path / "pool")
    yield handle
    handle.stop()


def leases(run_dir):
    """What ranks hold, but for trailing blocks that end by their own clock."""
    status = pool_status(run_dir, audit=True)
    return [holding for rank in status.ranks for holding in rank.audit if holding["kind"] != "transient"]


def nothing_held(run_dir, within_s=3.0):
    """A client that has just put holds a spare slot for a moment."""
    until_s = time.monotonic() + within_s
    while (held := leases(run_dir)) and time.monotonic() < until_s:
        time.sleep(0.05)
    return held == []


@pytest.mark.parametrize("path", ["shm", "ucx"])
def test_cold_and_warm_answers_over_ranks_equal_those_of_one_process(pool_dir, path):
    expected = [alone(tokens) for tokens in PROMPTS]
    client = PoolClient(pool_dir.state_file, LAYOUT, path=path, client_name="test")
    first = Put(b"first" + bytes(27), LAYOUT.block_size, lambda room: None, transient_s=0.1)
    assert client.write([first], budget_s=30)[0].outcome is Outcome.STORED, "UCX may take its time to start"
    with serving(client) as house:
        assert [house.ask(tokens).tokens for tokens in PROMPTS] == expected
        for tokens, answer in zip(PROMPTS, expected, strict=True):
            stream = house.ask(tokens)
            assert stream.tokens == answer
            whole = len(tokens) // BLOCK * BLOCK
            assert stream.last.usage.hit_tokens == ({"dram": whole} if whole else {})
            assert set(stream.last.usage.path_bytes) <= {path}
        assert client.counts().misses.get("corrupt", 0) == 0
    assert nothing_held(pool_dir.run_dir)
    client.close()


def test_a_rank_killed_under_load_changes_no_answer(pool_dir):
    expected = {tokens: alone(tokens, 12) for tokens in PROMPTS}
    client = PoolClient(pool_dir.state_file, LAYOUT, client_name="test")
    quick = replace(POOL, match_budget_s=0.3, fetch_budget_s=0.3, put_budget_s=0.3)
    with serving(client, prefill=replace(PREFILL, pool=quick), decode=replace(DECODE, pool=quick)) as house:
        for tokens in PROMPTS:
            house.ask(tokens, 12)
        streams, ended = [], threading.Semaphore(0)
        for number, tokens in enumerate(PROMPTS * 3):
            request, stream = Request(f"k{number}", tokens, 12), Stream()
            streams.append((tokens, stream))

            def then(done, request=request, stream=stream):
                assert done.error is None
                house.decode.submit(request, stream, done.handoff)
                ended.release()

            house.prefill.submit(request, then)
            if number == len(PROMPTS):
                os.kill(pool_dir.rank_pids[1], signal.SIGKILL)
        for tokens, stream in streams:
            assert stream.ended.wait(WAIT_S)
            assert stream.last.finish is Finish.LENGTH
            assert stream.tokens == expected[tokens]
        house.settle()
        assert [house.ask(tokens, 12).tokens for tokens in PROMPTS] == list(expected.values())
    client.close()


def test_a_pool_that_is_gone_is_a_cold_run(pool_dir):
    client = PoolClient(pool_dir.state_file, LAYOUT, client_name="test")
    with serving(client) as house:
        house.ask(PROMPTS[-1])
        pool_dir.stop()
        for tokens in PROMPTS:
            assert house.ask(tokens).tokens == alone(tokens)
    client.close()
