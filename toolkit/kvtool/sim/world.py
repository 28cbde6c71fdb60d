"""One run's machine: its clock, chance, network, memory and processes, for the stand-ins of `system` to find."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from kvtool.pool.state import PoolState
from kvtool.sim.journal import Journal
from kvtool.sim.net import Delays, Network
from kvtool.sim.onesided import Agent
from kvtool.sim.poll import EventFd
from kvtool.sim.sched import LOOK_S, Broken, Process, Scheduler

WRITES_MAX = 400
"""Of the state file in one run; a rank that starts again makes ten or so, as it takes on more keys."""


class World:
    """`rng` decides everything that is left to chance."""

    def __init__(self, seed: int, delays: Delays) -> None:
        self.block_size = 0
        self.seed, self.rng, self.journal = seed, Random(seed), Journal()
        self.sched = Scheduler(self.rng, self.journal)
        self.net = Network(self.sched, delays)
        self.counters: dict[int, EventFd] = {}
        self.segments: dict[str, dict[str, Any]] = {}
        self.handlers: dict[tuple[int, int], Any] = {}
        self.agents: dict[str, Agent] = {}
        self.kept: list[Any] = []
        self.locks: dict[str, Process] = {}
        self.platters: dict[str, Any] = {}
        self._writes = 0

    @property
    def process(self) -> Process:
        task = self.sched.current
        assert task is not None, "nobody calls"
        return task.process

    def look_at_clock(self) -> float:
        """The monotonic clock of the calling process, which began counting when it pleased."""
        sched = self.sched
        if sched.current is None:
            return sched.now_s
        sched.now_s += LOOK_S
        return sched.now_s + sched.current.process.clock_offset_s

    def runs(self, pid: int) -> bool:
        return any(process.pid == pid and not process.dead for process in self.sched.processes)

    def publish(self, path: Path, state: PoolState, write: Callable[[Path, PoolState], None]) -> None:
        """A state file, replaced whole. Its time says which one it is, as on a disk whose clock is fine enough."""
        write(path, state)
        self._writes += 1
        if self._writes > WRITES_MAX:
            raise Broken(
                f"view never settles: the state file was written {WRITES_MAX} times in {self.sched.now_s:.1f} s"
            )
        os.utime(path, ns=(self._writes, self._writes))
        self.journal.log("publish", self.process.name, "epoch", state.epoch)

    def platter(self, name: str, make: Callable[[], Any]) -> Any:
        """The disk's file of that name."""
        if name not in self.platters:
            self.platters[name] = make()
        return self.platters[name]


_worlds: list[World] = []


def here() -> World:
    """The world that runs now."""
    return _worlds[-1]


def enter(world: World) -> None:
    _worlds.append(world)


def leave() -> None:
    _worlds.pop()
