"""The protocol: what is packed is unpacked, however the stream is cut; nonsense is a ProtocolError and nothing else."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.errors import ProtocolError
from kvtool.kv.copying import Why
from kvtool.kv.hot import Near
from kvtool.kv.record import Commit, Grant, Granted, Want
from kvtool.kv.retention import Pin, Retention
from kvtool.pool import wire
from kvtool.pool.wire import Op

KEY = bytes(range(32))
WANTS = [Want(KEY, 77, None, None), Want(KEY[::-1], 5, KEY, 2.5, Retention(80, 4.0, Pin.HARD, 2))]


def test_batches_survive_the_way():
    assert wire.unpack_wants(wire.pack_wants(1.5, WANTS)) == (1.5, WANTS)
    assert wire.unpack_lookup(wire.pack_lookup(9, 0.25, [KEY, KEY[::-1]])) == (9, 0.25, [KEY, KEY[::-1]])
    answers = [Granted(Grant.GRANTED, 3, 2**40), Granted(Grant.FULL, 0, 0)]
    assert wire.unpack_grants(wire.pack_grants(answers, "pool full: ü")) == (answers, "pool full: ü")
    assert wire.unpack_commits(wire.pack_commits([(1, 2, 2**63)])) == [(1, 2, 2**63)]
    assert wire.unpack_aborts(wire.pack_aborts(0.5, [(1, 2)])) == (0.5, [(1, 2)])
    assert wire.unpack_touches(wire.pack_touches([(1, 2**60)])) == [(1, 2**60)]
    assert wire.unpack_lease(wire.pack_lease(2**60, [(1, 2)])) == (2**60, [(1, 2)])
    for next_key in (None, KEY[::-1]):
        storing = wire.Storing(3, 2**40, 2**63, WANTS[0], next_key)
        assert wire.unpack_store(wire.pack_store(storing)) == storing
    for spare in (None, answers[0]):
        said = wire.pack_stored(Grant.DUPLICATE, Commit.LAPSED, spare)
        assert wire.unpack_stored(said) == (Grant.DUPLICATE, Commit.LAPSED, spare)
    assert wire.unpack_numbers(wire.pack_numbers([1, 2**60])) == [1, 2**60]
    assert wire.unpack_corrupt(wire.pack_corrupt(KEY, 3, 4)) == (KEY, 3, 4)
    assert wire.unpack_copying(wire.pack_copying(7, Why.MEND)) == (7, Why.MEND)
    near = [Near(0, 3, 1.5), Near(9, 1, 60.0)]
    assert wire.unpack_found(wire.pack_found(2.0, wire.Cut.ABSENT, []) + wire.pack_near(near)).near == near
    assert wire.unpack_found(wire.pack_found(2.0, wire.Cut.ABSENT, []) + wire.pack_near([])).near == []


@pytest.mark.parametrize("seed", range(20))
def test_frames_come_out_whole_however_the_stream_is_cut(seed):
    rng, splitter, found = Random(seed), wire.Splitter(), []
    sent = [(rng.choice(list(Op)), rng.randrange(2**63), rng.randbytes(rng.randrange(200))) for _ in range(30)]
    stream = b"".join(wire.frame(op, request, 7, body) for op, request, body in sent)
    while stream:
        step = rng.randrange(1, 90)
        found += splitter.feed(stream[:step])
        stream = stream[step:]
    assert [(message.op, message.request, message.body) for message in found] == sent
    assert {message.epoch for message in found} == {7}


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (wire.HEAD.pack(2**31, Op.PING, 0, wire.VERSION, 1, 1), "announced a message of 2147483648 bytes"),
        (wire.HEAD.pack(0, Op.PING, 0, 99, 1, 1), "speaks version 99 .* this side 2"),
        (wire.HEAD.pack(0, 200, 0, wire.VERSION, 1, 1), "op 200"),
    ],
)
def test_frames_that_cannot_be_are_refused_before_they_are_read(head, words):
    with pytest.raises(ProtocolError, match=words):
        wire.Splitter().feed(head)


UNPACKERS = [
    wire.unpack_lookup, wire.unpack_wants, wire.unpack_commits, wire.unpack_aborts, wire.unpack_numbers,
    wire.unpack_corrupt, wire.split_keys, wire.unpack_count, wire.unpack_map, wire.unpack_found,
    wire.unpack_grants, wire.unpack_committed, wire.unpack_copying,
    wire.unpack_touches, wire.unpack_lease, wire.unpack_store, wire.unpack_stored,
]  # fmt: skip
PACKED = [
    wire.pack_lookup(9, 0.25, [KEY, KEY[::-1]]), wire.pack_wants(1.5, WANTS), wire.pack_commits([(1, 2, 2**63)]),
    wire.pack_aborts(0.5, [(1, 2)]), wire.pack_numbers([1, 2**60]), wire.pack_corrupt(KEY, 3, 4), wire.pack_count(7),
    wire.pack_map({"nonce": KEY[:16], "dead": [1, {"a": None}]}),
    wire.pack_grants([Granted(Grant.GRANTED, 3, 2**40)], "why"),
    wire.pack_found(10.0, wire.Cut.FULL, []) + bytes(28), bytes([0, 1, 1, 0]),
    wire.pack_found(10.0, wire.Cut.FULL, []) + wire.pack_near([Near(1, 2, 3.0)]), wire.pack_copying(3, Why.NEAR),
]  # fmt: skip


@st.composite
def nearly_right(draw):
    """A message of ours with some bytes changed, cut off or added: what random bytes alone would never come to."""
    body = bytearray(draw(st.sampled_from(PACKED)))
    for _ in range(draw(st.integers(0, 4))):
        if body:
            body[draw(st.integers(0, len(body) - 1))] = draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xDD, 0xFF]))
    return bytes(body[: draw(st.integers(0, len(body)))]) + draw(st.binary(max_size=40))


def numbers_in(value) -> list[float]:
    if isinstance(value, float):
        return [value]
    if isinstance(value, tuple | list):
        return [number for item in value for number in numbers_in(item)]
    if isinstance(value, Want | wire.Found):
        return numbers_in(list(vars(value).values()))
    return []


@pytest.mark.parametrize("unpack", UNPACKERS, ids=lambda unpack: unpack.__name__)
@settings(max_examples=150, deadline=None)
@given(body=nearly_right() | st.binary(max_size=300))
def test_nonsense_is_a_protocol_error_and_nothing_else(unpack, body):
    try:
        value = unpack(body)
    except ProtocolError:
        return
    if unpack is not wire.unpack_map:  # which checks no values
        assert all(math.isfinite(number) and number >= 0 for number in numbers_in(value))


@settings(max_examples=300, deadline=None)
@given(
    stream=st.lists(
        st.binary(max_size=60)
        | st.builds(lambda op, body: wire.frame(op, 1, 7, body), st.sampled_from(list(Op)), st.binary(max_size=60))
        | st.builds(
            wire.HEAD.pack,
            st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 3), st.integers(0, 2),
            st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1),
        ),
        max_size=6,
    ),
    cuts=st.lists(st.integers(1, 80), min_size=1, max_size=8),
)  # fmt: skip
def test_a_stream_of_nonsense_is_a_protocol_error_and_is_not_hoarded(stream, cuts):
    data, splitter, at = b"".join(stream), wire.Splitter(), 0
    try:
        for step in itertools.cycle(cuts):
            if at >= len(data):
                break
            splitter.feed(data[at : at + step])
            at += step
            assert len(splitter._rest) <= min(len(data), wire.FRAME_MAX + wire.HEAD.size)
    except ProtocolError:
        pass


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -0.5, -2.0])
def test_seconds_that_are_no_time_are_refused_wherever_they_come_in(seconds):
    for unpack, body in (
        (wire.unpack_wants, wire.pack_wants(1.0, [Want(KEY, 5, None, seconds)])),
        (wire.unpack_aborts, wire.pack_aborts(seconds, [(1, 2)])),
        (wire.unpack_found, wire.pack_found(seconds, wire.Cut.ABSENT, [])),
    ):
        with pytest.raises(ProtocolError, match="where a number of seconds, 0 or more, was expected"):
            unpack(body)


@pytest.mark.parametrize(("budget_s", "sent_s"), [(math.nan, 0.0), (math.inf, 3600.0), (-1.0, 0.0), (1e300, 3600.0)])
def test_odd_budgets_are_sent_as_the_nearest_wait_that_there_is(budget_s, sent_s):
    assert wire.unpack_lookup(wire.pack_lookup(1, budget_s, []))[1] == sent_s
    assert wire.unpack_wants(wire.pack_wants(budget_s, []))[0] == sent_s


def test_nested_lists_that_announce_more_than_there_is_cost_no_memory():
    bomb = b"\x81\xa1a" + b"\xdd\x00\x0f\xff\xff" * 200_000
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            wire.unpack_map(bomb[: wire.MAP_MAX])
        with pytest.raises(ProtocolError, match="at most"):
            wire.unpack_map(bytes(wire.MAP_MAX + 1))
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.frame(Op.MATCH, 1, 1, bytes(wire.FRAME_MAX + 1))
