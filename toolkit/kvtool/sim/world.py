"""One run's machine: its clock, chance, network, memory and processes, for the stand-ins of `system` to find."""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

from kvtool.pool.state import PoolState
from kvtool.sim.net import Delays, Network
from kvtool.sim.onesided import Agent
from kvtool.sim.poll import EventFd
from kvtool.sim.sched import LOOK_S, Process, Scheduler
from kvtool.sim.journal import Journal


class World:
    """`rng` decides everything that is left to chance."""

    def __init__(self, seed: int, delays: Delays) -> None:
        self.seed, self.rng, self.journal = seed, Random(seed), Journal()
        self.sched = Scheduler(self.rng, self.journal)
        self.net = Network(self.sched, delays)
        self.counters: dict[int, EventFd] = {}
        self.segments: dict[str, dict[str, Any]] = {}
        self.handlers: dict[tuple[int, int], Any] = {}
        self.agents: dict[str, Agent] = {}
        self.kept: list[Any] = []
        self.published: dict[str, tuple[int, PoolState]] = {}

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

    def publish(self, path: Path, state: PoolState) -> None:
        """A state file, replaced whole."""
        number = self.published[str(path)][0] if str(path) in self.published else 0
        self.published[str(path)] = (number + 1, copy.deepcopy(state))
        self.journal.log("publish", self.process.name, "epoch", state.epoch)


_worlds: list[World] = []


def here() -> World:
    """The world that runs now."""
    return _worlds[-1]


def enter(world: World) -> None:
    _worlds.append(world)


def leave() -> None:
    _worlds.pop()
