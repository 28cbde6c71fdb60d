"""The decode worker: every request ends exactly once, and nothing stays behind."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from serving import BLOCK, DECODE, LAYOUT, WAIT_S, Stream, alone, embedded, oracle, prompt

from kvtool.clock import WoundClock
from kvtool.engine.oracle import OracleEngine
from kvtool.errors import DeadlinePassed, EngineFailed, Overloaded, RequestRefused, Unavailable
from kvtool.serve.decode import DecodeWorker
from kvtool.serve.request import Finish, Request, Sampling


class Gated(OracleEngine):
    """Decode steps wait for `go`; `stepping` says that one is waiting."""

    def __init__(self, **options):
        super().__init__(LAYOUT, **options)
        self.go, self.stepping, self.batches = threading.Event(), threading.Event(), []

    def decode(self, batch):
        self.stepping.set()
        assert self.go.wait(WAIT_S)
        self.batches.append(len(batch))
        return super().decode(batch)


@pytest.fixture
def worker_of():
    """Makes workers and checks at the end that they hold nothing."""
    made = []

    def make(engine, tokenizer=None, pool=None, options=DECODE, **more):
        worker = DecodeWorker(engine, tokenizer, pool, options=options, **more)
        made.append((worker, engine))
        return worker

    yield make
    for worker, engine in made:
        worker.close()
        assert worker.audit() == []
        assert engine.blocks_free == engine.blocks_total


def submit(worker, request, handoff=None):
    stream = Stream()
    worker.submit(request, stream, handoff)
    return stream


class Letters:
    """Token i is the letter i % 26, and token 511 nothing (an end-of-sequence token)."""

    def decode(self, ids):
        return "".join("" if token == 511 else chr(97 + token % 26) for token in ids)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("r", (), 1), "prompt is empty"),
        (Request("r", prompt(1, 64), 1), "has 64 tokens; with 1 to generate the context window of 64 holds at most 63"),
        (Request("r", (1, 2), 0), "max_tokens must be at least 1, found 0"),
        (Request("r", (1, 600), 4), "token 600 is outside the vocabulary of 512"),
        (Request("r", (1, -1), 4), "token -1 is outside"),
        (Request("", (1,), 4), "needs an id"),
        (Request("r", (1,), 4, deadline_s=0), "deadline_s must be positive"),
        (Request("r", (1,), 4, priority=101), "priority must lie in 0 to 100, found 101"),
        (Request("r", (1,), 4, stop=("",)), "stop strings of 1 to 1000 characters"),
        (Request("r", (1,), 4, Sampling(temperature=float("nan"))), "temperature must lie in 0"),
        (Request("r", (1,), 4, stop=("x",)), "stop strings need a tokenizer"),
        (Request("r", (1,), 60), "60 tokens need 8 KV blocks of 8, this engine has 7"),
    ],
)
def test_wrong_requests_are_refused_with_the_numbers(worker_of, request_, words):
    worker = worker_of(OracleEngine(LAYOUT, blocks=7, context_tokens_max=64))
    if "KV blocks" in words:
        request_ = replace(request_, max_tokens=59)
        words = "60 tokens need 8 KV blocks of 8, this engine has 7"
    event = submit(worker, request_).wait().last
    assert event.finish is Finish.ERROR and isinstance(event.error, RequestRefused)
    assert words in str(event.error)


def test_a_second_request_with_a_running_id_is_refused_and_the_first_goes_on(worker_of):
    engine = Gated(blocks=64)
    worker = worker_of(engine)
    first = submit(worker, Request("same", prompt(1, 9), 4))
    assert engine.stepping.wait(WAIT_S)
    second = submit(worker, Request("same", prompt(1, 9), 4)).wait()
    assert isinstance(second.last.error, RequestRefused) and "id runs already" in str(second.last.error)
    engine.go.set()
    assert first.wait().tokens == alone(prompt(1, 9), 4)


def test_the_end_of_the_context_window_ends_the_answer(worker_of):
    tokens = prompt(1, 30)
    worker = worker_of(OracleEngine(LAYOUT, context_tokens_max=33))
    stream = submit(worker, Request("r", tokens, 100)).wait()
    assert len(stream.tokens) == 3 and stream.last.finish is Finish.LENGTH


def test_eos_ends_the_answer_and_is_not_shown_unless_it_is_ignored(worker_of):
    tokens = prompt(1, 12)
    answer = alone(tokens, 6)
    engine = oracle(eos_token_ids=frozenset({answer[3]}))
    worker = worker_of(engine)
    stream = submit(worker, Request("r", tokens, 6)).wait()
    assert stream.tokens == answer[:3] and stream.last.finish is Finish.STOP
    assert stream.last.usage.completion_tokens == 3
    assert submit(worker, Request("i", tokens, 6, ignore_eos=True)).wait().tokens == answer


def test_a_stop_string_ends_the_answer_and_is_cut(worker_of):
    tokens = prompt(1, 12)
    answer = Letters().decode(alone(tokens, 8))
    worker = worker_of(oracle(), Letters())
    stop = answer[3:6]
    stream = submit(worker, Request("r", tokens, 8, stop=(stop,))).wait()
    text = ""
    for event in stream.events:
        grown = Letters().decode([*event.context, *event.tokens])[len(Letters().decode(event.context)) :]
        text += grown[: len(grown) - event.cut_chars]
    assert text == answer[: answer.find(stop)] and stream.last.finish is Finish.STOP
    assert len(stream.tokens) == answer.find(stop) + 3


def test_held_back_tokens_come_with_the_last_event(worker_of):
    tokens = prompt(1, 12)
    answer = alone(tokens, 5)
    almost = Letters().decode(answer)[-2:] + "?"
    stream = submit(worker_of(oracle(), Letters()), Request("r", tokens, 5, stop=(almost,))).wait()
    assert stream.tokens == answer and stream.last.finish is Finish.LENGTH and len(stream.last.tokens) == 2


def test_cancelled_while_waiting_and_while_running(worker_of):
    engine = Gated(blocks=64)
    worker = worker_of(engine, options=replace(DECODE, batch_max=1))
    running = submit(worker, Request("running", prompt(1, 9), 50))
    assert engine.stepping.wait(WAIT_S)
    waiting = submit(worker, Request("waiting", prompt(2, 9), 50))
    assert worker.cancel("waiting") and worker.cancel("running") and not worker.cancel("unknown")
    engine.go.set()
    assert running.wait().last.finish is Finish.CANCELLED
    assert waiting.wait().last.finish is Finish.CANCELLED
    assert waiting.tokens == [] and not worker.cancel("waiting")
    assert worker.wait_idle(WAIT_S)


def test_a_deadline_ends_waiting_and_running_requests_by_the_clock(worker_of):
    clock, engine = WoundClock(), Gated(blocks=64)
    worker = worker_of(engine, options=replace(DECODE, batch_max=1), clock=clock)
    running = submit(worker, Request("running", prompt(1, 9), 50, deadline_s=5))
    assert engine.stepping.wait(WAIT_S)
    waiting = submit(worker, Request("waiting", prompt(2, 9), 50, deadline_s=7))
    patient = submit(worker, Request("patient", prompt(3, 9), 3, deadline_s=70))
    clock.wind(8)
    engine.go.set()
    for stream, deadline in ((running, "5 s"), (waiting, "7 s")):
        error = stream.wait().last.error
        assert isinstance(error, DeadlinePassed) and deadline in str(error)
    assert patient.wait().last.finish is Finish.LENGTH


def test_a_full_queue_refuses_with_a_time_to_come_back(worker_of):
    engine = Gated(blocks=64)
    worker = worker_of(engine, options=replace(DECODE, batch_max=1, queue_max=2))
    streams = [submit(worker, Request("r0", prompt(0, 9), 2))]
    assert engine.stepping.wait(WAIT_S)
    streams += [submit(worker, Request(f"r{number}", prompt(number, 9), 2)) for number in (1, 2)]
    refused = submit(worker, Request("r3", prompt(3, 9), 2)).wait()
    assert isinstance(refused.last.error, Overloaded)
    assert 0.1 <= refused.last.error.retry_after_s <= 30
    assert "2 requests wait" in str(refused.last.error)
    engine.go.set()
    for number, stream in enumerate(streams):
        assert stream.wait().tokens == alone(prompt(number, 9), 2)


def test_requests_join_and_leave_a_running_batch(worker_of):
    engine = Gated(blocks=64)
    worker = worker_of(engine)
    long = submit(worker, Request("long", prompt(1, 9), 40))
    assert engine.stepping.wait(WAIT_S)
    short = submit(worker, Request("short", prompt(2, 9), 4))
    engine.go.set()
    assert short.wait().tokens == alone(prompt(2, 9), 4)
    assert long.wait().tokens == alone(prompt(1, 9), 40)
    assert engine.batches.count(2) == 4 and engine.batches.count(1) == 36


def test_more_requests_than_kv_blocks_wait_their_turn(worker_of):
    worker = worker_of(oracle(blocks=8))
    streams = [submit(worker, Request(f"r{seed}", prompt(seed, 20), 8)) for seed in range(9)]
    for seed, stream in enumerate(streams):
        assert stream.wait().tokens == alone(prompt(seed, 20), 8)


def test_the_highest_priority_is_admitted_first(worker_of):
    engine = Gated(blocks=64)
    worker = worker_of(engine, options=replace(DECODE, batch_max=1))
    order, ended = [], threading.Semaphore(0)

    def watch(name):
        def on_event(event):
            if event.finish:
                order.append(name)
                ended.release()

        return on_event

    worker.submit(Request("first", prompt(0, 9), 2), watch("first"))
    assert engine.stepping.wait(WAIT_S)
    for name, priority in (("low", 10), ("high", 90), ("middle", 50)):
        worker.submit(Request(name, prompt(1, 9), 2, priority=priority), watch(name))
    engine.go.set()
    for _ in range(4):
        assert ended.acquire(timeout=WAIT_S)
    assert order == ["first", "high", "middle", "low"]


class Poisoned(OracleEngine):
    """Raises when token 7 is fed in a decode step, or when a prompt with token 8 in it is prefilled. The first step
    waits for `go`, so that all others are in the batch when it happens."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.go, self.stepping = threading.Event(), threading.Event()

    def decode(self, batch):
        self.stepping.set()
        assert self.go.wait(WAIT_S)
        logits = super().decode(batch)
        if any(step.token == 7 for step in batch):
            raise RuntimeError("illegal memory access")
        for row, step in enumerate(batch):
            if step.token == 9:
                logits[row] = np.nan
        return logits

    def prefill(self, sequence, tokens, start, end, hooks=None):
        if 8 in tokens[start:end]:
            raise MemoryError("no workspace")
        super().prefill(sequence, tokens, start, end, hooks)


