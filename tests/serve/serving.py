"""Both workers around a pool, over oracle engines: what the serving tests ask questions through."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from kvtool.engine.base import Engine
from kvtool.engine.oracle import OracleEngine
from kvtool.kv.layout import KVLayout
from kvtool.pool.base import Pool
from kvtool.pool.embedded import EmbeddedPool
from kvtool.serve.decode import DecodeWorker
from kvtool.serve.handoff import Handoff, PrefillDone
from kvtool.serve.options import DecodeOptions, PoolOptions, PrefillOptions
from kvtool.serve.prefill import PrefillWorker
from kvtool.serve.request import Event, Finish, Request, Sampling

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, block_tokens=8)
BLOCK = LAYOUT.block_tokens
VOCAB = 512
WAIT_S = 20.0
POOL = PoolOptions(
    recompute_if_faster=False, match_budget_s=WAIT_S, fetch_budget_s=WAIT_S, put_budget_s=WAIT_S, fetch_floor_s=WAIT_S
)
"""Time enough on the busiest machine: what is asserted is what is hit, not how fast."""
PREFILL = PrefillOptions(chunk_tokens=32, pool=POOL)
DECODE = DecodeOptions(chunk_tokens=24, pool=POOL)


def prompt(seed: int, count: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(VOCAB) for _ in range(count))


def oracle(blocks: int = 512, **options: object) -> OracleEngine:
    return OracleEngine(LAYOUT, blocks=blocks, vocab_size=VOCAB, **options)  # type: ignore[arg-type]


def embedded(blocks: int = 1024, **options: object) -> EmbeddedPool:
    return EmbeddedPool(LAYOUT, blocks * (LAYOUT.block_size + 4096), **options)  # type: ignore[arg-type]


@dataclass
class Stream:
    """Everything one request was told; `wait` for its end. Fails the test if anything follows the end."""

    events: list[Event] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    first: threading.Event = field(default_factory=threading.Event)
    late: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        if self.ended.is_set():
            self.late.append(event)
            return
        self.events.append(event)
        self.first.set()
        if event.finish is not None:
            self.ended.set()

    def wait(self) -> Stream:
        assert self.ended.wait(WAIT_S), "no final event"
        return self

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def tokens(self) -> list[int]:
        assert not self.late, "an event after the final one"
        for event in self.events:
            assert event.index == sum(len(before.tokens) for before in self.events[: self.events.index(event)])
        assert [event.finish for event in self.events[:-1]] == [None] * (len(self.events) - 1)
        return [token for event in self.events for token in event.tokens]


@dataclass
class Serving:
    prefill: PrefillWorker
    decode: DecodeWorker
    engines: tuple[Engine, Engine]
    asked: int = 0

    def prefilled(self, request: Request) -> PrefillDone:
        done: list[PrefillDone] = []
        ended = threading.Event()
        self.prefill.submit(request, lambda result: (done.append(result), ended.set())[0])
        assert ended.wait(WAIT_S), "prefill never ended"
        return done[0]

    def decoded(self, request: Request, handoff: Handoff | None = None) -> Stream:
        stream = Stream()
        self.decode.submit(request, stream, handoff)
        return stream.wait()

    def ask(self, tokens: Sequence[int], max_tokens: int = 10, **fields: object) -> Stream:
        """Prefill, then decode; the stream of the answer. Turn blocks are in the pool when this returns."""
        self.asked += 1
        request = Request(f"r{self.asked}", tuple(tokens), max_tokens, **fields)  # type: ignore[arg-type]
        done = self.prefilled(request)
        assert done.error is None, done.error
        stream = self.decoded(request, done.handoff)
        assert stream.last.finish in (Finish.LENGTH, Finish.STOP), stream.last
        self.settle()
        return stream

    def settle(self) -> None:
        for worker in (self.prefill, self.decode):
            assert worker.wait_idle(WAIT_S), worker.audit()
        for engine in self.engines:
            assert engine.blocks_free == engine.blocks_total


@contextlib.contextmanager
def serving(
    pool: Pool | None,
    *,
    prefill: PrefillOptions = PREFILL,
    decode: DecodeOptions = DECODE,
    engines: Callable[[], Engine] = oracle,
    **options: object,
) -> Iterator[Serving]:
    """Both workers on `pool`; at the end nothing may be held in them."""
    house = (engines(), engines())
    workers = Serving(
        PrefillWorker(house[0], pool, options=prefill, **options),  # type: ignore[arg-type]
        DecodeWorker(house[1], None, pool, options=decode, **options),  # type: ignore[arg-type]
        house,
    )
    try:
        yield workers
        workers.settle()
    finally:
        workers.prefill.close()
        workers.decode.close()
    assert workers.prefill.audit() == [] and workers.decode.audit() == []


def alone(
    tokens: Sequence[int], max_tokens: int = 10, engine: Engine | None = None, sampling: Sampling | None = None
) -> list[int]:
    """The answer of one process without a pool."""
    engine = engine or oracle()
    worker = DecodeWorker(engine, options=replace(DECODE, chunk_tokens=4096))
    stream = Stream()
    worker.submit(Request("alone", tuple(tokens), max_tokens, sampling or Sampling()), stream)
    answer = stream.wait().tokens
    assert stream.last.error is None, stream.last.error
    worker.close()
    return answer
