"""The threads of a block file: what somebody is waiting for goes before what is written ahead of need."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class FileThreads(Executor):
    """`count` threads and two queues. `submit` is for what can wait: it never takes the last `spare` threads, so that
    an `urgent` task begins at once though the disk is slow with the others."""

    def __init__(self, count: int, spare: int = 1, name: str = "kvtool-file") -> None:
        self._may_wait = max(1, count - spare)
        self._urgent: deque[_Task] = deque()
        self._patient: deque[_Task] = deque()
        self._patient_running = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        return self._put(self._patient, fn, args, kwargs)

    def urgent(self, fn: Callable[..., _T], /, *args: Any) -> Future[_T]:
        return self._put(self._urgent, fn, args, {})

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        with self._changed:
            self._closed = True
            dropped = [*self._urgent, *self._patient] if cancel_futures else []
            if cancel_futures:
                self._urgent.clear()
                self._patient.clear()
            self._changed.notify_all()
        for future, *_ in dropped:
            future.cancel()
        if wait:
            for thread in self._threads:
                thread.join()

    def _put(
        self, queue: deque[_Task], fn: Callable[..., _T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[_T]:
        future: Future[_T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("these threads take no more work")
            queue.append((future, fn, args, kwargs))
            self._changed.notify()
        return future

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._urgent and not (self._patient and self._patient_running < self._may_wait):
                    if self._closed and not self._patient:
                        return
                    self._changed.wait()
                patient = not self._urgent
                task = self._patient.popleft() if patient else self._urgent.popleft()
                self._patient_running += patient
            _run(*task)
            if patient:
                with self._changed:
                    self._patient_running -= 1
                    self._changed.notify()
            del task  # memory that was given to it is its owner's again


def _run(future: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:  # its future tells
        future.set_exception(error)
    else:
        future.set_result(result)
