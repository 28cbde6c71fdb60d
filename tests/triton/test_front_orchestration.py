"""The front over fake instances that keep promises: they answer deterministically, fail when told to, and record."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvtool.errors import Cancelled, DeadlinePassed, Overloaded, ProtocolError, RequestRefused, Unavailable
from kvtool.serve.turns import BATCH_PRIORITY
from kvtool.triton import giveway
from kvtool.triton.asked import Asked, Limits
from kvtool.triton.front import Front
from kvtool.triton.giveway import HOLD_S
from kvtool.triton.peers import Peer, Peers, PeersFile
from kvtool.triton.stages import SERVERS_LOST_MAX
from kvtool.triton.wire import Step

LIMITS = Limits(max_tokens_default=6, max_tokens_max=100, deadline_s=20.0, concurrent_max=3)
ANSWER = (11, 12, 13, 14, 15, 16)


@dataclass
class Sink:
    """A client: what it got, and whether it has gone away."""

    gone: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    got: queue.SimpleQueue[int] = field(default_factory=queue.SimpleQueue)

    def step(self, step):
        assert not self.ended.is_set(), "a step after the end"
        self.tokens += step.tokens
        self.text += step.text
        self.got.put(len(self.tokens))
        if step.finish:
            self.usage = step.usage
            self.ended.set()

    def fail(self, error):
        assert not self.ended.is_set(), "a second end"
        self.error = error
        self.ended.set()

    def cancelled(self):
        return self.gone

    def wait(self):
        assert self.ended.wait(10), f"no end: {self}"
        return self


class Cluster:
    """Instances of both roles. `dies_after[(name, epoch)]`: steps until the stream fails; `silent`: until released."""

    def __init__(self, file):
        self.file, self.instances, self.pool_up = file, [], True
        self.calls, self.cancelled, self.told = [], [], threading.Event()
        self.dies_after: dict[tuple[str, int], int] = {}
        self.answers: dict[int, tuple[int, ...]] = {}
        self.overloaded: set[str] = set()
        self.hold = None
        self.holds: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()
        self.on_death = lambda peer: None
        for role in ("prefill", "decode"):
            self.add(f"{role}-0")

    def add(self, name, epoch=1):
        self.instances = [peer for peer in self.instances if peer.name != name]
        self.instances.append(Peer(name, name.partition("-")[0], "127.0.0.1:1", epoch))
        self.write()

    def remove(self, name):
        self.instances = [peer for peer in self.instances if peer.name != name]
        self.write()

    def write(self):
        Peers(tuple(self.instances), self.pool_up).write(self.file)

    def _check(self, peer, steps=0):
        if peer.name in self.overloaded:
            raise Overloaded(f"{peer.name} is full", retry_after_s=2.5)
        if self.dies_after.get(peer.identity, 1 << 30) <= steps:
            self.on_death(peer)
            raise Unavailable(f"{peer.name} died")

    async def prefill(self, peer, text, ask, timeout_s):
        self.calls.append(("prefill", peer.name, peer.epoch))
        self._check(peer)
        return tuple(text), "handoff", {"put_blocks": 2, "path_bytes": {}}

    async def tokenize(self, peer, text, ask, timeout_s):
        self.calls.append(("tokenize", peer.name, peer.epoch))
        self._check(peer)
        return tuple(text)

    async def decode(self, peer, tokens, ask, handoff, timeout_s):
        self.calls.append(("decode", peer.name, peer.epoch))
        answer = self.answers.get(peer.epoch, ANSWER)[: ask.max_tokens]
        for at, token in enumerate(answer):
            self._check(peer, at)
            if self.hold is not None and at == 2:
                await self.hold.wait()
            last = at == len(answer) - 1
            usage = {"prompt_tokens": len(tokens), "completion_tokens": len(answer), "computed_tokens": len(tokens)}
            yield Step((token,), f"<{token}>", "length" if last else "", usage if last else {})
            await asyncio.sleep(0)

    async def operate(self, peer, op, timeout_s):
        if op["op"] == "hold":
            self.holds.put((peer.name, op["seconds"]))
            return "{}"
        self.cancelled.append((peer.name, op["request_id"]))
        self.told.set()
        return "{}"

    async def close(self):
        pass


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path / "peers.json")


@pytest.fixture
def front(cluster):
    made = Front(PeersFile(cluster.file), LIMITS, cluster)
    yield made
    made.close()


def _ask(front, **asked):
    sink = Sink()
    front.submit(Asked(**{"text": b"hi", **asked}), sink)
    return sink


def _hold(front, cluster):
    """Answers stop after two tokens, until the event is set (in the front's loop)."""
    cluster.hold = asyncio.run_coroutine_threadsafe(_event(), front._loop).result(5)


async def _event():
    return asyncio.Event()


def _settled(front):
    """The status, once nothing is in flight."""
    status = Sink()
    for _ in range(200):
        status = Sink()
        front.operate("status", "", status)
        status.wait()
        if not status.usage["in_flight"]:
            return status.usage
        threading.Event().wait(0.01)
    raise AssertionError(f"still in flight: {status.usage}")


def test_an_answer_goes_over_prefill_and_decode_and_says_so(front, cluster):
    sink = _ask(front, request_id="r1").wait()
    assert sink.error is None and tuple(sink.tokens) == ANSWER and sink.text == "<11><12><13><14><15><16>"
    assert [call[:2] for call in cluster.calls] == [("prefill", "prefill-0"), ("decode", "decode-0")]
    usage = sink.usage
    assert usage["request_id"] == "r1" and usage["instances"] == {"prefill": "prefill-0", "decode": "decode-0"}
    assert usage["pool"]["blocks_put"] == 2 and usage["retries"] == 0 and 0 < usage["ttft_ms"] <= usage["total_ms"]
    assert _settled(front)["loads"] == {} and cluster.cancelled == []


@pytest.mark.parametrize("died_after", range(len(ANSWER)))
def test_an_answer_survives_its_decode_server_at_every_token(front, cluster, died_after):
    cluster.dies_after[("decode-0", 1)] = died_after
    cluster.on_death = lambda peer: cluster.add("decode-0", epoch=2)
    sink = _ask(front).wait()
    assert sink.error is None and tuple(sink.tokens) == ANSWER and sink.text == "<11><12><13><14><15><16>"
    assert sink.usage["retries"] == 1
    assert _settled(front)["loads"] == {}


def test_an_answer_that_changes_on_another_server_is_an_error_and_not_an_answer(front, cluster):
    cluster.dies_after[("decode-0", 1)] = 3
    cluster.on_death = lambda peer: cluster.add("decode-0", epoch=2)
    cluster.answers[2] = (11, 12, 99, 14, 15, 16)
    sink = _ask(front).wait()
    assert isinstance(sink.error, ProtocolError) and "token 2 differs" in str(sink.error)
    assert sink.tokens == [11, 12, 13]


def test_a_request_that_kills_every_server_is_given_up(front, cluster):
    for epoch in range(1, 10):
        cluster.dies_after[("decode-0", epoch)] = 1
    cluster.on_death = lambda peer: cluster.add("decode-0", epoch=peer.epoch + 1)
    sink = _ask(front).wait()
    assert isinstance(sink.error, Unavailable) and f"{SERVERS_LOST_MAX} decode servers were lost" in str(sink.error)


def test_a_dead_prefill_server_costs_the_stage_and_not_the_answer(front, cluster):
    cluster.dies_after[("prefill-0", 1)] = 0
    sink = _ask(front).wait()
    assert sink.error is None and tuple(sink.tokens) == ANSWER
    assert sink.usage["instances"] == {"decode": "decode-0"} and sink.usage["retries"] == 1


def test_another_prefill_server_takes_over(front, cluster):
    cluster.add("prefill-1")
    cluster.dies_after[("prefill-0", 1)] = 0
    cluster.dies_after[("prefill-1", 2)] = 0
    sinks = [_ask(front).wait() for _ in range(2)]
    assert all(sink.usage["instances"]["prefill"] == "prefill-1" for sink in sinks)


def test_with_the_pool_down_prompts_go_straight_to_decode(front, cluster):
    cluster.pool_up = False
    cluster.write()
    sink = _ask(front).wait()
    assert sink.error is None and [call[0] for call in cluster.calls] == ["tokenize", "decode"]


def test_a_request_waits_for_a_decode_server_and_its_deadline_ends_the_wait(front, cluster):
    cluster.remove("decode-0")
    late = _ask(front, deadline_ms=100).wait()
    assert isinstance(late.error, DeadlinePassed) and "0.1 s" in str(late.error)
    patient = _ask(front)
    cluster.add("decode-0", epoch=2)
    assert tuple(patient.wait().tokens) == ANSWER


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_a_full_server_is_said_at_once_when_there_is_no_other(front, cluster, name):
    cluster.overloaded.add(name)
    sink = _ask(front).wait()
    assert isinstance(sink.error, Overloaded) and sink.error.retry_after_s == 2.5


@pytest.mark.parametrize("way", ["gone", "deadline", "op"])
def test_every_early_end_cancels_what_runs_elsewhere(front, cluster, way):
    _hold(front, cluster)
    sink = _ask(front, request_id="r7", **({"deadline_ms": 300} if way == "deadline" else {}))
    while sink.got.get(timeout=5) < 2:
        pass
    if way == "gone":
        sink.gone = True
    elif way == "op":
        answer = Sink()
        front.operate("cancel", "r7", answer)
        assert answer.wait().usage == {"cancelled": True}
    sink.wait()
    assert isinstance(sink.error, DeadlinePassed if way == "deadline" else Cancelled)
    assert _settled(front)["loads"] == {}
    assert cluster.told.wait(5) and cluster.cancelled == [("decode-0", "r7~0")]


def test_one_more_than_the_limit_is_refused_with_a_retry_time(front, cluster):
    _hold(front, cluster)
    running = [_ask(front) for _ in range(LIMITS.concurrent_max)]
    refused = _ask(front).wait()
    assert isinstance(refused.error, Overloaded) and "concurrent_max is 3; retry after" in str(refused.error)
    front._loop.call_soon_threadsafe(cluster.hold.set)
    assert all(tuple(sink.wait().tokens) == ANSWER for sink in running)


def test_two_requests_with_one_id_do_not_run_together(front, cluster):
    _hold(front, cluster)
    first = _ask(front, request_id="same")
    second = _ask(front, request_id="same").wait()
    assert isinstance(second.error, RequestRefused) and "in flight" in str(second.error)
    front._loop.call_soon_threadsafe(cluster.hold.set)
    assert first.wait().error is None
    assert _ask(front, request_id="same").wait().error is None


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"text": b"caf\xe9"}, "text_input: wanted UTF-8, found byte 0xe9 at offset 3"),
        ({"stop": (b"\xff",)}, "stop: wanted UTF-8"),
        ({"max_tokens": 0}, "max_tokens must lie in 1 to 100, found 0"),
        ({"max_tokens": 101}, "max_tokens must lie in 1 to 100, found 101"),
        ({"deadline_ms": 0}, "deadline_ms must lie in 1 to 20000, found 0"),
        ({"deadline_ms": 20001}, "deadline_ms must lie in 1 to 20000"),
        ({"request_id": "a~1"}, "no ~"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs_for_it(front, cluster, asked, sentence):
    sink = _ask(front, **asked).wait()
    assert isinstance(sink.error, RequestRefused) and sentence in str(sink.error)
    assert cluster.calls == []


def test_closing_the_front_ends_what_is_in_flight(cluster):
    front = Front(PeersFile(cluster.file), LIMITS, cluster)
    _hold(front, cluster)
    sink = _ask(front)
    while sink.got.get(timeout=5) < 2:
        pass
    front.close()
    assert sink.wait().error is not None and len(cluster.cancelled) == 1


# With TensorRT-LLM's transceiver: decode servers only generate, and what a context request left serves one of them.


@pytest.fixture
def direct(cluster):
    cluster.pool_up = False
    cluster.write()
    made = Front(PeersFile(cluster.file), LIMITS, cluster, handoff="transceiver")
    yield made
    made.close()


def test_a_prompt_is_handed_over_again_when_its_decode_server_is_lost(direct, cluster):
    cluster.dies_after[("decode-0", 1)] = 2
    cluster.on_death = lambda peer: cluster.add("decode-0", epoch=2)
    sink = _ask(direct).wait()
    assert tuple(sink.tokens) == ANSWER and [call[0] for call in cluster.calls] == ["prefill", "decode"] * 2


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_nothing_is_handed_over_before_both_servers_are_there(direct, cluster, role):
    cluster.remove(f"{role}-0")
    late = _ask(direct, deadline_ms=150).wait()
    assert isinstance(late.error, DeadlinePassed) and cluster.calls == []
    patient = _ask(direct)
    cluster.add(f"{role}-0", epoch=2)
    assert tuple(patient.wait().tokens) == ANSWER
    assert [call[0] for call in cluster.calls] == ["prefill", "decode"]


def test_a_prompt_that_no_prefill_server_takes_is_not_left_to_decode(direct, cluster):
    cluster.dies_after[("prefill-0", 1)] = 0
    sink = _ask(direct).wait()
    assert isinstance(sink.error, Unavailable) and "no prefill server took the prompt" in str(sink.error)
    assert {call[0] for call in cluster.calls} == {"prefill"}


def test_kv_that_waited_too_long_for_a_decode_server_is_made_again(direct, cluster, monkeypatch):
    monkeypatch.setattr("kvtool.triton.stages._KEEPS_S", 0.05)
    take, first = cluster.prefill, []

    async def prefill(peer, text, ask, timeout_s):
        answer = await take(peer, text, ask, timeout_s)
        if not first:
            first.append(cluster.remove("decode-0"))
            asyncio.get_running_loop().call_later(0.3, cluster.add, "decode-0", 2)
        return answer

    cluster.prefill = prefill
    sink = _ask(direct).wait()
    assert tuple(sink.tokens) == ANSWER and [call[0] for call in cluster.calls] == ["prefill", "prefill", "decode"]


# Batch requests beside online ones.


@pytest.fixture
def shared(cluster):
    made = Front(PeersFile(cluster.file), LIMITS, cluster, shared_cores=True)
    yield made
    made.close()


def _batch(front, **asked):
    return _ask(front, priority=BATCH_PRIORITY, **asked)


def test_every_instance_holds_batch_work_until_the_first_token_of_an_online_request(shared, cluster):
    _hold(shared, cluster)
    batch = _batch(shared)
    while batch.got.get(timeout=5) < 2:
        pass
    assert cluster.holds.empty(), "nobody has to wait for it"
    online = _ask(shared)
    first = {cluster.holds.get(timeout=5) for _ in range(2)}
    assert first == {("prefill-0", HOLD_S), ("decode-0", HOLD_S)}
    assert online.got.get(timeout=5) == 1
    over = {cluster.holds.get(timeout=5) for _ in range(2)}
    assert over == {("prefill-0", 0.0), ("decode-0", 0.0)}
    shared._loop.call_soon_threadsafe(cluster.hold.set)
    assert tuple(batch.wait().tokens) == tuple(online.wait().tokens) == ANSWER and cluster.holds.empty()


def test_a_hold_is_renewed_while_it_is_wanted_and_ends_with_the_request(shared, cluster):
    _hold(shared, cluster)
    batch = _batch(shared)
    while batch.got.get(timeout=5) < 2:
        pass
    cluster.remove("decode-0")
    online = _ask(shared, deadline_ms=1500)
    said = [cluster.holds.get(timeout=5) for _ in range(3)]
    assert said == [("prefill-0", HOLD_S), ("prefill-0", HOLD_S), ("prefill-0", 0.0)]
    assert isinstance(online.wait().error, DeadlinePassed)
    shared._loop.call_soon_threadsafe(cluster.hold.set)
    assert batch.wait().error is None


def test_a_batch_request_begins_when_nobody_waits(front, cluster):
    cluster.remove("prefill-0")
    cluster.remove("decode-0")
    online = [_ask(front), _ask(front)]
    batch = _batch(front)
    assert cluster.calls == []
    cluster.add("prefill-0", epoch=2)
    cluster.add("decode-0", epoch=2)
    assert all(tuple(sink.wait().tokens) == ANSWER for sink in [*online, batch])
    stages = [call[0] for call in cluster.calls]
    second = stages.index("decode", stages.index("decode") + 1)
    assert second == 3, f"the batch request began before both online ones had their tokens: {stages}"
    assert cluster.holds.empty(), "instances with processors of their own are told nothing"


def test_patience_lets_batch_requests_through_one_by_one(front, cluster, monkeypatch):
    monkeypatch.setattr(giveway, "PATIENCE_S", 0.05)
    cluster.remove("decode-0")
    online = _ask(front)  # waits for its first token all the time
    batch = [_batch(front)]
    until_s = time.monotonic() + 5
    while sum(call[0] == "prefill" for call in cluster.calls) < 2:
        assert time.monotonic() < until_s
    cluster.add("decode-0", epoch=2)
    assert all(tuple(sink.wait().tokens) == ANSWER for sink in [online, *batch])


def test_batch_requests_have_half_of_the_places_and_give_them_to_online_ones(front, cluster):
    _hold(front, cluster)
    batch = _batch(front, request_id="b")
    while batch.got.get(timeout=5) < 2:
        pass
    refused = _batch(front).wait()
    assert isinstance(refused.error, Overloaded) and "1 batch requests (priority 0) are in flight" in str(refused.error)
    online = [_ask(front) for _ in range(LIMITS.concurrent_max)]
    assert isinstance(batch.wait().error, Overloaded) and "gave way to an online request" in str(batch.error)
    assert isinstance(_ask(front).wait().error, Overloaded), "only batch requests give way"
    front._loop.call_soon_threadsafe(cluster.hold.set)
    assert all(tuple(sink.wait().tokens) == ANSWER for sink in online)
    assert _settled(front)["batch"] == 0 and cluster.cancelled == [("decode-0", "b~0")]
