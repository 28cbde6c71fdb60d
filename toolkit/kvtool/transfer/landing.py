"""Landings: memory of a caller that one-sided reads may write to directly, without staging.

What saves the copy takes away its protection: a transfer that was given up (`transfer.ucx`) may still write to the
caller's own memory, whenever its peer goes on. So a landing knows how many such transfers there are. While it is not
`free`, nothing more is read into it, and its owner must leave all of it alone: neither use it for something else nor
give it back to the system. It is free again when those transfers are over: done, or failed with their peer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kvtool.transfer.peer import address_of


class Landing:
    """`view`: writable, flat. It is registered with a reader when it is first used, and stays alive until it is free.

    A context manager: leaving releases.
    """

    def __init__(self, view: memoryview, owner: object, on_release: Callable[[Landing], None]) -> None:
        self.address, self.size = address_of(view), view.nbytes
        self._view, self._owner, self._on_release = view, owner, on_release
        self._lock = threading.Lock()
        self._agent: Any = None
        self._registered: Any = None
        self._progress: Callable[[], object] | None = None
        self._held = 0
        self._released = False

    def holds(self, address: int, size: int) -> bool:
        """Whether [address, address + size) lies in it."""
        return self.address <= address and address + size <= self.address + self.size

    @property
    def free(self) -> bool:
        """Whether nobody but its owner may write to it."""
        if self._held and self._progress is not None:
            self._progress()
        return self._held == 0

    def prepare(self, agent: Any, progress: Callable[[], object]) -> None:
        """Have it registered, once. `progress` looks after transfers that were given up."""
        with self._lock:
            if self._registered is None and not self._released:
                self._registered = agent.register_memory([(self.address, self.size, 0, "")], "DRAM")
                self._agent, self._progress = agent, progress

    def hold(self) -> None:
        """A transfer into it was given up."""
        with self._lock:
            self._held += 1

    def unhold(self) -> None:
        """That transfer is over."""
        with self._lock:
            self._held -= 1
        self._leave_if_over()

    def release(self) -> None:
        """Nothing is read into it from here on; deregistered as soon as it is free. Again is a no-op."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self._on_release(self)
        self._leave_if_over()

    def _leave_if_over(self) -> None:
        with self._lock:
            if not self._released or self._held or self._registered is None:
                return
            agent, self._agent, registered, self._registered = self._agent, None, self._registered, None
        agent.deregister_memory(registered)

    def __enter__(self) -> Landing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
