"""What every kind of pool does alike: one body of tests, over each of them, against a plain dictionary."""

from __future__ import annotations

import asyncio
import inspect
import itertools

import numpy as np
import pytest
from blocks import KEYS, LAYOUT, payload, puts, room_for
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.pool.aio import AsyncPoolClient
from kvtool.pool.base import Cancel, Outcome, Put, Tier
from kvtool.pool.client import PoolClient
from kvtool.pool.embedded import EmbeddedPool

SIZE = LAYOUT.block_size


TAGS = itertools.count(1)


def fresh(count: int) -> list[bytes]:
    """Keys that no other test has."""
    tag = next(TAGS)
    return [tag.to_bytes(4, "big") + key[4:] for key in KEYS[:count]]


def room(count: int = 1) -> list[bytearray]:
    return [bytearray(SIZE) for _ in range(count)]


class Driven:
    """An `AsyncPoolClient` whose every call is run to its end on a loop of its own."""

    def __init__(self, state_file):
        self.loop = asyncio.new_event_loop()
        self.client = AsyncPoolClient(state_file, LAYOUT, client_name="shared")

    def __getattr__(self, name):
        method = getattr(self.client, name)
        if not inspect.iscoroutinefunction(method):
            return method
        return lambda *args, **named: self.loop.run_until_complete(method(*args, **named))

    def close(self):
        self.loop.run_until_complete(self.client.close())


def make(kind, request):
    if kind == "embedded":
        return EmbeddedPool(LAYOUT, room_for(64))
    state_file = request.getfixturevalue("pool").state_file
    return PoolClient(state_file, LAYOUT, client_name="shared") if kind == "client" else Driven(state_file)


REAL = pytest.mark.real
KINDS = ["embedded", pytest.param("client", marks=REAL), pytest.param("async", marks=REAL)]


@pytest.fixture(params=KINDS)
def any_pool(request):
    made = make(request.param, request)
    yield made
    made.close()
    if isinstance(made, Driven):
        made.loop.close()


def test_blocks_come_into_the_buffers_of_the_caller(any_pool):
    keys, buffers = fresh(8), room(8)
    assert {r.outcome for r in any_pool.put_from(keys[:6], [payload(key) for key in keys[:6]])} == {Outcome.STORED}
    result = any_pool.get_into(keys, buffers)
    assert result.count == result.hits == 6
    assert [bytes(buffer) for buffer in buffers[:6]] == [payload(key) for key in keys[:6]]
    assert [got.reason for got in result.blocks[6:]] == ["absent", "absent"]
    assert {(got.size, got.tier) for got in result.blocks[:6]} == {(SIZE, Tier.DRAM)}
    assert any_pool.exists(keys) == [True] * 6 + [False] * 2


def test_each_key_on_its_own(any_pool):
    keys = fresh(6)
    any_pool.write(puts(keys))
    assert any_pool.delete(keys[1:5:3]) == 2
    assert any_pool.match(keys) == 1
    assert any_pool.exists(keys) == [True, False, True, True, False, True]
    buffers = room(6)
    assert any_pool.get_into(keys, buffers).count == 1
    result = any_pool.get_into(keys, buffers, leading=False)
    assert [got.hit for got in result.blocks] == [True, False, True, True, False, True]
    assert result.count == 1 and result.hits == 4
    assert all(bytes(buffers[at]) == payload(keys[at]) for at in (0, 2, 3, 5))
    assert any_pool.delete(keys) == 4 and any_pool.exists(keys) == [False] * 6


