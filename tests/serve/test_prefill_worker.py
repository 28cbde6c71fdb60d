"""The prefill worker: hand-offs, turns between chunks, and an end for every request."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from serving import BLOCK, LAYOUT, PREFILL, WAIT_S, embedded, oracle, prompt

from kvtool.clock import WoundClock
from kvtool.engine.oracle import OracleEngine
from kvtool.errors import Cancelled, DeadlinePassed, EngineFailed, Overloaded, RequestRefused, Unavailable
from kvtool.serve.handoff import Handoff
from kvtool.serve.keys import prompt_keys
from kvtool.serve.prefill import PrefillWorker
from kvtool.serve.request import Request


class Gated(OracleEngine):
    """Chunks wait for a permit; `chunks` lists (prompt length, start, end)."""

    def __init__(self, **options):
        super().__init__(LAYOUT, **options)
        self.permits, self.computing, self.chunks = threading.Semaphore(0), threading.Event(), []

    def prefill(self, sequence, tokens, start, end, hooks=None):
        self.computing.set()
        assert self.permits.acquire(timeout=WAIT_S)
        self.chunks.append((len(tokens), start, end))
        super().prefill(sequence, tokens, start, end, hooks)


class Done:
    def __init__(self):
        self.results, self.ended = [], threading.Event()

    def __call__(self, done):
        self.results.append(done)
        self.ended.set()

    def wait(self):
        assert self.ended.wait(WAIT_S)
        assert len(self.results) == 1
        return self.results[0]


@pytest.fixture
def worker_of():
    made = []

    def make(engine, pool, options=PREFILL, **more):
        worker = PrefillWorker(engine, pool, options=options, **more)
        made.append((worker, engine, pool))
        return worker

    yield make
    for worker, engine, pool in made:
        worker.close()
        assert worker.audit() == []
        assert engine.blocks_free == engine.blocks_total
        if pool is not None:
            pool.close()


def submit(worker, request):
    done = Done()
    worker.submit(request, done)
    return done


def looked(worker):
    """Wait until the pool was asked for every request that was submitted."""
    until_s = time.monotonic() + WAIT_S
    while any(held.what == "pull" for held in worker.audit()):
        assert time.monotonic() < until_s
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("count", "blocks", "tail"),
    [(1, 0, 0), (2, 0, 2), (7, 0, 7), (8, 1, 0), (9, 1, 0), (10, 1, 2), (64, 8, 0), (79, 9, 7)],
)
def test_a_cold_prompt_is_handed_off_whole(worker_of, count, blocks, tail):
    pool = embedded()
    worker, request = worker_of(oracle(), pool), Request("r", prompt(1, count), 5)
    done = submit(worker, request).wait()
    assert (done.handoff.blocks, done.handoff.tail, done.handoff.hit_blocks) == (blocks, tail, 0)
    assert done.usage.computed_tokens == done.usage.prompt_tokens == count
    keys = prompt_keys(request, oracle(), "default").all
    assert pool.match(keys) == len(keys) == done.usage.put_blocks


def test_a_full_hit_is_answered_while_the_engine_is_busy_and_takes_no_memory(worker_of):
    pool, engine = embedded(), Gated(blocks=32)
    worker = worker_of(engine, pool)
    engine.permits.release()
    first = submit(worker, Request("cold", prompt(1, 32), 1)).wait()
    assert first.handoff.blocks == 4
    engine.computing.clear()
    slow = submit(worker, Request("slow", prompt(2, 200), 1))
    assert engine.computing.wait(WAIT_S)
    hit = submit(worker, Request("hit", (*prompt(1, 32), 3, 4, 5), 1)).wait()
    assert hit.handoff == Handoff(4, 0, 4, {}, first.handoff.seed)
    assert not slow.ended.is_set() and [end for _, _, end in engine.chunks] == [32]
    engine.permits.release(20)
    slow.wait()


def test_a_resident_prefix_is_pulled_and_only_the_rest_computed(worker_of):
    pool, engine = embedded(), Gated(blocks=64)
    worker = worker_of(engine, pool)
    engine.permits.release(99)
    submit(worker, Request("cold", prompt(1, 80), 1)).wait()
    engine.chunks.clear()
    done = submit(worker, Request("warm", prompt(1, 80) + prompt(2, 50), 1)).wait()
    assert engine.chunks == [(130, 80, 112), (130, 112, 130)]
    assert done.usage.hit_tokens == {"dram": 80} and done.usage.computed_tokens == 50
    assert done.usage.path_bytes == {"embedded": 10 * LAYOUT.block_size}
    assert (done.handoff.blocks, done.handoff.hit_blocks, done.handoff.tail) == (16, 10, 2)


def test_a_long_prompt_does_not_hold_up_a_short_one(worker_of):
    engine = Gated(blocks=128)
    worker = worker_of(engine, embedded(), clock=WoundClock())
    long = submit(worker, Request("long", prompt(1, 320), 1))
    assert engine.computing.wait(WAIT_S)
    short = submit(worker, Request("short", prompt(2, 20), 1))
    looked(worker)
    engine.permits.release(30)
    long.wait(), short.wait()
    assert [length for length, _, _ in engine.chunks].index(20) <= 3


def test_whoever_waited_long_gets_a_turn_before_a_higher_priority(worker_of):
    """The clock stands far ahead after each chunk, so that every waiting request is overdue in turn."""
    clock = WoundClock()

    class Winding(Gated):
        def prefill(self, sequence, tokens, start, end, hooks=None):
            super().prefill(sequence, tokens, start, end, hooks)
            clock.wind(2.0)

    engine = Winding(blocks=256)
    worker = worker_of(engine, embedded(), clock=clock)
    first = submit(worker, Request("first", prompt(1, 40), 1))
    assert engine.computing.wait(WAIT_S)
    low = submit(worker, Request("low", prompt(2, 200), 1, priority=0))
    high = submit(worker, Request("high", prompt(3, 201), 1, priority=100))
    looked(worker)
    engine.permits.release(50)
    for done in (first, low, high):
        done.wait()
    turns = [length for length, _, _ in engine.chunks]
    high_ends = len(turns) - turns[::-1].index(201)
    assert turns[:high_ends].count(200) >= 3


def test_blocks_are_put_while_the_rest_is_computed(worker_of):
    pool, engine = embedded(), Gated(blocks=64)
    worker, request = worker_of(engine, pool), Request("r", prompt(1, 96), 1)
    done = submit(worker, request)
    engine.permits.release()
    keys = prompt_keys(request, oracle(), "default").all
    for _ in range(2000):
        if pool.match(keys) == 4 or done.ended.wait(0.005):
            break
    assert pool.match(keys) == 4 and not done.ended.is_set()
    engine.permits.release(9)
    assert done.wait().handoff.blocks == 12


@pytest.mark.parametrize("stage", ["waiting", "computing"])
def test_cancel_and_deadline_end_a_request_at_the_next_chunk(worker_of, stage):
    clock, engine = WoundClock(), Gated(blocks=256)
    worker = worker_of(engine, embedded(), replace(PREFILL, active_max=1), clock=clock)
    computing = submit(worker, Request("computing", prompt(1, 320), 1, deadline_s=9))
    assert engine.computing.wait(WAIT_S)
    waiting = submit(worker, Request("waiting", prompt(2, 320), 1, deadline_s=9))
    chosen = {"waiting": waiting, "computing": computing}[stage]
    assert worker.cancel(stage)
    engine.permits.release()
    error = chosen.wait().error
    assert isinstance(error, Cancelled) and chosen.results[0].handoff is None
    clock.wind(10)
    engine.permits.release(2)
    other = {"waiting": computing, "computing": waiting}[stage]
    assert isinstance(other.wait().error, DeadlinePassed) and "9 s" in str(other.results[0].error)
    assert worker.wait_idle(WAIT_S)


def test_refusals_say_what_was_found(worker_of):
    worker = worker_of(OracleEngine(LAYOUT, blocks=4), embedded())
    for request, words in (
        (Request("r", (), 1), "prompt is empty"),
        (Request("r", prompt(1, 33), 1), "33 tokens need 5 KV blocks of 8, this engine has 4"),
        (Request("r", (512,), 1), "token 512 is outside the vocabulary of 512"),
    ):
        error = submit(worker, request).wait().error
        assert isinstance(error, RequestRefused) and words in str(error)


def test_a_full_queue_is_overload(worker_of):
    engine = Gated(blocks=256)
    worker = worker_of(engine, embedded(), replace(PREFILL, queue_max=1, active_max=1))
    first = submit(worker, Request("r1", prompt(1, 64), 1))
    assert engine.computing.wait(WAIT_S)
    second = submit(worker, Request("r2", prompt(2, 64), 1))
    error = submit(worker, Request("r3", prompt(3, 64), 1)).wait().error
    assert isinstance(error, Overloaded) and error.retry_after_s >= 0.1
    engine.permits.release(9)
    assert first.wait().error is None and second.wait().error is None


def test_an_engine_error_ends_that_request_only(worker_of):
    class Poisoned(OracleEngine):
        def prefill(self, sequence, tokens, start, end, hooks=None):
            if 8 in tokens[start:end]:
                raise RuntimeError("illegal memory access")
            super().prefill(sequence, tokens, start, end, hooks)

    worker = worker_of(Poisoned(LAYOUT, blocks=64), embedded())
    bad = submit(worker, Request("bad", (1, 8, 3), 1)).wait()
    assert isinstance(bad.error, EngineFailed) and "illegal memory access" in str(bad.error)
    assert submit(worker, Request("good", (1, 2, 3), 1)).wait().error is None


def test_close_answers_everybody(worker_of):
    engine = Gated(blocks=256)
    worker = worker_of(engine, embedded(), replace(PREFILL, active_max=1))
    dones = [submit(worker, Request(f"r{seed}", prompt(seed, 64), 1)) for seed in range(3)]
    assert engine.computing.wait(WAIT_S)
    closing = threading.Thread(target=worker.close)
    closing.start()
    engine.permits.release(9)
    closing.join(WAIT_S)
    for done in (*dones, submit(worker, Request("late", prompt(1, 5), 1))):
        assert isinstance(done.wait().error, Unavailable)


def test_more_prompts_than_memory_take_turns(worker_of):
    worker = worker_of(oracle(blocks=10), embedded())
    dones = [submit(worker, Request(f"r{seed}", prompt(seed, 8 * BLOCK), 1)) for seed in range(12)]
    assert all(done.wait().handoff.blocks == 8 for done in dones)


def test_a_handoff_survives_its_json_and_nonsense_is_refused():
    handoff = Handoff(7, 3, 2, {"dram": 16}, "ab")
    assert Handoff.from_json(handoff.to_json()) == handoff
    for text in ("", "[]", "{}", '{"blocks": -1}', '{"blocks": "7"}', '{"blocks": 1, "keys": []}', '{"blocks": true}'):
        with pytest.raises(RequestRefused, match="wanted a hand-off"):
            Handoff.from_json(text)


def test_a_request_that_is_not_to_be_published_leaves_nothing_in_the_pool(worker_of):
    pool = embedded()
    worker = worker_of(oracle(), pool)
    request = replace(Request("canary", prompt(91, 2 * BLOCK + 3), 1), publish=False)
    done = submit(worker, request).wait()
    assert done.error is None and done.usage.put_blocks == 0
    assert done.handoff.blocks == 0 and done.handoff.tail == 0
    assert pool.counts().blocks_put == {} and pool.audit() == []
