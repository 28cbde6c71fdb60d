"""A link as the rest of a client sees it; `link.Link` is the real one, and says what each call does.

A simulation has its own. The one place where it must wait is `wait`, and `finish`, which waits by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvtool.errors import Unavailable
from kvtool.pool.state import RankState
from kvtool.pool.wire import Op

if TYPE_CHECKING:
    from kvtool.pool.lane import Lane


class RankDown(Unavailable):
    """The rank's socket is closed, or nobody listens there."""


class RankSlow(Unavailable):
    """No answer in time, now or to the last call."""


class Line(Protocol):
    """What a client needs of a link."""

    state: RankState
    ucx: bool
    heard_s: float
    breaks: int

    @property
    def usable(self) -> bool: ...

    @property
    def connected(self) -> bool: ...

    @property
    def losses(self) -> int: ...

    @property
    def asked(self) -> int: ...

    @property
    def broken(self) -> bool: ...

    def start(self, op: Op, body: bytes, deadline_s: float, undo: int = 0) -> int: ...

    def tell(self, op: Op, body: bytes) -> None: ...

    def wait(self, number: int, until_s: float) -> bool: ...

    def say(self, op: Op, body: bytes, deadline_s: float) -> None: ...

    def finish(self, number: int, deadline_s: float) -> bytes: ...

    def forget(self, number: int, deadline_s: float) -> None: ...

    def call(self, op: Op, body: bytes, deadline_s: float) -> bytes: ...

    def connect(self, deadline_s: float) -> None: ...

    def look(self) -> None: ...

    def begin_writing(self) -> bool: ...

    def end_writing(self) -> None: ...

    def lane(self, deadline_s: float) -> Lane: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...