def test_numpy_and_torch_buffers_are_buffers(any_pool):
    torch = pytest.importorskip("torch")
    keys = fresh(2)
    stored = (
        np.frombuffer(payload(keys[0]), np.float16),
        torch.frombuffer(bytearray(payload(keys[1])), dtype=torch.bfloat16),
    )
    any_pool.put_from(keys, stored)
    found = np.zeros(SIZE // 4, np.float32), torch.zeros(SIZE // 2, dtype=torch.bfloat16).reshape(2, -1)
    assert any_pool.get_into(keys, found).count == 2
    assert found[0].tobytes() == payload(keys[0])
    assert bytes(found[1].view(torch.uint8).flatten().tolist()) == payload(keys[1])


def test_a_buffer_that_is_no_room_for_its_block_is_a_miss_of_that_block_alone(any_pool):
    keys = fresh(4)
    any_pool.write(puts(keys))
    buffers = [*room(1), bytearray(10), *room(2)]
    result = any_pool.get_into(keys, buffers, leading=False)
    assert [got.reason for got in result.blocks] == ["", "too_small", "", ""]
    assert any_pool.get_into(keys, buffers).count == 1


def test_what_is_no_buffer_is_refused_with_the_words(any_pool):
    with pytest.raises(ValueError, match="read-only"):
        any_pool.get_into(KEYS[:1], [b"fixed"])
    with pytest.raises(ValueError, match="one buffer for each of 2 keys, got 1"):
        any_pool.get_into(KEYS[:2], room())
    with pytest.raises(TypeError):
        any_pool.get_into(KEYS[:1], [3])
    with pytest.raises(ValueError, match="contiguous"):
        any_pool.put_from(KEYS[:1], [np.zeros(64)[::2]])


def test_what_is_no_key_is_refused_before_anything_is_sent(any_pool):
    with pytest.raises(ValueError, match="32 bytes, found one of 5"):
        any_pool.put_from([KEYS[0], b"short"], room(2))
    assert any_pool.exists(KEYS[:1]) in ([True], [False])


def test_a_put_without_bytes_is_refused_and_holds_nothing(any_pool):
    (key,) = fresh(1)
    with pytest.raises(ValueError, match="found neither"):
        any_pool.write([Put(key, SIZE, None)])
    assert any_pool.put_from([key], [payload(key)])[0].outcome is Outcome.STORED


def test_a_call_that_is_cancelled_misses_with_that_reason(any_pool):
    keys, cancel = fresh(3), Cancel()
    any_pool.write(puts(keys))
    cancel.set()
    assert [got.reason for got in any_pool.get_into(keys, room(3), cancel=cancel).blocks] == ["cancelled"] * 3
    with any_pool.read(keys, cancel=cancel) as read:
        assert not read.blocks
    assert {r.reason for r in any_pool.write(puts(fresh(2)), cancel=cancel)} == {"cancelled"}
    assert any_pool.counts().misses["cancelled"] == 6


def test_every_block_asked_for_is_counted_once(any_pool):
    keys = fresh(10)
    any_pool.write(puts(keys[:4]))
    before = any_pool.counts()
    any_pool.get_into(keys, room(10))
    any_pool.get_into(keys, room(10), leading=False)
    any_pool.read(keys).release()
    counts = any_pool.counts()
    assert counts.blocks_asked - before.blocks_asked == 30
    assert counts.hits["dram"] - before.hits.get("dram", 0) == 12
    assert counts.blocks_asked == sum(counts.hits.values()) + sum(counts.misses.values())
    assert counts.tokens_asked == counts.blocks_asked * LAYOUT.block_tokens
    assert 0 < counts.hit_rate < 1


def test_after_close_everything_is_a_miss(any_pool):
    keys = fresh(2)
    any_pool.write(puts(keys))
    any_pool.close()
    any_pool.close()
    assert any_pool.match(keys) == 0 and any_pool.exists(keys) == [False, False]
    assert any_pool.get_into(keys, room(2)).count == 0
    assert any_pool.write(puts(fresh(1)))[0].outcome in (Outcome.REFUSED, Outcome.FAILED)
    assert any_pool.drop(keys) == any_pool.delete(keys) == 0


def test_a_get_of_far_more_than_memory_goes_on_through_the_files(tmp_path):
    with EmbeddedPool(LAYOUT, room_for(12), 4 * 2**20, tmp_path) as pool:
        assert {r.outcome for r in pool.write(puts(KEYS[:150]), 20)} == {Outcome.STORED}
        buffers = room(150)
        for leading in (True, False):
            result = pool.get_into(KEYS[:150], buffers, 20, leading=leading)
            assert result.count == 150 == result.hits, result.blocks[result.count]
            assert [bytes(buffer) for buffer in buffers] == [payload(key) for key in KEYS[:150]]


CALL = st.tuples(st.sampled_from(["put", "get", "pick", "match", "exists", "delete"]), st.sets(st.integers(0, 9)))


def test_any_sequence_of_calls_agrees_with_a_dictionary(any_pool):
    made = any_pool

    @settings(max_examples=25, deadline=None, database=None)
    @given(st.lists(CALL, max_size=12))
    def agree(calls):
        keys = fresh(10)
        there: set[int] = set()
        for call, at in calls:
            chosen = sorted(at)
            names = [keys[n] for n in chosen]
            run = next((i for i, n in enumerate(chosen) if n not in there), len(chosen))
            buffers = room(len(names))
            if call == "put":
                outcomes = [r.outcome for r in made.put_from(names, [payload(k) for k in names], chained=False)]
                assert outcomes == [Outcome.DUPLICATE if n in there else Outcome.STORED for n in chosen]
                there |= at
            elif call == "delete":
                assert made.delete(names) == len(there & at)
                there -= at
            elif call == "match":
                assert made.match(names) == run
            elif call == "exists":
                assert made.exists(names) == [n in there for n in chosen]
            else:
                result = made.get_into(names, buffers, leading=call == "get")
                whole = [i for i, got in enumerate(result.blocks) if got.hit]
                assert result.count == run
                assert whole == (list(range(run)) if call == "get" else [i for i, n in enumerate(chosen) if n in there])
                assert all(bytes(buffers[i]) == payload(names[i]) for i in whole)
        made.delete(keys)

    agree()
