"""A pool that stalls, dies, lapses, refuses, lies: every request is answered, in time, with the right tokens."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from random import Random

import pytest
from serving import BLOCK, DECODE, LAYOUT, POOL, PREFILL, Stream, alone, embedded, oracle, prompt, serving

from kvtool.clock import WoundClock
from kvtool.engine.oracle import OracleEngine
from kvtool.kv.layout import KVLayout
from kvtool.pool.base import Outcome, PoolCounts, PutResult
from kvtool.pool.embedded import EmbeddedPool
from kvtool.serve.request import Finish, Request

QUICK = replace(POOL, match_budget_s=0.03, fetch_budget_s=0.03, put_budget_s=0.03, breaker_rest_s=60.0)
QUICK_PREFILL, QUICK_DECODE = replace(PREFILL, pool=QUICK), replace(DECODE, pool=QUICK)


class Faulty:
    """A real pool with one fault switched on. Stalls last for the budget that was given, as the contract has it, or
    until `let_go` where even that is broken."""

    def __init__(self, pool: EmbeddedPool, fault: str) -> None:
        self.pool, self.fault = pool, fault
        self.let_go = threading.Event()
        self.calls: list[str] = []

    def alive(self):
        return self.fault != "dead"

    def counts(self):
        return PoolCounts()

    def match(self, keys, budget_s=0.5):
        self.calls.append("match")
        if self.fault == "stalls":
            self.let_go.wait(budget_s)
            return 0
        if self.fault == "raises":
            raise ConnectionResetError("rank 1 is gone")
        if self.fault == "match overstates":
            return len(keys)
        return self.pool.match(keys, budget_s)

    def read(self, keys, budget_s=2.0):
        self.calls.append("read")
        if self.fault == "stalls":
            self.let_go.wait(budget_s)
            return self.pool.read([])
        if self.fault == "hangs":
            assert self.let_go.wait(30)
        if self.fault in ("raises", "dies at read"):
            raise ConnectionResetError("rank 1 is gone")
        if self.fault == "shuffles":
            keys = [*keys[1::-1], *keys[2:]]
        read = self.pool.read(keys, budget_s)
        return DyingRead(read, self.fault) if self.fault in ("dies mid-read", "none whole") else read

    def write(self, blocks, budget_s=2.0):
        self.calls.append("write")
        if self.fault == "stalls":
            self.let_go.wait(budget_s)
            return [PutResult(Outcome.FAILED, reason="timeout")] * len(blocks)
        if self.fault == "refuses":
            return [PutResult(Outcome.REFUSED, reason="full")] * len(blocks)
        if self.fault == "raises":
            raise ConnectionResetError("rank 1 is gone")
        if self.fault == "every other put fails":
            results = self.pool.write(blocks[::2], budget_s)
            failed = PutResult(Outcome.FAILED, reason="rank 1 is gone")
            return [results[at // 2] if at % 2 == 0 else failed for at in range(len(blocks))]
        return self.pool.write(blocks, budget_s)

    def drop(self, keys, budget_s=0.5):
        if self.fault == "raises":
            raise ConnectionResetError("rank 1 is gone")
        return self.pool.drop(keys, budget_s)

    def close(self):
        self.pool.close()


class DyingRead:
    """A read whose rank dies while its blocks are imported: what is behind `whole` is overwritten in the reader."""

    def __init__(self, read, fault):
        self.read, self.fault = read, fault
        self.blocks = read.blocks

    def whole(self):
        return 0 if self.fault == "none whole" else self.read.whole() // 2

    def release(self):
        self.read.release()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.release()
        if self.fault == "dies mid-read":
            raise ConnectionResetError("rank 1 is gone")


def leases(pool):
    """What is held, but for trailing blocks that were put and never fetched: those end by their own clock."""
    return [holding for holding in pool.audit() if holding.kind != "transient"]


FAULTS = [
    "dead",
    "stalls",
    "raises",
    "match overstates",
    "dies at read",
    "dies mid-read",
    "none whole",
    "shuffles",
    "refuses",
    "every other put fails",
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore")
def test_answers_are_right_whatever_the_pool_does(fault):
    prompts = [prompt(count, count) for count in (1, 9, 31, 100)]
    pool = embedded()
    with serving(pool) as house:  # something to hit, while all is well
        for tokens in prompts[2:]:
            house.ask(tokens)
    faulty = Faulty(pool, fault)
    with serving(faulty, prefill=QUICK_PREFILL, decode=QUICK_DECODE) as house:
        for tokens in prompts * 2:
            assert house.ask(tokens).tokens == alone(tokens)
    assert leases(pool) == []
    pool.close()


class Chaotic(Faulty):
    """Another fault, or none, at every call."""

    def __init__(self, pool: EmbeddedPool, seed: int) -> None:
        self.random = Random(seed)
        super().__init__(pool, "")

    @property
    def fault(self):
        return self.random.choice([*FAULTS, "", "", "", "", "", ""])

    @fault.setter
    def fault(self, value):
        assert value == ""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("ignore")
def test_concurrent_requests_in_chaos_all_get_their_own_right_answer(seed):
    """Every call to the pool may fail in its own way, blocks are evicted, two tenants share prompts."""
    random = Random(seed)
    prompts = [(*prompt(random.randrange(3), 8 * random.randrange(1, 9)), *prompt(i, i % 11 + 1)) for i in range(12)]
    expected = {tokens: alone(tokens, 12) for tokens in set(prompts)}
    pool = embedded(40)
    chaos = Chaotic(pool, seed)
    quick = replace(QUICK, breaker_rest_s=0.01)
    with serving(
        chaos,
        prefill=replace(PREFILL, pool=quick, staging_blocks_max=8),
        decode=replace(DECODE, pool=quick, staging_blocks_max=8),
        engines=lambda: oracle(60),
    ) as house:
        streams = []
        for number, tokens in enumerate(prompts * 3):
            request = Request(f"c{number}", tokens, 12, salt=f"tenant-{number % 2}")
            stream = Stream()
            streams.append((tokens, stream))

            def then(done, request=request, stream=stream):
                assert done.error is None
                house.decode.submit(request, stream, done.handoff)

            house.prefill.submit(request, then)
        for tokens, stream in streams:
            assert stream.wait().tokens == expected[tokens]
            assert stream.last.finish is Finish.LENGTH
    assert leases(pool) == []
    pool.close()


def test_a_read_that_never_returns_is_given_up_and_touches_nothing_later():
    tokens, pool = prompt(1, 100), embedded()
    expected = alone(tokens)
    with serving(pool) as house:
        house.ask(tokens)
    faulty = Faulty(pool, "hangs")
    with serving(faulty, prefill=QUICK_PREFILL, decode=QUICK_DECODE) as house:
        request = Request("h", tokens, 10)
        stream = house.decoded(request)
        assert stream.tokens == expected
        assert "pull" in [held.what for held in house.decode.audit()], "audited while it hangs"
        faulty.let_go.set()
        house.settle()
        assert house.decode.status()["pool"]["pulls_abandoned"] == 1
    assert leases(pool) == []
    pool.close()


def test_blocks_that_are_being_imported_are_not_given_to_others():
    """A cancel, even past the fetch's budget, waits for an import that has begun: its memory is still written to."""
    clock, pool, tokens = WoundClock(), embedded(), prompt(1, 6 * BLOCK)
    importing, go_on = threading.Event(), threading.Event()

    class Held(OracleEngine):
        def import_block(self, sequence, index, data):
            importing.set()
            assert go_on.wait(30)
            super().import_block(sequence, index, data)

    with serving(pool) as house:
        house.ask(tokens)
    with serving(pool, engines=lambda: Held(LAYOUT, blocks=8), clock=clock) as house:
        stream = Stream()
        house.decode.submit(Request("held", tokens, 4), stream)
        assert importing.wait(30)
        clock.wind(100.0)
        assert house.decode.cancel("held")
        assert not stream.ended.wait(0.1)
        assert house.engines[1].blocks_free == 1
        go_on.set()
        assert stream.wait().last.finish is Finish.CANCELLED
    pool.close()


