"""What crosses the servers as text comes back as it was: requests, errors, and answers that are gone on with."""

import json
from random import Random

import pytest

from kvtool.errors import EngineRefused, KvtoolError, Overloaded, ProtocolError, RequestRefused, Unavailable
from kvtool.serve.request import Event, Finish, Usage
from kvtool.triton import wire
from kvtool.triton.peers import Peer, Peers, PeersFile
from kvtool.triton.resume import Resume
from kvtool.triton.wire import Ask


def test_an_ask_survives_the_wire_and_becomes_the_workers_request():
    ask = Ask("r~0", 5, temperature=0.5, top_k=3, stop=("a", "ü"), deadline_s=1.5, ignore_eos=True)
    assert Ask.from_json(ask.to_json()) == ask
    request = ask.request((1, 2))
    assert (request.tokens, request.stop, request.sampling.top_k, request.deadline_s) == ((1, 2), ("a", "ü"), 3, 1.5)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"max_tokens": 1, "request_id": "r", "colour": 1}', "null"])
def test_a_request_that_is_none_is_refused(text):
    with pytest.raises(RequestRefused, match="REQUEST: "):
        Ask.from_json(text)


@pytest.mark.parametrize(
    "error",
    [RequestRefused("no: good"), Unavailable("gone"), Overloaded("full", 2.5), EngineRefused("odd"), KvtoolError("x")],
)
def test_an_error_is_raised_again_on_the_far_side(error):
    told = wire.error_from_text(f"in ensemble 'prefill', {wire.error_text(error)}")
    assert type(told) is type(error) and str(told).startswith(str(error))
    assert getattr(told, "retry_after_s", None) == getattr(error, "retry_after_s", None)
    again = wire.error_from_fields(json.loads(json.dumps(wire.error_fields(error))))
    assert (type(again), str(again)) == (type(error), str(error))


def test_a_dead_stub_is_unavailable_whatever_triton_says_around_it():
    told = wire.error_from_text("in ensemble 'decode', Stub process 'decode_engine_0_0' is not healthy.")
    assert type(told) is Unavailable


def test_the_last_event_carries_finish_usage_and_error():
    event = Event("r", 3, (7,), (5, 6), 2, Finish.ERROR, Usage(prompt_tokens=4), Unavailable("gone"))
    step = wire.step((7,), "x", wire.event_json(event))
    assert (step.finish, step.usage["prompt_tokens"], type(step.error)) == ("error", 4, Unavailable)


@pytest.mark.parametrize("seed", range(100))
def test_whatever_dies_when_the_client_gets_each_token_and_character_once(seed):
    """Attempts that end at random points and cut the same answer into other steps."""
    rng, resume = Random(seed), Resume()
    tokens = [rng.randrange(9) for _ in range(12)]
    got_tokens, got_text = [], ""
    while got_tokens != tokens:
        resume.restart()
        at, end = 0, rng.randrange(1, len(tokens) + 1)
        while at < end:
            size = min(rng.randrange(1, 4), end - at)
            step = tuple(tokens[at : at + size])
            new_tokens, new_text = resume.take(step, "".join(f"<{token}>" for token in step))
            got_tokens += new_tokens
            got_text += new_text
            at += size
    assert got_text == "".join(f"<{token}>" for token in tokens)


def test_text_that_differs_after_a_restart_ends_the_answer():
    resume = Resume()
    resume.take((1, 2), "ab")
    resume.restart()
    with pytest.raises(ProtocolError, match="its text differs"):
        resume.take((1, 2), "aX")


def test_the_address_file_is_read_again_when_it_changed(tmp_path):
    path = tmp_path / "peers.json"
    file = PeersFile(path)
    with pytest.raises(Unavailable, match=r"cannot be read from .*peers.json"):
        file.read()
    for epoch in range(5):
        written = Peers((Peer("decode-0", "decode", "127.0.0.1:1", epoch),), pool_up=bool(epoch % 2))
        written.write(path)
        assert file.read() == written
    assert path.stat().st_mode & 0o777 == 0o600
