"""Rank processes: the production `Rank`, started, killed, stopped and asked about."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvtool.kv.store import Store
from kvtool.pool.config import RankConfig
from kvtool.pool.directory import segment_size
from kvtool.pool.rank import Rank
from kvtool.sim.sched import Process, Task
from kvtool.sim.shape import Shape
from kvtool.sim.world import World

STATE_FILE = "/sim/pool.json"
MPI_NOTICE_S = 0.1
"""When MPI tells the others of a death."""


class Watch:
    """ULFM's notices, in the place of `MpiWatch`."""

    def __init__(self, ranks: list[RankProcess], world: World) -> None:
        self._ranks, self._world = ranks, world

    def failed(self) -> set[int]:
        now_s = self._world.sched.now_s
        return {rank.number for rank in self._ranks if rank.died_s is not None and now_s - rank.died_s > MPI_NOTICE_S}


class Communicator:
    """The two things that a rank asks of MPI: who it is, and where everybody is, once."""

    def __init__(self, world: World, ranks: list[RankProcess], number: int) -> None:
        self._world, self._ranks, self._number = world, ranks, number

    def Get_rank(self) -> int:  # noqa: N802  # its name in mpi4py
        return self._number

    def allgather(self, mine: Any) -> list[Any]:
        me = self._ranks[self._number]
        me.told = mine
        me.gathering = self._world.sched.current
        while any(rank.told is None for rank in self._ranks):
            self._world.sched.call()
            self._world.sched.park()
        for rank in self._ranks:
            if rank.gathering is not None:
                self._world.sched.wake(rank.gathering)
        me.gathering = None
        return [rank.told for rank in self._ranks]

    def watch(self) -> Watch:
        return Watch(self._ranks, self._world)


class RankProcess:
    """One rank of the pool, through all its incarnations."""

    def __init__(self, world: World, shape: Shape, number: int, host: str, run_dir: str) -> None:
        self.world, self.shape, self.number, self.host, self._run_dir = world, shape, number, host, run_dir
        self.name = f"rank{number}"
        self.process: Process | None = None
        self.rank: Rank | None = None
        self.told: Any = None
        self.gathering: Task | None = None
        self.died_s: float | None = None

    @property
    def lives(self) -> bool:
        return self.process is not None and not self.process.dead

    @property
    def store(self) -> Store | None:
        return self.rank.tiers.store if self.lives and self.rank is not None else None

    def start(self, ranks: list[RankProcess]) -> None:
        self.process = self.world.sched.process(self.name, self.host)
        self.process.clock_offset_s = self.world.rng.uniform(0.0, 1000.0)
        self.process.at_exit.append(self._died)
        self.died_s = None
        config = self._config()

        def run() -> None:
            self.rank = None
            rank = Rank(config, Communicator(self.world, ranks, self.number))
            self.rank = rank
            rank.run()
            rank.clean_up()

        self.process.spawn(run, "main")

    def _died(self) -> None:
        self.died_s = self.world.sched.now_s

    def _config(self) -> RankConfig:
        shape = self.shape
        size = shape.layout.block_size
        return RankConfig(
            run_dir=self._run_dir,
            state_file=STATE_FILE,
            file_dir=self._run_dir,
            prefix=f"sim{self.world.seed % 2**32:08x}",
            name="sim",
            key="00" * 32,
            epoch=1,
            layout=asdict(shape.layout),
            dram_size=segment_size(shape.slots, size, shape.file_slots),
            file_size=0,
            lease_term_s=shape.lease_term_s,
            reserve_term_s=shape.reserve_term_s,
            ucx=True,
            host=self.host,
        )
