"""Batch requests beside online ones: they give way, they give memory back, and they are never starved for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from serving import BLOCK, DECODE, LAYOUT, PREFILL, WAIT_S, Stream, alone, oracle, prompt

from kvtool.clock import WoundClock
from kvtool.engine.oracle import OracleEngine
from kvtool.errors import KvtoolError, Overloaded
from kvtool.serve.decode import DecodeWorker
from kvtool.serve.handoff import PrefillDone
from kvtool.serve.prefill import PrefillWorker
from kvtool.serve.request import Request
from kvtool.serve.turns import BATCH_PRIORITY, FIRM_S, Beside, batch_share, is_batch, together
from kvtool.serve.worker import Worker

PATIENCE_S = 5.0


@dataclass
class At:
    served_at_s: float
    priority: int = 50
    arrived_at_s: float = 0.0


def batch(name: str, tokens: tuple[int, ...], max_tokens: int = 4) -> Request:
    return Request(name, tokens, max_tokens, priority=BATCH_PRIORITY)


class Watched(OracleEngine):
    """Says what it computes, in order, and computes it when `go` is set, or one thing for each of `permits`. What is
    said: the prompt's first token and how many tokens, or ("step", rows)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(LAYOUT, vocab_size=512, **{"blocks": 512, **options})
        self.go, self.said = threading.Event(), list[tuple[Any, int]]()
        self.at_work, self.permits = threading.Semaphore(0), threading.Semaphore(0)
        self.go.set()

    def prefill(self, sequence: Any, tokens: Any, start: int, end: int, hooks: Any = None) -> None:
        self._say((tokens[0], end - start))
        super().prefill(sequence, tokens, start, end, hooks)

    def decode(self, batch: Any) -> Any:
        self._say(("step", len(batch)))
        return super().decode(batch)

    def _say(self, what: tuple[Any, int]) -> None:
        self.said.append(what)
        self.at_work.release()
        until_s = time.monotonic() + WAIT_S
        while not self.go.wait(0.002) and not self.permits.acquire(blocking=False):
            assert time.monotonic() < until_s


Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes workers; at the end they hold nothing, and neither do their engines."""
    made: list[tuple[Worker[Any], OracleEngine]] = []

    def of(kind: type[Any], engine: OracleEngine, options: Any, **more: Any) -> Any:
        given = (engine, None) if kind is PrefillWorker else (engine, None, None)
        worker = kind(*given, options=options, **more)
        made.append((worker, engine))
        return worker

    yield of
    for worker, engine in made:
        worker.close()
        assert worker.audit() == [] and engine.blocks_free == engine.blocks_total


def decoded(worker: DecodeWorker, request: Request) -> Stream:
    stream = Stream()
    worker.submit(request, stream)
    return stream


class Done:
    """The end of a prefill."""

    def __init__(self) -> None:
        self.ended, self.result = threading.Event(), list[PrefillDone]()

    def __call__(self, done: PrefillDone) -> None:
        self.result.append(done)
        self.ended.set()

    def wait(self) -> PrefillDone:
        assert self.ended.wait(WAIT_S), "prefill never ended"
        return self.result[0]


both = pytest.mark.parametrize("kind", [PrefillWorker, DecodeWorker])


def options(kind: type[Any]) -> Any:
    """Pieces of one block."""
    return replace(PREFILL if kind is PrefillWorker else DECODE, chunk_tokens=BLOCK)


def new_end(kind: type[Any]) -> Any:
    return Done() if kind is PrefillWorker else Stream()


def error_of(end: Any) -> KvtoolError | None:
    return end.error if isinstance(end, PrefillDone) else end.last.error


# The rule.


def test_batch_work_waits_while_somebody_waits_and_runs_when_nobody_does() -> None:
    beside = Beside(PATIENCE_S)
    assert beside.may_run(False, 0.0)
    assert not beside.may_run(True, 1.0) and not beside.may_run(True, 5.9)
    assert beside.may_run(False, 5.95), "nobody waits any more"
    assert not beside.may_run(True, 6.0), "patience begins anew, for it could run meanwhile"


def test_patience_lets_one_piece_through_at_a_time() -> None:
    beside, ran = Beside(PATIENCE_S), []
    for tick in range(3000):
        now_s = tick / 100
        if beside.may_run(True, now_s):
            ran.append(now_s)
            beside.ran(now_s)
    assert ran == pytest.approx([5.0, 10.0, 15.0, 20.0, 25.0])


def test_a_hold_is_a_lease() -> None:
    beside = Beside(PATIENCE_S)
    beside.hold(2.0)
    assert not beside.may_run(False, 1.9) and beside.may_run(False, 2.0)
    beside.hold(10.0)
    assert not beside.may_run(False, 3.0)
    beside.hold(3.0)
    assert beside.may_run(False, 3.0), "the front said that it is over"


def test_pieces_are_short_while_online_requests_come() -> None:
    beside = Beside(PATIENCE_S)
    calm_s = beside.piece_s(0.0)
    beside.may_run(True, 10.0)
    assert beside.piece_s(60.0) < calm_s and beside.piece_s(71.0) == calm_s


def test_who_decodes_together() -> None:
    online, waiting = [At(0.0), At(0.0)], [At(3.0), At(1.0), At(2.0)]
    assert together(online, waiting, False, 8) == online
    assert together(online, waiting, True, 8) == [*online, waiting[1], waiting[2]], "a quarter, longest unserved first"
    assert together(online, waiting, True, 2) == online, "no row is taken from an online request"
    assert together([], waiting, True, 2) == [waiting[1], waiting[2]]
    assert is_batch(At(0.0, priority=BATCH_PRIORITY)) and not is_batch(At(0.0, priority=1))
    assert [batch_share(most) for most in (1, 2, 3, 256)] == [1, 1, 1, 128]


# In the workers.


def test_an_online_prompt_stops_a_batch_prompt_half_way(make: Make) -> None:
    engine = Watched()
    worker = make(PrefillWorker, engine, replace(PREFILL, active_max=1, chunk_tokens=BLOCK))
    slow, quick = prompt(1, 20 * BLOCK + 1), prompt(2, 3 * BLOCK + 1)
    engine.go.clear()
    ends = [Done(), Done()]
    worker.submit(batch("b", slow), ends[0])
    assert engine.at_work.acquire(timeout=WAIT_S)
    worker.submit(Request("o", quick, 1), ends[1])
    engine.go.set()
    assert all(end.wait().error is None for end in ends)
    firsts = [first for first, _ in engine.said]
    online = [index for index, first in enumerate(firsts) if first == quick[0]]
    assert online[0] <= 2 and online == list(range(online[0], online[0] + len(online))), firsts


def test_a_held_worker_does_one_piece_of_batch_work_for_each_patience(make: Make) -> None:
    clock, engine = WoundClock(), Watched()
    worker = make(DecodeWorker, engine, DECODE, clock=clock)
    worker.hold(1e6)
    stream = decoded(worker, batch("b", (1, 2), 3))
    online = decoded(worker, Request("o", (1, 2), 3))
    assert online.wait().tokens and not stream.events, "a hold is for batch requests only"
    for tokens in (1, 2):
        clock.wind(PATIENCE_S + 0.01)
        worker._wake.set()
        assert engine.at_work.acquire(timeout=WAIT_S)
        assert worker.audit() and len(stream.events) <= tokens
    worker.hold(0.0)
    assert stream.wait().tokens == alone((1, 2), 3)


@both
def test_a_prompt_that_was_begun_stops_at_a_hold(make: Make, kind: type[Any]) -> None:
    clock, engine = WoundClock(), Watched()
    worker, end = make(kind, engine, options(kind), clock=clock), new_end(kind)
    engine.go.clear()
    worker.submit(batch("b", prompt(1, 4 * BLOCK), 1), end)
    assert engine.at_work.acquire(timeout=WAIT_S)
    worker.hold(1e6)
    engine.go.set()
    for pieces in (2, 3):
        assert not engine.at_work.acquire(timeout=0.1), "a piece was computed in spite of the hold"
        clock.wind(PATIENCE_S + 0.01)
        worker._wake.set()
        assert engine.at_work.acquire(timeout=WAIT_S)
        assert len(engine.said) == pieces
    worker.hold(0.0)
    end.wait()


@both
def test_an_online_request_gets_the_memory_of_the_batch_request_that_lost_least(make: Make, kind: type[Any]) -> None:
    engine = Watched(blocks=10)
    worker, ends = make(kind, engine, options(kind)), [new_end(kind) for _ in range(3)]
    engine.go.clear()
    for number in range(2):
        worker.submit(batch(f"b{number}", prompt(number, 4 * BLOCK - 4), 4), ends[number])
        if number:
            engine.permits.release()  # the next piece begins when b1 is there
        assert engine.at_work.acquire(timeout=WAIT_S)
    assert [held.owner for held in worker.audit() if held.what == "kv_blocks"] == ["b0", "b1"]
    worker.submit(Request("online", prompt(3, 6 * BLOCK - 4), 4), ends[2])
    engine.go.set()
    first, second, online = (end.wait() for end in ends)
    errors = [error_of(end) for end in (first, second, online)]
    assert [type(error) for error in errors] == [type(None), Overloaded, type(None)]
    assert "b1: gave way to online requests" in str(errors[1]) and worker.status()["counts"]["gave_way"] == 1
    if kind is DecodeWorker:
        assert first.tokens == alone(prompt(0, 4 * BLOCK - 4), 4)


@both
def test_a_batch_request_that_waited_long_is_admitted_and_keeps_its_memory(make: Make, kind: type[Any]) -> None:
    """Under online requests without end: they take all memory, one after the other."""
    clock, engine = WoundClock(), Watched(blocks=4)
    worker, ends = make(kind, engine, options(kind), clock=clock), [new_end(kind) for _ in range(4)]
    engine.go.clear()
    worker.submit(Request("o0", prompt(1, 3 * BLOCK), 2), ends[0])
    assert engine.at_work.acquire(timeout=WAIT_S)
    worker.submit(batch("b", prompt(2, 3 * BLOCK), 2), ends[1])
    clock.wind(FIRM_S + 1)
    for number in (1, 2):
        worker.submit(Request(f"o{number}", prompt(3, 3 * BLOCK), 2), ends[1 + number])
    engine.go.set()
    while not ends[1].ended.wait(0.02):
        clock.wind(PATIENCE_S)
    assert [error_of(end.wait()) for end in ends] == [None] * 4
    if kind is DecodeWorker:
        assert ends[1].tokens == alone(prompt(2, 3 * BLOCK), 2)


def test_batch_requests_have_half_of_the_queue(make: Make) -> None:
    engine = Watched(blocks=8)
    worker = make(DecodeWorker, engine, replace(DECODE, queue_max=4, batch_max=1))
    engine.go.clear()
    running = decoded(worker, batch("b0", prompt(1, 3 * BLOCK), 2))
    assert engine.at_work.acquire(timeout=WAIT_S)
    waiting = [decoded(worker, batch(f"b{number}", (1, 2), 2)) for number in (1, 2)]
    refused = decoded(worker, batch("b3", (1, 2), 2)).wait()
    assert isinstance(refused.last.error, Overloaded)
    assert "2 batch requests wait for this decode worker, its limit is 2" in str(refused.last.error)
    online = [decoded(worker, Request(f"o{number}", (1, 2), 2)) for number in (1, 2)]
    engine.go.set()
    assert all(stream.wait().last.error is None for stream in [running, *waiting, *online])


class Slow(Watched):
    """A step takes a millisecond for each of its rows."""

    def decode(self, batch: Any) -> Any:
        time.sleep(1e-3 * len(batch))
        return super().decode(batch)


def test_batch_rows_take_a_bounded_share_of_an_online_streams_time(make: Make) -> None:
    engine = Slow()
    worker = make(DecodeWorker, engine, replace(DECODE, batch_max=16))
    jobs = [decoded(worker, batch(f"b{number}", (1, 2), 200)) for number in range(4)]
    assert all(stream.first.wait(WAIT_S) for stream in jobs)
    begun = len(engine.said)
    online = decoded(worker, Request("o", (3, 4), 120))
    assert online.wait().tokens == alone((3, 4), 120)
    done = sum(len(stream.events) for stream in jobs)
    for stream in jobs:
        worker.cancel(stream.events[0].request_id)
    rows = [count for what, count in engine.said[begun:] if what == "step"]
    mixed = rows.count(5)
    assert 2 <= mixed <= rows.count(1) / 4, rows
    assert done >= 4 * mixed, "batch requests go on meanwhile"
    assert all(stream.wait() for stream in jobs)


def test_what_a_batch_request_generated_is_kept_for_nobody(make: Make) -> None:
    from serving import embedded

    pool = embedded()
    worker = DecodeWorker(oracle(), None, pool, options=DECODE, close_pool=True)
    try:
        assert decoded(worker, batch("b", prompt(1, 4 * BLOCK), 2 * BLOCK)).wait().last.error is None
        assert worker.wait_idle(WAIT_S) and "turn_blocks_put" not in worker.status()["counts"]
        assert decoded(worker, Request("o", prompt(2, 4 * BLOCK), 2 * BLOCK)).wait().last.error is None
        assert worker.wait_idle(WAIT_S) and worker.status()["counts"]["turn_blocks_put"] > 0
    finally:
        worker.close()