@pytest.mark.parametrize(
    ("poison", "words"),
    [(7, "illegal memory access"), (8, "no workspace"), (9, "512 logits of 512 that are no numbers")],
)
def test_an_engine_error_fails_the_request_that_caused_it_and_no_other(worker_of, poison, words):
    def clean(seed):
        return tuple(token + 10 if token in (7, 8, 9) else token for token in prompt(seed, 20))

    expected = [alone(clean(seed), 6, sampling=Sampling()) for seed in range(3)]
    assert not any(token in (7, 8, 9) for answer in expected for token in answer), "choose other seeds"
    engine = Poisoned(LAYOUT, blocks=64)
    worker = worker_of(engine)
    streams = [submit(worker, Request("r0", clean(0), 6))]
    assert engine.stepping.wait(WAIT_S)
    streams += [submit(worker, Request(f"r{seed}", clean(seed), 6)) for seed in (1, 2)]
    bad = (*clean(9)[:10], poison, *clean(9)[10:12], poison)
    broken = submit(worker, Request("bad", bad, 6))
    engine.go.set()
    broken.wait()
    assert broken.last.finish is Finish.ERROR and isinstance(broken.last.error, EngineFailed)
    assert words in str(broken.last.error)
    assert [stream.wait().tokens for stream in streams] == expected
    assert submit(worker, Request("after", clean(0), 6)).wait().tokens == expected[0]


