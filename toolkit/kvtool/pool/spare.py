"""Spare slots: a writer that puts one block after the other has the next slot reserved before it knows the next block.

Reserve and commit are two messages, which cost more than copying a block. So the answer to a commit may hand out
another slot, under a key of no meaning, and the next put copies at once and names its block with its commit: one
message. Such a slot is a reservation like any other: it has an owner, a deadline and a line in the audit, its bytes are
nobody's before the commit, and it is quarantined, not reused, when its time is up and its writer has not said that he
is done. A rank gives each client one, and a client asks for it only when its puts come quickly. It gives it back after
`IDLE_S` without a put, by a timer that exists only as long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtool.kv.block import KEY_SIZE, BlockKey
from kvtool.pool.line import Line
from kvtool.pool.wire import Op, pack_aborts

QUICK_S = 0.05
"""Puts that follow each other within this time are one after the other."""
IDLE_S = 0.25
USE_S = 1.0
"""A spare slot that is older is given back instead of written to: its reservation could be over."""


@dataclass(frozen=True, slots=True)
class Spare:
    """`since_s`: from before it was reserved. `losses`: of the link, then."""

    slot: int
    generation: int
    losses: int
    since_s: float


class Spares:
    """The spare slot of one link, at most one. Thread-safe."""

    def __init__(self, link: Line, now_s: Callable[[], float]) -> None:
        self._link, self._now_s = link, now_s
        self._lock = threading.Lock()
        self._spare: Spare | None = None
        self._kept_s = self._put_s = -1e9
        self._timer: threading.Timer | None = None

    def wanted(self) -> BlockKey | None:
        """At every put: under which key a slot for the next is wanted; None: puts do not come quickly."""
        now_s = self._now_s()
        quick, self._put_s = now_s - self._put_s < QUICK_S, now_s
        return os.urandom(KEY_SIZE) if quick else None

    def take(self) -> Spare | None:
        """To be called while the link is held open for writing."""
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None or spare.losses != self._link.losses:
            return None  # the rank frees what was reserved by a connection that is gone
        if self._now_s() - spare.since_s < USE_S:
            return spare
        self.give_back(spare)
        return None

    def keep(self, spare: Spare) -> None:
        with self._lock:
            other, self._spare, self._kept_s = self._spare, spare, self._now_s()
            if self._timer is None:
                self._start_timer(IDLE_S)
        if other is not None:
            self.give_back(other)

    def give_back(self, spare: Spare) -> None:
        if spare.losses == self._link.losses:
            self._link.tell(Op.ABORT, pack_aborts(0.0, [(spare.slot, spare.generation)]))

    def close(self) -> None:
        with self._lock:
            self._spare = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _start_timer(self, after_s: float) -> None:
        self._timer = threading.Timer(after_s, self._tidy)
        self._timer.daemon = True
        self._timer.start()

    def _tidy(self) -> None:
        with self._lock:
            idle_s = self._now_s() - self._kept_s
            if self._timer is None:
                return
            if self._spare is None and idle_s >= IDLE_S:
                self._timer = None
                return
            if idle_s < IDLE_S:
                self._start_timer(IDLE_S - idle_s + 0.01)
                return
            spare, self._spare, self._timer = self._spare, None, None
        if spare is not None:
            self.give_back(spare)
