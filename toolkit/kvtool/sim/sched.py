"""Virtual time: processes, their threads, and what happens when.

One heap of events. A thread is a greenlet; it runs until it waits for something, and virtual time passes only between
events (and by a microsecond whenever somebody looks at the clock, so that a loop that spins on it ends). A process can
be killed or stopped at any of its calls into the system, and a stopped one goes on where it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

import greenlet

from kvtool.sim.journal import Journal

LOOK_S = 1e-6
"""How long a look at the clock takes."""
SPIN_MAX = 200_000
"""Calls into the system by one thread between two waits: more is an endless loop."""
SAME_TIME_MAX = 20_000
"""Events at one point in time: more is an event loop that never sleeps."""


class Broken(Exception):
    """An oracle's sentence: what was seen that must never be."""


class Process:
    """A simulated process: threads that live and stop together, on one host."""

    def __init__(self, sched: Scheduler, name: str, host: str, pid: int) -> None:
        self.sched, self.name, self.host, self.pid = sched, name, host, pid
        self.dead = self.stopped = False
        self.tasks: list[Task] = []
        self.held: list[tuple[Task, int, bool]] = []  # wake-ups that came while it was stopped
        self.at_exit: list[Callable[[], None]] = []
        self.clock_offset_s = 0.0
        self.calls = 0
        self.dies_at_call: int | None = None
        self.stops_at_call: int | None = None
        self.stops_for_s = 0.0
        self.stopped_s = 0.0
        """How long it was stopped so far, altogether."""
        self._stopped_at_s = 0.0

    def spawn(self, call: Callable[[], Any], name: str) -> Task:
        task = Task(self, call, name)
        self.tasks.append(task)
        self.sched.at(0.0, self.sched.resume, task, 0, True)
        return task

    def kill(self) -> None:
        """At once, and without a word: no `finally` runs. What its kernel does then is in `at_exit`."""
        if self.dead:
            return
        self.dead = True
        self.sched.journal.log("kill", self.name)
        for undo in reversed(self.at_exit):
            undo()
        self.at_exit.clear()
        self.held.clear()

    def stop(self) -> None:
        if not (self.dead or self.stopped):
            self.stopped, self._stopped_at_s = True, self.sched.now_s
            self.sched.journal.log("stop", self.name)

    def go_on(self) -> None:
        if self.stopped:
            self.stopped = False
            self.stopped_s += self.sched.now_s - self._stopped_at_s
            self.sched.journal.log("go on", self.name)
            held, self.held = self.held, []
            for task, token, woken in held:
                self.sched.at(0.0, self.sched.resume, task, token, woken)


class Task:
    """One thread of a process."""

    def __init__(self, process: Process, call: Callable[[], Any], name: str) -> None:
        self.process, self.name = process, name
        process.sched.threads += 1
        self.number = process.sched.threads
        self.token = 0  # of its present wait; a wake-up for an earlier one is stale
        self.over = False
        self.joined: list[Task] = []
        self.calls = 0

        def run(_: bool) -> None:
            try:
                call()
            except greenlet.GreenletExit:
                raise
            except Exception as error:
                process.sched.failed(self, error)
            self.over = True
            for waiter in self.joined:
                process.sched.wake(waiter)

        self.greenlet = greenlet.greenlet(run)


class Scheduler:
    """The events of one run. `rng` is the one source of chance."""

    def __init__(self, rng: Random, journal: Journal) -> None:
        self.rng, self.journal = rng, journal
        journal.now_s = lambda: self.now_s
        self.now_s = 0.0
        self.current: Task | None = None
        self.closed = False
        self.broken: Exception | None = None
        self.after: Callable[[Process], None] = lambda process: None
        self.processes: list[Process] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0
        self.threads = 0
        self._hub = greenlet.getcurrent()
        self._pids = 100

    def process(self, name: str, host: str) -> Process:
        self._pids += 1
        process = Process(self, name, host, self._pids)
        self.processes.append(process)
        return process

    def at(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have `call` run in the scheduler, `delay_s` from now."""
        self._made += 1
        heapq.heappush(self._events, (self.now_s + max(0.0, delay_s), self._made, call, arguments))

    def run(self, until_s: float) -> None:
        """Let events happen until then.

        Raises:
            Broken: an oracle saw something that must never be.
        """
        same, last_s = 0, -1.0
        while self._events and self._events[0][0] <= until_s:
            at_s, _, call, arguments = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            same = same + 1 if at_s == last_s else 0
            last_s = at_s
            if same > SAME_TIME_MAX:
                raise Broken(f"{SAME_TIME_MAX} events at {at_s:.6f} s: an event loop never sleeps, last {call}")
            call(*arguments)
            if self.broken is not None:
                raise self.broken
        self.now_s = max(self.now_s, until_s)

    # Threads

    def resume(self, task: Task, token: int, woken: bool) -> None:
        process = task.process
        if task.token != token or task.over or process.dead:
            return
        if process.stopped:
            process.held.append((task, token, woken))
            return
        task.token += 1
        task.calls = 0
        self.current = task
        task.greenlet.switch(woken)
        self.current = None
        self.after(process)

    def park(self, timeout_s: float | None = None) -> bool:
        """The running thread waits, until somebody wakes it (True) or for `timeout_s` (False)."""
        task = self.current
        assert task is not None, "only a simulated thread can wait"
        if timeout_s is not None:
            self.at(timeout_s, self.resume, task, task.token, False)
        task.calls = 0
        woken: bool = self._hub.switch()
        return woken

    def wake(self, task: Task) -> None:
        self.at(0.0, self.resume, task, task.token, True)

    def sleep(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.park(until_s - self.now_s)

    def call(self) -> Task:
        """Every call of a thread into the system begins here: it may be its process's last."""
        if self.closed:
            raise greenlet.GreenletExit
        task = self.current
        assert task is not None, "a system call from outside of the simulation"
        process = task.process
        process.calls += 1
        task.calls += 1
        if task.calls > SPIN_MAX:
            raise Broken(f"{process.name}/{task.name} made {SPIN_MAX} calls without a wait")
        if process.calls == process.dies_at_call:
            process.kill()
            self._hub.switch()
        if process.calls == process.stops_at_call:
            process.stop()
            self.at(process.stops_for_s, process.go_on)
            process.held.append((task, task.token, True))
            self._hub.switch()
        return task

    def failed(self, task: Task, error: Exception) -> None:
        """Nothing may leave a thread: production code catches what the world may do to it."""
        if self.broken is None:
            if not isinstance(error, Broken):
                found = f"{type(error).__name__}: {error}"
                broken = Broken(f"{task.process.name}/{task.name} ended with {found}")
                broken.__cause__ = error
                error = broken
            self.broken = error

    def close(self) -> None:
        """End every thread; what runs in their `finally` finds the system closed."""
        self.closed = True
        self._events.clear()
        for process in self.processes:
            for task in process.tasks:
                if not task.over and not task.greenlet.dead:
                    task.greenlet.throw(greenlet.GreenletExit)