def test_close_ends_every_request_and_later_ones_at_once(worker_of):
    engine = Gated(blocks=64)
    worker = worker_of(engine, options=replace(DECODE, batch_max=1))
    streams = [submit(worker, Request(f"r{seed}", prompt(seed, 9), 50)) for seed in range(3)]
    assert engine.stepping.wait(WAIT_S)
    closing = threading.Thread(target=worker.close)
    closing.start()
    engine.go.set()
    closing.join(WAIT_S)
    for stream in (*streams, submit(worker, Request("late", prompt(1, 9), 5))):
        assert isinstance(stream.wait().last.error, Unavailable) and "closing" in str(stream.last.error)
        assert not stream.late


def test_a_callback_that_raises_stops_nobody(worker_of):
    worker = worker_of(oracle())

    def on_event(event):
        raise ValueError("the client's stream is broken")

    worker.submit(Request("rude", prompt(1, 9), 5), on_event)
    assert submit(worker, Request("polite", prompt(2, 9), 5)).wait().tokens == alone(prompt(2, 9), 5)
    assert worker.wait_idle(WAIT_S)


class Stuck:
    """A pool whose puts wait for `go_on`."""

    def __init__(self, pool):
        self.pool, self.go_on = pool, threading.Event()

    def __getattr__(self, name):
        return getattr(self.pool, name)

    def write(self, blocks, budget_s=2.0):
        assert self.go_on.wait(WAIT_S)
        return self.pool.write(blocks, budget_s)


