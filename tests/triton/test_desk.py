"""Operations beside requests, over workers that answer when told to."""

import json
import re
from types import SimpleNamespace

import pytest

from kvtool.errors import KvtoolError, Overloaded
from kvtool.serve.handoff import Handoff, PrefillDone
from kvtool.serve.request import Event, Finish, Usage
from kvtool.triton.desk import DecodeDesk, PrefillDesk
from kvtool.triton.wire import Ask


class Worker:
    """Keeps what was submitted; `answer` ends the oldest request."""

    def __init__(self):
        self.asked, self.cancelled, self.closed = [], [], False

    def submit(self, request, answer, handoff=None):
        self.asked.append((request, answer, handoff))

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        return any(request.request_id == request_id for request, _, _ in self.asked)

    def audit(self):
        return [_Held(request.request_id, "request") for request, _, _ in self.asked]

    def status(self):
        return {"requests": len(self.asked)}

    def close(self):
        self.closed = True


class _Held(SimpleNamespace):
    def __init__(self, owner, what):
        super().__init__(owner=owner, what=what)

    __dataclass_fields__ = ()


class Reply:
    def __init__(self):
        self.said, self.events = [], []

    def __call__(self, event):
        self.events.append(event)

    def say(self, answer):
        self.said.append(json.loads(answer))


@pytest.fixture(params=["prefill", "decode"])
def role(request):
    return request.param


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture
def take(role, worker):
    desk = PrefillDesk(worker) if role == "prefill" else DecodeDesk(worker)

    def take(request, tokens=(1, 2)):
        reply = Reply()
        if role == "prefill":
            desk.take(request, tokens, reply)
        else:
            desk.take(request, tokens, "", reply)
        return reply

    return take


def _done(role, error=None):
    if role == "prefill":
        return PrefillDone("r", None if error else Handoff(1), Usage(), error)
    return Event("r", 0, (5,) if error is None else (), finish=Finish.STOP, usage=Usage(), error=error)


def test_a_request_reaches_the_worker_with_its_tokens(take, worker):
    take(Ask("r", 7).to_json(), (1, 2, 3))
    request = worker.asked[0][0]
    assert (request.request_id, request.tokens, request.max_tokens) == ("r", (1, 2, 3), 7)


def test_a_canary_is_a_real_request_ahead_of_all_others_and_new_each_time(take, worker, role):
    replies = [take('{"op": "canary"}') for _ in range(8)]
    requests = [request for request, _, _ in worker.asked]
    assert len({request.request_id for request in requests}) == 8 and {request.priority for request in requests} == {
        100
    }
    assert len({request.tokens for request in requests}) > 1
    worker.asked[0][1](_done(role))
    worker.asked[1][1](_done(role, KvtoolError("the engine failed")))
    worker.asked[2][1](_done(role, Overloaded("full", 1.0)))
    assert [reply.said[0]["ok"] for reply in replies[:3]] == [True, False, True]
    assert all(not reply.said for reply in replies[3:])


def test_a_worker_that_just_answered_is_not_disturbed_by_a_canary(take, worker, role):
    take(Ask("r", 7).to_json())
    worker.asked[0][1](_done(role))
    assert take('{"op": "canary"}').said[0]["ok"] and len(worker.asked) == 1


def test_an_error_is_no_sign_of_life(take, worker, role):
    take(Ask("r", 7).to_json())
    worker.asked[0][1](_done(role, KvtoolError("the engine failed")))
    assert not take('{"op": "canary"}').said and len(worker.asked) == 2


def test_cancel_is_answered_at_once(take, worker):
    take(Ask("r", 7).to_json())
    assert take('{"op": "cancel", "request_id": "r"}').said == [{"cancelled": True}]
    assert take('{"op": "cancel", "request_id": "x"}').said == [{"cancelled": False}]
    assert worker.cancelled == ["r", "x"]


def test_what_a_dead_front_asked_for_is_cancelled_and_canaries_are_not(take, worker):
    for name in ("a", "b"):
        take(Ask(name, 7).to_json())
    take('{"op": "canary"}')
    assert take('{"op": "cancel_all"}').said == [{"cancelled": 2}]
    assert sorted(worker.cancelled) == ["a", "b"]


@pytest.mark.parametrize("request_text", ["", "{", '{"op": "explode"}', '{"request_id": "r"}'])
def test_nonsense_is_answered_and_not_raised(take, worker, request_text):
    [event] = take(request_text).events
    assert re.match("REQUEST: |op: ", str(event.error))
    assert worker.asked == []
