"""What somebody waits for does not queue behind what is written ahead of need."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from kvtool.transfer.filethreads import FileThreads


def test_urgent_work_begins_at_once_though_a_slow_disk_has_all_the_rest():
    threads, go = FileThreads(3, spare=1), threading.Event()
    slow = [threads.submit(go.wait, 10) for _ in range(5)]
    assert threads.urgent(lambda: 7).result(5) == 7
    order: list[str] = []
    hold = [threads.urgent(go.wait, 10)]
    later = threads.submit(order.append, "patient"), threads.urgent(order.append, "urgent")
    go.set()
    for future in (*slow, *hold, *later):
        future.result(10)
    assert order == ["urgent", "patient"]
    threads.shutdown()


def test_an_error_is_the_futures_and_a_shutdown_drops_what_has_not_begun():
    threads, begun, go = FileThreads(1), threading.Event(), threading.Event()
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(5)

    def work() -> int:
        begun.set()
        go.wait(10)
        return 3

    running, waiting = threads.submit(work), threads.submit(work)
    assert begun.wait(5)
    threads.shutdown(wait=False, cancel_futures=True)
    go.set()
    assert running.result(5) == 3
    with pytest.raises(CancelledError):
        waiting.result(5)
    with pytest.raises(RuntimeError, match="no more work"):
        threads.submit(work)
    threads.shutdown()
