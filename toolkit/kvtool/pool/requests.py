"""Requests that are on their way over one link, what came of them, and the circuit breaker that follows from that.

A request is asked, and then answered, given up (its late answer is undone) or lost with the connection. The breaker is
open from a request that timed out until anything at all comes from the rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvtool.kv.record import Grant
from kvtool.pool import wire
from kvtool.pool.wire import Message, Op, Status

PROBES_S = (0.5, 8.0)
"""Between the PINGs to a rank that does not answer: the first interval, and the longest."""


class Requests:
    """The bookkeeping of a `Link`, under `_lock`. `on_epoch` is told the epoch of what comes in."""

    def __init__(self, now_s: Callable[[], float], on_epoch: Callable[[int], None]) -> None:
        self._now_s, self._on_epoch = now_s, on_epoch
        self._lock = threading.Lock()
        self._replies: dict[int, Message] = {}
        self._kinds: dict[int, tuple[Op, int]] = {}  # of the replies
        self._asked: dict[int, tuple[Op, int]] = {}  # requests on the way; the int says how to undo a lookup
        self._given_up: dict[int, tuple[Op, int]] = {}
        self._open_since_s: float | None = None  # circuit breaker
        self._probe_at_s, self._probe_every_s = 0.0, PROBES_S[0]
        self._doubt_s: float | None = None  # when the first request that was forgotten should have been answered
        self.breaks = 0
        """How often the breaker opened."""
        self.heard_s = -1e9

    def tell(self, op: Op, body: bytes) -> None:
        """Send what needs no answer."""
        raise NotImplementedError

    @property
    def broken(self) -> bool:
        """Whether the breaker is open: the rank let a request time out and was not heard of since."""
        return self._open_since_s is not None

    @property
    def asked(self) -> int:
        """Requests that are on their way."""
        return len(self._asked)

    def forget(self, number: int, deadline_s: float) -> None:
        """Want an answer no more: whenever it comes it is undone, or was here already and is undone now. A rank that
        says nothing at all until `deadline_s` is taken for one that let a request time out."""
        with self._lock:
            reply, kind = self._replies.pop(number, None), self._kinds.pop(number, None)
            if number in self._asked:
                self._give_up(number)
                self._doubt_s = deadline_s if self._doubt_s is None else min(self._doubt_s, deadline_s)
        if reply is not None and kind is not None:
            self._undo(*kind, reply)

    # How

    def _take(self, messages: list[Message]) -> None:
        late = []
        with self._lock:
            self._open_since_s = self._doubt_s = None
            self.heard_s, self._probe_every_s = self._now_s(), PROBES_S[0]
            for message in messages:
                kind = self._asked.pop(message.request, None)
                if kind is not None:
                    self._replies[message.request], self._kinds[message.request] = message, kind
                elif message.request in self._given_up:
                    late.append((*self._given_up.pop(message.request), message))
        for op, undo, message in late:
            self._undo(op, undo, message)
        if messages:
            self._on_epoch(messages[-1].epoch)

    def _undo(self, op: Op, undo: int, message: Message) -> None:
        if message.status is not Status.OK:
            return
        if op in (Op.LOOKUP, Op.GATHER):
            self.tell(Op.RELEASE, wire.pack_numbers([undo]))
        elif op in (Op.RESERVE, Op.STORE):
            answers, _ = wire.unpack_grants(message.body[2:] if op is Op.STORE else message.body)
            aborts = [(a.slot, a.generation) for a in answers if a.grant is Grant.GRANTED]
            if aborts:
                self.tell(Op.ABORT, wire.pack_aborts(0.0, aborts))

    def _doubtful(self) -> bool:
        """A request that was forgotten should have been answered by now."""
        return self._doubt_s is not None and self._now_s() >= self._doubt_s

    def _give_up(self, number: int) -> None:
        """Under the lock: nobody waits for the answer any more, which is undone if it comes."""
        self._given_up[number] = self._asked.pop(number)
        while len(self._given_up) > 1024:
            del self._given_up[next(iter(self._given_up))]

    def _trip(self) -> None:
        """Under the lock: a request timed out. Whatever comes from the rank closes the breaker."""
        now_s = self._now_s()
        if self._open_since_s is None:
            self.breaks += 1
            self._probe_at_s = now_s + self._probe_every_s
        self._open_since_s, self._doubt_s = now_s, None

    def _open(self) -> None:
        with self._lock:
            self._trip()