def test_a_pool_that_comes_for_bytes_after_its_put_ended_gets_none():
    class Late(Faulty):
        def write(self, blocks, budget_s=2.0):
            self.late = [*getattr(self, "late", []), *blocks]
            return [PutResult(Outcome.FAILED, reason="timeout")] * len(blocks)

    pool = Late(embedded(), "")
    with serving(pool) as house:
        house.ask(prompt(1, 40))
    assert pool.late
    for put in pool.late:
        with pytest.raises(RuntimeError, match="after its put had ended"):
            put.fill(memoryview(bytearray(put.size)))
    pool.close()


def test_a_stalling_pool_is_left_alone_after_three_waits():
    pool = Faulty(embedded(), "stalls")
    with serving(pool, prefill=QUICK_PREFILL, decode=replace(QUICK_DECODE, canonicalise=False)) as house:
        for seed in range(8):
            house.ask(prompt(seed, 40), 2)
        assert house.prefill.status()["pool"]["breaker_opened"] == 1
        assert len(pool.calls) <= 2 * POOL.breaker_failures + 2  # each worker has its own breaker
    pool.close()


def test_leases_that_lapse_during_the_import_cost_the_blocks_and_no_answer():
    """The reader's clock passes the lease's term mid-import and other prompts take the slots: a real lapse."""
    clock, tokens = WoundClock(), prompt(1, 12 * BLOCK)
    expected, pool = alone(tokens), embedded(14, clock=clock, lease_term_s=5.0)

    class Slow(OracleEngine):
        imported = 0

        def import_block(self, sequence, index, data):
            if Slow.imported == 5:
                clock.wind(6.0)
                with serving(pool, clock=clock) as other:
                    other.ask(prompt(2, 13 * BLOCK), 2)
            Slow.imported += 1
            super().import_block(sequence, index, data)

    with serving(pool, clock=clock) as house:
        house.ask(tokens)
    calls = []
    with serving(pool, engines=lambda: Slow(LAYOUT, blocks=64), clock=clock) as house:
        stream = house.decoded(Request("slow", tokens, 10))
        calls.append(Slow.imported)
        assert stream.tokens == expected
        assert sum(stream.last.usage.hit_tokens.values()) < 12 * BLOCK
    assert calls[0] > 5, "the lapse never came"
    assert leases(pool) == []
    pool.close()


