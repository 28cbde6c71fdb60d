"""The protocol: what is packed is unpacked, however the stream is cut; nonsense is a ProtocolError and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from kvtool.errors import ProtocolError
from kvtool.kv.record import Grant, Granted, Want
from kvtool.pool import wire
from kvtool.pool.wire import Op

KEY = bytes(range(32))
WANTS = [Want(KEY, 77, None, None), Want(KEY[::-1], 5, KEY, 2.5)]


def test_batches_survive_the_way():
    assert wire.unpack_wants(wire.pack_wants(1.5, WANTS)) == (1.5, WANTS)
    assert wire.unpack_lookup(wire.pack_lookup(9, 0.25, [KEY, KEY[::-1]])) == (9, 0.25, [KEY, KEY[::-1]])
    answers = [Granted(Grant.GRANTED, 3, 2**40), Granted(Grant.FULL, 0, 0)]
    assert wire.unpack_grants(wire.pack_grants(answers, "pool full: ü")) == (answers, "pool full: ü")
    assert wire.unpack_commits(wire.pack_commits([(1, 2, 2**63)])) == [(1, 2, 2**63)]
    assert wire.unpack_aborts(wire.pack_aborts(0.5, [(1, 2)])) == (0.5, [(1, 2)])
    assert wire.unpack_numbers(wire.pack_numbers([1, 2**60])) == [1, 2**60]
    assert wire.unpack_corrupt(wire.pack_corrupt(KEY, 3, 4)) == (KEY, 3, 4)


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
        (wire.HEAD.pack(0, Op.PING, 0, 99, 1, 1), "speaks version 99 .* this side 1"),
        (wire.HEAD.pack(0, 200, 0, wire.VERSION, 1, 1), "op 200"),
    ],
)
def test_frames_that_cannot_be_are_refused_before_they_are_read(head, words):
    with pytest.raises(ProtocolError, match=words):
        wire.Splitter().feed(head)


@pytest.mark.parametrize("seed", range(30))
def test_nonsense_is_a_protocol_error_and_nothing_else(seed):
    rng = Random(seed)
    unpackers = [
        wire.unpack_lookup, wire.unpack_wants, wire.unpack_commits, wire.unpack_aborts, wire.unpack_numbers,
        wire.unpack_corrupt, wire.split_keys, wire.unpack_count, wire.unpack_map, wire.unpack_found, wire.unpack_grants,
        wire.unpack_committed,
    ]  # fmt: skip
    for unpack in unpackers:
        for size in (0, 1, 8, 16, 40, rng.randrange(300)):
            try:
                unpack(rng.randbytes(size))
            except ProtocolError:
                pass


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.frame(Op.MATCH, 1, 1, bytes(wire.FRAME_MAX + 1))
