"""Processes that die or hang in the middle of a stream. Each request ends right, or with a clear error in time."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployed import Deployed, kill, until
from prompts import prose

pytestmark = pytest.mark.real

DEADLINE_MS = 60_000


@pytest.fixture(scope="module")
def wounded(smollm2_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A deployment of its own: its tests take parts of it away."""
    running = Deployed(
        tmp_path_factory.mktemp("wounded"), smollm2_engine, supervise__canary_interval="2s", pool__file_size="0"
    )
    yield running
    running.down()
    assert running.left() == set()


def healed(deployment: Deployed) -> bool:
    status = deployment.status()
    return status["phase"] == "running" and all(server["state"] == "serving" for server in status["servers"])


def test_prefill_killed_at_work_costs_time_and_no_token(wounded: Deployed) -> None:
    prompt = prose(1100, 25)
    stream = wounded.stream(prompt, 12, deadline_ms=DEADLINE_MS)
    until("prefill to be at work", lambda: wounded.worker("prefill-0")["requests"] > 0)
    kill(wounded.stub("prefill-0", "prefill_engine"))
    answer = stream.rest(60)
    assert answer.finish, answer.error
    assert until("the deployment to heal", lambda: healed(wounded))
    again = wounded.ask(prompt, 12, deadline_ms=DEADLINE_MS)
    assert again.tokens == answer.tokens


def test_a_pool_rank_that_hangs_in_a_stream_costs_a_budget_and_heals(wounded: Deployed) -> None:
    prompt = prose(300, 27)
    want = wounded.ask(prompt, 40, ignore_eos=True)
    rank = wounded.rank_pids()[1]
    stream = wounded.stream(prompt, 40, ignore_eos=True, deadline_ms=DEADLINE_MS)
    stream.take(3)
    kill(rank, signal.SIGSTOP)
    try:
        assert stream.rest(30).tokens == want.tokens, stream.answer.error
        began_s = time.monotonic()
        after = wounded.ask(prompt, 40, ignore_eos=True, deadline_ms=DEADLINE_MS)
        took_s = time.monotonic() - began_s
    finally:
        kill(rank, signal.SIGCONT)
    assert after.tokens == want.tokens, after.error
    assert took_s < 25
    until("hits again", lambda: sum(wounded.ask(prompt, 4).usage["hit_tokens"].values()) >= 300 // 32 * 32, 30)


def test_a_pool_rank_killed_in_a_stream_is_misses_and_no_more(wounded: Deployed) -> None:
    prompt = prose(300, 29)
    want = wounded.ask(prompt, 60, ignore_eos=True)
    stream = wounded.stream(prompt, 60, ignore_eos=True, deadline_ms=DEADLINE_MS)
    stream.take(3)
    kill(wounded.rank_pids()[0])
    assert stream.rest(30).tokens == want.tokens
    began_s = time.monotonic()
    after = wounded.ask(prompt, 60, ignore_eos=True, deadline_ms=DEADLINE_MS)
    assert after.tokens == want.tokens, after.error
    assert time.monotonic() - began_s < 20
    until("everything to be given back", lambda: not wounded.held(), 20)