def test_a_pool_smaller_than_a_prompt_is_of_some_use_and_no_harm():
    pool = embedded(5)
    with serving(pool) as house:
        for seed in range(3):
            tokens = prompt(seed, 12 * BLOCK + 3)
            for _ in range(2):
                assert house.ask(tokens).tokens == alone(tokens)
    assert leases(pool) == []
    pool.close()


def test_little_staging_room_is_waited_for_while_the_pool_takes_blocks():
    tokens, pool = prompt(1, 12 * BLOCK + 4), embedded()
    with serving(pool, prefill=replace(PREFILL, staging_blocks_max=2)) as house:
        done = house.prefilled(Request("s", tokens, 4))
        assert (done.handoff.blocks, done.handoff.tail) == (12, 4)
    pool.close()


def test_a_put_that_hangs_ends_the_handoff_after_its_budget():
    tokens, pool = prompt(1, 12 * BLOCK + 4), Faulty(embedded(), "")
    write = pool.write

    def hang(blocks, budget_s=2.0):
        assert pool.let_go.wait(30)
        return write(blocks, budget_s)

    pool.write = hang
    with serving(pool, prefill=replace(QUICK_PREFILL, staging_blocks_max=2)) as house:
        done = house.prefilled(Request("s", tokens, 4))
        assert done.error is None and done.handoff.blocks == 0
        assert house.engines[0].blocks_free == house.engines[0].blocks_total, "no KV memory waits for the pool"
        assert house.decoded(Request("s", tokens, 4), done.handoff).tokens == alone(tokens, 4)
        pool.let_go.set()
    pool.close()


def test_fetching_stops_where_recomputing_is_measured_to_be_faster():
    """A slow pool and an engine that is quick: after a sample of both, blocks are computed, and still probed."""

    class SlowPool(Faulty):
        def read(self, keys, budget_s=2.0):
            self.calls.append("read")
            time.sleep(0.01)  # the pool's own slowness is what is measured here
            return self.pool.read(keys, budget_s)

    layout = KVLayout(layers=3, kv_heads=2, head_dim=4, block_tokens=8)
    pool = SlowPool(EmbeddedPool(layout, 1 << 22), "")
    eager = replace(DECODE, canonicalise=False, pool=replace(POOL, recompute_if_faster=True))
    tokens = prompt(1, 20 * BLOCK)
    with serving(pool) as house:
        house.ask(tokens, 1)
    pool.calls.clear()
    with serving(pool, decode=eager, engines=oracle) as house:
        house.decoded(Request("warm up", prompt(2, 40 * BLOCK), 1))
        for number in range(12):
            assert house.decoded(Request(f"f{number}", tokens, 1)).tokens == alone(tokens, 1)
        assert 1 <= pool.calls.count("read") <= 4
    pool.close()
