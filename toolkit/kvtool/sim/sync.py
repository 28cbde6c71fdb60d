"""Threads and what they wait on, in the place of `threading` and `concurrent.futures`.

A lock that is free is sometimes taken only after others ran: every acquisition is a point where the real scheduler
might have switched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty
from types import TracebackType
from typing import Any, ClassVar

from kvtool.sim.sched import Scheduler, Task

YIELD_SHARE = 0.02


class Threads:
    """The `threading` module of a run."""

    def __init__(self, sched: Callable[[], Scheduler]) -> None:
        self._sched = sched

    def Lock(self) -> Lock:  # its name in the library
        return Lock(self._sched)

    def RLock(self) -> RLock:
        return RLock(self._sched)

    def Condition(self, lock: AnyLock | None = None) -> Condition:
        return Condition(self._sched, lock or RLock(self._sched))

    def Event(self) -> Event:
        return Event(self._sched)

    def Thread(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> Thread:
        return Thread(self._sched, target or (lambda: None), name or "thread", args, kwargs or {})

    def Timer(self, interval: float, function: Callable[..., Any], args: Any = None, kwargs: Any = None) -> Timer:
        return Timer(self._sched, interval, function, args or (), kwargs or {})

    def get_ident(self) -> int:
        task = self._sched().current
        return task.number if task is not None else 0


class Lock:
    """A `threading.Lock`."""

    def __init__(self, sched: Callable[[], Scheduler]) -> None:
        self._sched = sched
        self._owner: Task | None = None
        self._taken = False
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        sched = self._sched()
        if sched.current is None:  # an oracle looks
            assert not self._taken, "an oracle would have to wait for a lock"
            self._taken = True
            return True
        task = sched.call()
        if blocking and len(task.process.tasks) > 1 and sched.rng.random() < YIELD_SHARE:
            sched.park(0.0)
        if not self._taken:
            self._taken, self._owner = True, task
            return True
        if not blocking or timeout == 0:
            return False
        until_s = None if timeout < 0 else sched.now_s + timeout
        while self.locked():
            self._waiting.append(task)
            woken = sched.park(None if until_s is None else max(0.0, until_s - sched.now_s))
            if task in self._waiting:
                self._waiting.remove(task)
            if not woken and self.locked() and until_s is not None and sched.now_s >= until_s:
                return False
        self._taken, self._owner = True, task
        return True

    def release(self) -> None:
        assert self._taken, "release of a lock that is free"
        self._taken, self._owner = False, None
        if self._waiting:
            self._sched().wake(self._waiting[0])

    def locked(self) -> bool:
        return self._taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._taken:
            self.release()


class RLock(Lock):
    def __init__(self, sched: Callable[[], Scheduler]) -> None:
        super().__init__(sched)
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        current = self._sched().current
        if (self._taken and self._owner is current) or super().acquire(blocking, timeout):
            self._depth += 1
            return True
        return False

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            super().release()


AnyLock = Lock | RLock


class Condition:
    def __init__(self, sched: Callable[[], Scheduler], lock: Lock | RLock) -> None:
        self._sched, self._lock = sched, lock
        self._waiting: list[Task] = []
        self.acquire, self.release = lock.acquire, lock.release

    def wait(self, timeout: float | None = None) -> bool:
        sched = self._sched()
        task = sched.call()
        depth = self._lock._depth if isinstance(self._lock, RLock) else 0
        if isinstance(self._lock, RLock):
            self._lock._depth = 1
        self._lock.release()
        self._waiting.append(task)
        woken = sched.park(None if timeout is None else max(0.0, timeout))
        if task in self._waiting:
            self._waiting.remove(task)
        self._lock.acquire()
        if isinstance(self._lock, RLock):
            self._lock._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        sched = self._sched()
        until_s = None if timeout is None else sched.now_s + timeout
        while not predicate():
            left_s = None if until_s is None else until_s - sched.now_s
            if left_s is not None and left_s <= 0:
                return predicate()
            self.wait(left_s)
        return True

    def notify(self, n: int = 1) -> None:
        for task in self._waiting[:n]:
            self._waiting.remove(task)
            self._sched().wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.__exit__(kind, error, trace)


class Event:
    def __init__(self, sched: Callable[[], Scheduler]) -> None:
        self._sched = sched
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        for task in self._waiting:
            self._sched().wake(task)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        sched = self._sched()
        task = sched.call()
        until_s = None if timeout is None else sched.now_s + timeout
        while not self._set and (until_s is None or sched.now_s < until_s):
            self._waiting.append(task)
            sched.park(None if until_s is None else until_s - sched.now_s)
            self._waiting.remove(task)
        return self._set


class Thread:
    def __init__(
        self,
        sched: Callable[[], Scheduler],
        target: Callable[..., Any],
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._sched, self.name, self.daemon = sched, name, True
        self._call: Callable[[], Any] = lambda: target(*args, **kwargs)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._sched().call().process.spawn(self._call, self.name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.over

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        sched = self._sched()
        until_s = None if timeout is None else sched.now_s + timeout
        while not self._task.over and (until_s is None or sched.now_s < until_s):
            self._task.joined.append(sched.call())
            sched.park(None if until_s is None else until_s - sched.now_s)


class Timer(Thread):
    """A `threading.Timer`."""

    def __init__(
        self,
        sched: Callable[[], Scheduler],
        interval_s: float,
        target: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__(sched, self._run, "timer", (), {})
        self._interval_s, self._off = interval_s, False
        self._target: Callable[[], Any] = lambda: target(*args, **kwargs)

    def cancel(self) -> None:
        self._off = True

    def _run(self) -> None:
        self._sched().sleep(self._interval_s)
        if not self._off:
            self._target()


class VirtualFuture(Future[Any]):
    """A `Future` whose `result` waits as a simulated thread does."""

    here: ClassVar[Callable[[], Scheduler]]

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition(VirtualFuture.here, RLock(VirtualFuture.here))  # type: ignore[assignment]


class SimpleQueue:
    """A `queue.SimpleQueue`."""

    def __init__(self, sched: Callable[[], Scheduler]) -> None:
        self._items: deque[Any] = deque()
        self._condition = Condition(sched, RLock(sched))

    def put(self, item: Any) -> None:
        with self._condition:
            self._items.append(item)
            self._condition.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self._condition:
            if not self._condition.wait_for(lambda: bool(self._items), timeout if block else 0.0):
                raise Empty
            return self._items.popleft()


class Executor:
    """A `ThreadPoolExecutor`: so many threads, first come first served."""

    def __init__(self, sched: Callable[[], Scheduler], max_workers: int, thread_name_prefix: str = "worker") -> None:
        self._sched, self._max, self._name = sched, max_workers, thread_name_prefix
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._idle: list[Task] = []
        self._process = sched().call().process
        self._threads: list[Task] = []
        self._closed = False

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = VirtualFuture()
        self._queue.append((future, lambda: call(*args, **kwargs)))
        if self._idle:
            self._sched().wake(self._idle.pop())
        elif len(self._threads) < self._max:
            self._threads.append(self._process.spawn(self._work, f"{self._name}-{len(self._threads)}"))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            while self._queue:
                self._queue.popleft()[0].cancel()
        for task in self._idle:
            self._sched().wake(task)
        if wait:
            sched = self._sched()
            for task in self._threads:
                while not task.over and sched.current is not None:
                    task.joined.append(sched.call())
                    sched.park()

    def _work(self) -> None:
        sched = self._sched()
        while True:
            while not self._queue:
                if self._closed:
                    return
                task = sched.call()
                self._idle.append(task)
                sched.park()
                if task in self._idle:
                    self._idle.remove(task)
            future, call = self._queue.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)


def wait_all(sched: Callable[[], Scheduler], futures: Sequence[Future[Any]], timeout: float | None) -> tuple[Any, Any]:
    """`concurrent.futures.wait`: (done, not done)."""
    world = sched()
    until_s = None if timeout is None else world.now_s + timeout
    pending = [future for future in futures if not future.done()]
    if pending and world.current is not None:
        task = world.call()
        for future in pending:
            future.add_done_callback(lambda _: world.wake(task))
        while any(not future.done() for future in pending) and (until_s is None or world.now_s < until_s):
            world.park(None if until_s is None else until_s - world.now_s)
    done = {future for future in futures if future.done()}
    return done, {future for future in futures if not future.done()}