def test_finished_turns_give_up_their_memory_to_a_new_request(worker_of):
    """Puts are stuck, so finished turns stay; they must not keep others from being admitted."""
    pool, engine = Stuck(embedded()), oracle(blocks=10)
    worker = worker_of(engine, pool=pool, options=replace(DECODE, staging_blocks_max=1))
    for seed in range(6):
        assert submit(worker, Request(f"r{seed}", prompt(seed, 40), 30)).wait().tokens == alone(prompt(seed, 40), 30)
    assert worker.status()["counts"]["backlog_dropped"] >= 4
    pool.go_on.set()
    assert worker.wait_idle(WAIT_S)
    pool.close()


def test_a_request_without_a_handoff_hits_what_an_earlier_turn_left(worker_of):
    """One process with a pool of its own: no prefill instance anywhere."""
    pool, tokens = embedded(), prompt(1, 40)
    worker = worker_of(oracle(), pool=pool)
    answer = submit(worker, Request("one", tokens, 20)).wait().tokens
    assert worker.wait_idle(WAIT_S)
    again = (*tokens, *answer, 5, 6, 7)
    stream = submit(worker, Request("two", again, 8)).wait()
    assert stream.tokens == alone(again, 8)
    assert stream.last.usage.hit_tokens == {"dram": 60 // BLOCK * BLOCK}
    pool.close()


def test_an_answer_that_the_pool_knows_is_not_computed_again(worker_of):
    pool, tokens = embedded(), prompt(1, 40)
    worker = worker_of(oracle(), pool=pool)
    submit(worker, Request("one", tokens, 20)).wait()
    assert worker.wait_idle(WAIT_S)
    before = worker.status()["counts"]
    submit(worker, Request("two", tokens, 20)).wait()
    assert worker.wait_idle(WAIT_S)
    assert worker.status()["counts"]["computed_tokens"] == before["computed_tokens"]
    assert worker.status()["pool"]["puts"] == {"stored": 60 // BLOCK}
    pool.close()


def test_status_says_how_it_stands(worker_of):
    engine = Gated(blocks=64)
    worker = worker_of(engine, options=replace(DECODE, batch_max=1))
    streams = [submit(worker, Request(f"r{seed}", prompt(seed, 9), 2)) for seed in range(3)]
    assert engine.stepping.wait(WAIT_S)
    status = worker.status()
    assert (status["queued"], status["running"], status["requests"]) == (2, 1, 3)
    assert status["blocks_total"] == 64 and status["blocks_free"] == 64 - 2
    assert {held.what for held in worker.audit()} == {"request", "kv_blocks"}
    engine.go.set()
    for stream in streams:
        stream.wait()
    assert worker.wait_idle(WAIT_S)
    assert worker.status()["counts"]["generated_tokens"] == 6
