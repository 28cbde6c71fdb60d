"""What stands between a served engine model and its worker: requests, and operations (cancel, canary, status).

Operations are answered at once, on the thread that asks; a canary is a real request of a token or two that goes through
the worker's queue and engine, so its answer proves more than readiness does. A worker that answered a real request
just now has proved it already, and is not disturbed. Free of Triton's types.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from kvtool.errors import KvtoolError, Overloaded, RequestRefused
from kvtool.serve.handoff import Handoff, PrefillDone
from kvtool.serve.request import Event, Finish, Request, Usage
from kvtool.triton import wire
from kvtool.triton.wire import Ask

_CANARY = "canary-"
_CANARY_DEADLINE_S = 60.0
_CANARY_TOKENS = 256  # ids below are in every vocabulary
_HOLD_S_MAX = 60.0
_FRESH_S = 2.0
"""An answer this young says as much as a canary."""


class PrefillWork(Protocol):
    def submit(self, request: Request, done: Callable[[PrefillDone], None]) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def hold(self, seconds: float) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def audit(self) -> list[Any]: ...
    def close(self) -> None: ...


class DecodeWork(Protocol):
    def submit(self, request: Request, on_event: Callable[[Event], None], handoff: Handoff | None = None) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def hold(self, seconds: float) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def audit(self) -> list[Any]: ...
    def close(self) -> None: ...


class Answer(Protocol):
    """The one answer of an operation, as JSON."""

    def say(self, answer: str) -> None: ...


class PrefillAnswer(Answer, Protocol):
    def __call__(self, done: PrefillDone) -> None: ...


class DecodeAnswer(Answer, Protocol):
    def __call__(self, event: Event) -> None: ...


class PrefillDesk:
    """`take` never raises: every fault is answered."""

    def __init__(self, worker: PrefillWork) -> None:
        self._worker = worker
        self._canaries = itertools.count()
        self._answered_s = -_FRESH_S

    def take(self, request: str, tokens: tuple[int, ...], reply: PrefillAnswer) -> None:
        try:
            op = wire.read_op(request)
            if op is None:
                self._worker.submit(Ask.from_json(request).request(tokens), self._noted(reply))
            elif op["op"] == "canary":
                began_s = time.monotonic()
                if began_s - self._answered_s < _FRESH_S:
                    reply.say(_canary_answer(None, 0.0))
                    return
                self._worker.submit(
                    _canary(next(self._canaries), tokens=2),
                    lambda done: reply.say(_canary_answer(done.error, time.monotonic() - began_s)),
                )
            else:
                reply.say(_operate(self._worker, op))
        except KvtoolError as error:
            reply(PrefillDone("", None, Usage(), error))

    def _noted(self, reply: PrefillAnswer) -> Callable[[PrefillDone], None]:
        def done(answer: PrefillDone) -> None:
            if answer.error is None:
                self._answered_s = time.monotonic()
            reply(answer)

        return done

    def close(self) -> None:
        self._worker.close()


class DecodeDesk:
    """`take` never raises: every fault is answered."""

    def __init__(self, worker: DecodeWork) -> None:
        self._worker = worker
        self._canaries = itertools.count()
        self._answered_s = -_FRESH_S

    def take(self, request: str, tokens: tuple[int, ...], handoff: str, reply: DecodeAnswer) -> None:
        try:
            op = wire.read_op(request)
            if op is None:
                given = Handoff.from_json(handoff) if handoff else None
                self._worker.submit(Ask.from_json(request).request(tokens), self._noted(reply), given)
            elif op["op"] == "canary":
                began_s = time.monotonic()
                if began_s - self._answered_s < _FRESH_S:
                    reply.say(_canary_answer(None, 0.0))
                    return
                self._worker.submit(_canary(next(self._canaries), tokens=1), _last_only(reply, began_s))
            else:
                reply.say(_operate(self._worker, op))
        except KvtoolError as error:
            reply(Event("", 0, (), finish=Finish.ERROR, usage=Usage(), error=error))

    def _noted(self, reply: DecodeAnswer) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            if event.tokens:
                self._answered_s = time.monotonic()
            reply(event)

        return on_event

    def close(self) -> None:
        self._worker.close()


def _last_only(reply: Answer, began_s: float) -> Callable[[Event], None]:
    def on_event(event: Event) -> None:
        if event.finish is not None:
            reply.say(_canary_answer(event.error, time.monotonic() - began_s))

    return on_event


def _canary(number: int, tokens: int) -> Request:
    """Other tokens each time: a prompt that the pool holds would be answered without the engine. Prefill computes all
    tokens but the last, decode the last: one token less would prove less, one more would cost more."""
    prompt = tuple(random.randrange(_CANARY_TOKENS) for _ in range(tokens))
    name = f"{_CANARY}{number}"
    return Request(name, prompt, 1, deadline_s=_CANARY_DEADLINE_S, priority=100, ignore_eos=True, publish=False)


def _canary_answer(error: KvtoolError | None, seconds: float) -> str:
    """A worker that says that it is full is alive."""
    alive = error is None or isinstance(error, Overloaded)
    said: dict[str, Any] = {"ok": alive, "seconds": round(seconds, 4)}
    if error is not None:
        said["error"] = wire.error_fields(error)
    return wire.op_json(said)


def _operate(worker: PrefillWork | DecodeWork, op: dict[str, Any]) -> str:
    if op["op"] == "cancel":
        return wire.op_json({"cancelled": worker.cancel(str(op.get("request_id", "")))})
    if op["op"] == "cancel_all":
        names = {held.owner for held in worker.audit() if held.what == "request" and not held.owner.startswith(_CANARY)}
        return wire.op_json({"cancelled": sum(worker.cancel(name) for name in names)})
    if op["op"] == "hold":
        worker.hold(_seconds(op))
        return wire.op_json({"held": True})
    if op["op"] == "status":
        return wire.op_json({**worker.status(), "held": [asdict(held) for held in worker.audit()]})
    raise RequestRefused(f"op: wanted cancel, cancel_all, canary, hold or status, found {op['op']!r}")


def _seconds(op: dict[str, Any]) -> float:
    seconds = op.get("seconds")
    if not isinstance(seconds, (int, float)) or not 0 <= seconds <= _HOLD_S_MAX:
        raise RequestRefused(f"hold: seconds: wanted a number of 0 to {_HOLD_S_MAX:g}, found {seconds!r}")
    return float(seconds)
