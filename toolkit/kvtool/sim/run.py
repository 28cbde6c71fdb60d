"""One run: a pool, its clients and their troubles, from one seed. What comes back says whether an oracle spoke."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from kvtool.pool.names import CONFIG
from kvtool.sim.blocks import NEW_KEY
from kvtool.sim.client import ClientProcess
from kvtool.sim.faults import Faults
from kvtool.sim.oracles import Oracles
from kvtool.sim.rank import RankProcess
from kvtool.sim.sched import Broken
from kvtool.sim.shape import Shape, shape_of
from kvtool.sim.system import installed
from kvtool.sim.world import World, enter, leave

START_S = 2.0
LEAVE_S = 40.0
"""For clients to end what they do: longer than any call and any use of a read."""
SETTLE_S = 16.0
"""For survivors to agree, and what the dead held to be free: keepalive takes 11 s, and slots settle for 2 s more."""
PROBE_S = 60.0
AGREE_LOOKS_MAX = 50
"""Half a second each; newcomers take on more keys for 14 s, and each step is another view."""
TERMS_S, QUIET_S = 6.0, 90.0
"""Longer than the terms of a run, and than anything at all that may be held here: near copies live for 60 s."""


@dataclass
class Result:
    seed: int
    digest: str
    lines: int
    virtual_s: float
    calls: int
    counts: Counter[str]
    broken: str = ""
    tail: list[str] = field(default_factory=list)
    """The last events, or all, if they were asked for."""


class Run:
    """The pool of one seed, inside `installed()`."""

    def __init__(self, seed: int, run_dir: str, steps: int | None = None) -> None:
        self.world = World(seed, shape_of(Random(seed), steps).delays)
        self.shape: Shape = shape_of(Random(seed), steps)
        self._run_dir = run_dir
        self.world.block_size = self.shape.layout.block_size
        self.oracles = Oracles(self.world, self.shape)
        hosts = [f"host{number}" for number in range(self.shape.hosts)]
        rng = self.world.rng
        self.ranks = [
            RankProcess(self.world, self.shape, number, rng.choice(hosts), run_dir)
            for number in range(self.shape.ranks)
        ]
        self.oracles.ranks = self.ranks
        self.clients = [self._client(number, rng.choice(hosts)) for number in range(self.shape.clients)]
        self.faults = Faults(self.world, self.shape, self.ranks, self.clients)
        self.world.sched.after = self.oracles.stepped
        for rank in self.ranks:
            rank.on_death, rank.on_recovery = self._died, self.oracles.recovered

    def _died(self, rank: RankProcess) -> None:
        self.oracles.died(rank)
        self.faults.rank_died(rank)

    def _client(self, number: int, host: str) -> ClientProcess:
        path = self.world.rng.choice(["auto", "auto", "ucx"])
        return ClientProcess(self.world, self.shape, self.oracles, number, host, path, self._run_dir)

    def play(self) -> None:
        """
        Raises:
            Broken: an oracle spoke.
        """
        sched, shape = self.world.sched, self.shape
        for rank in self.ranks:
            rank.start(self.ranks)
        sched.run(START_S)
        for client in self.clients:
            client.start(shape.threads)
        self.faults.start(max(0.05, shape.lasting_s / self.world.rng.randint(2, 10)))
        sched.run(START_S + shape.lasting_s)
        self.faults.heal()
        for client in self.clients:
            client.ending = True
        self._until(lambda: all(not c.running or c.process.dead for c in self.clients), LEAVE_S)
        sched.run(sched.now_s + SETTLE_S)
        self.faults.end()
        self._probe()
        for client in self.clients:
            if not client.process.dead:
                client.process.kill()
        sched.run(sched.now_s + TERMS_S)
        self._until(lambda: self.oracles.nothing_held, QUIET_S)
        self.oracles.quiet()

    def _until(self, done: Callable[[], bool], limit_s: float) -> None:
        sched = self.world.sched
        until_s = sched.now_s + limit_s
        while sched.now_s < until_s and not done():
            sched.run(min(until_s, sched.now_s + 0.5))

    def _probe(self) -> None:
        """After all troubles the pool must be of use again: a new client's block is stored, and read."""
        client = self._client(len(self.clients), self.ranks[0].host)
        self.clients.append(client)
        client.prompt = True
        keys = [NEW_KEY]
        found: list[int] = []
        epoch: list[int] = []
        done: list[bool] = []

        def probe() -> None:
            client._open()
            client.write(keys, 5.0)
            found.append(client.read(keys, 5.0))
            assert client.pool is not None
            while len(epoch) < AGREE_LOOKS_MAX and not self.oracles.agreed(client.pool._ranks.epoch):
                self.world.sched.call()
                self.world.sched.sleep(0.5)
                client.pool.match(keys)
                epoch.append(client.pool._ranks.epoch)
            done.append(True)
            client.close()

        client.process.spawn(probe, "probe")
        self._until(lambda: bool(done), PROBE_S)
        if any(rank.lives for rank in self.ranks) and found != [len(keys)]:
            raise Broken(f"no recovery: all is healed, and a new client wrote {len(keys)} blocks and read {found}")
        if epoch:
            self.oracles.converged(epoch[-1])
        if self.shape.calm:
            self.oracles.copied()


@contextlib.contextmanager
def prepared() -> Iterator[str]:
    """Stand-ins in place, and a directory for what production code leaves in files, for any number of runs."""
    log = logging.getLogger("kvtool")
    level = log.level
    with tempfile.TemporaryDirectory(prefix="kvtool-sim-") as run_dir, installed():
        log.setLevel(logging.CRITICAL)
        try:
            yield run_dir
        finally:
            log.setLevel(level)


def run_seed(seed: int, run_dir: str, steps: int | None = None, every_line: bool = False) -> Result:
    """Inside `prepared()`, whose directory `run_dir` is. `every_line`: keep the whole journal."""
    with tempfile.TemporaryDirectory(dir=run_dir) as own_dir:
        Path(own_dir, CONFIG).touch()
        return _run_in(own_dir, seed, steps, every_line)


def _run_in(run_dir: str, seed: int, steps: int | None, every_line: bool) -> Result:
    run = Run(seed, run_dir, steps)
    if every_line:
        run.world.journal.keep_all()
    world, broken = run.world, ""
    enter(world)
    try:
        run.play()
    except Broken as error:
        broken = str(error)
        world.journal.log("broken", "oracle", broken)
    finally:
        world.sched.close()
        leave()
    journal = world.journal
    calls = sum(client.calls for client in run.clients)
    tail = list(journal.tail) if broken or every_line else []
    return Result(seed, journal.digest, journal.lines, world.sched.now_s, calls, journal.counts, broken, tail)
