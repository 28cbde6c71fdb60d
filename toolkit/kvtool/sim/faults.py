"""Faults: drawn one after the other while the clients work, and healed before the end."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.sim.client import ClientProcess
from kvtool.sim.disk import Platter
from kvtool.sim.net import Delays
from kvtool.sim.rank import RankProcess
from kvtool.sim.sched import Process
from kvtool.sim.shape import Shape
from kvtool.sim.world import World

CALLS_AHEAD_MAX = 60
"""A process dies or stops within so many of its next calls into the system."""


class Faults:
    """Does something bad about every `every_s`, of the kinds that the shape allows, until `healed`."""

    def __init__(self, world: World, shape: Shape, ranks: list[RankProcess], clients: list[ClientProcess]) -> None:
        self.world, self.shape, self.ranks, self.clients = world, shape, ranks, clients
        self._healed = self._over = False
        self._kinds: dict[str, Callable[[], bool]] = {
            "rank dies": self._rank_dies,
            "rank hangs": self._rank_hangs,
            "client dies": self._client_dies,
            "client hangs": self._client_hangs,
            "path cut": self._path_cut,
            "stream breaks": lambda: self._stream_breaks(None),
            "half open": lambda: self._stream_breaks(self.world.rng.randrange(2)),
            "slow network": lambda: False,
            "power cut": self._power_cut,
            "disk slow": lambda: self._disk(self._slow),
            "disk fails": lambda: self._disk(self._fails),
            "disk full": lambda: self._disk(self._full),
            "disk rots": lambda: self._disk(lambda platter: platter.rot()),
            "disk lies": lambda: self._disk(self._lies),
        }
        self._on = [kind for kind in self._kinds if kind in shape.faults]

    def start(self, every_s: float) -> None:
        self._every_s = every_s
        if self._on:
            self.world.sched.at(self.world.rng.expovariate(1 / every_s), self._next)

    def _next(self) -> None:
        if self._healed:
            return
        kind = self.world.rng.choice(self._on)
        if self._kinds[kind]():
            self.world.journal.count(f"fault: {kind}")
        self.world.sched.at(self.world.rng.expovariate(1 / self._every_s), self._next)

    def heal(self) -> None:
        """All that can be undone is; nothing bad happens any more."""
        self._healed = True
        for host in sorted({process.host for process in self.world.sched.processes}):
            self.world.net.power(host, True)
        for platter in self.world.platters.values():
            platter.slow_until_s = platter.failing_until_s = platter.full_until_s = 0.0
        for process in self.world.sched.processes:
            process.dies_at_call = process.stops_at_call = None
            process.go_on()
        self.world.net.heal_all()
        self.world.net.delays = Delays(spike_share=0.0)

    def rank_died(self, rank: RankProcess) -> None:
        """The keeper: starts it again after a while, on a host that has power."""
        if self.shape.restarts and not self._over:
            self.world.sched.at(self.world.rng.choice([0.05, 0.5, 3.0]), self._start_again, rank)

    def _start_again(self, rank: RankProcess) -> None:
        if rank.lives or self._over:
            return
        if self.world.net.hosts_down(rank.host):
            self.world.sched.at(0.5, self._start_again, rank)
            return
        self.world.journal.count("rank started again")
        rank.start()

    def end(self) -> None:
        """Nobody is started again any more."""
        self._over = True

    def _power_cut(self) -> bool:
        """A host goes dark, with all that runs there."""
        rng, net = self.world.rng, self.world.net
        hosts = sorted({rank.host for rank in self.ranks if rank.lives})
        if not hosts or (len(hosts) < 2 and not self.shape.restarts):
            return False
        host = rng.choice(hosts)
        net.power(host, False)
        for rank in self.ranks:
            if rank.host == host:
                rank.power_cut = True
                rank.kept &= rank.acked  # of one that was dead already
                if rank.platter is not None:
                    rank.platter.power_cut()
        for process in list(self.world.sched.processes):
            if process.host == host:
                process.kill()
        self.world.sched.at(rng.uniform(0.5, 5.0), net.power, host, True)
        return True

    def _disk(self, what: Callable[[Platter], bool]) -> bool:
        platters = [self.world.platters[name] for name in sorted(self.world.platters)]
        return bool(platters) and what(self.world.rng.choice(platters))

    def _until_s(self) -> float:
        return self.world.sched.now_s + self.world.rng.uniform(0.2, 4.0)

    def _slow(self, platter: Platter) -> bool:
        platter.slow_until_s = self._until_s()
        return True

    def _fails(self, platter: Platter) -> bool:
        platter.failing_until_s = self._until_s()
        return True

    def _full(self, platter: Platter) -> bool:
        platter.full_until_s = self._until_s()
        return True

    def _lies(self, platter: Platter) -> bool:
        platter.lies = True
        return True

    def _rank_dies(self) -> bool:
        living = [rank for rank in self.ranks if rank.lives]
        if not living or (len(living) < 2 and not self.shape.restarts):
            return False
        return self._dies(self.world.rng.choice(living).process)

    def _client_dies(self) -> bool:
        living = [client.process for client in self.clients if not client.process.dead]
        return bool(living) and self._dies(self.world.rng.choice(living))

    def _dies(self, process: Process | None) -> bool:
        assert process is not None
        process.dies_at_call = process.calls + self.world.rng.randint(1, CALLS_AHEAD_MAX)
        return True

    def _rank_hangs(self) -> bool:
        living = [rank.process for rank in self.ranks if rank.lives]
        return bool(living) and self._hangs(self.world.rng.choice(living))

    def _client_hangs(self) -> bool:
        living = [client.process for client in self.clients if not client.process.dead]
        return bool(living) and self._hangs(self.world.rng.choice(living))

    def _hangs(self, process: Process | None) -> bool:
        assert process is not None
        rng = self.world.rng
        process.stops_at_call = process.calls + rng.randint(1, CALLS_AHEAD_MAX)
        process.stops_for_s = rng.choice([0.05, 0.5, 2.0, 8.0]) * rng.uniform(0.5, 1.5)
        return True

    def _path_cut(self) -> bool:
        hosts = sorted({process.host for process in self.world.sched.processes if not process.dead})
        if len(hosts) < 2:
            return False
        here, there = self.world.rng.sample(hosts, 2)
        self.world.net.cut(here, there)
        for_s = self.world.rng.choice([0.1, 1.0, 5.0, 15.0]) * self.world.rng.uniform(0.5, 1.5)
        self.world.sched.at(for_s, self.world.net.heal, here, there)
        return True

    def _stream_breaks(self, only: int | None) -> bool:
        """Between hosts: a Unix socket breaks only when one of its ends is closed."""
        streams = [stream for stream in self.world.net.streams if len(set(stream.hosts)) == 2]
        if not streams:
            return False
        self.world.rng.choice(streams).break_off(only)
        return True
