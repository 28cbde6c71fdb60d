"""Rank processes: the production `Rank`, started, killed, stopped and asked about."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvtool.errors import KvtoolError
from kvtool.kv.block import BlockKey
from kvtool.kv.record import Commit
from kvtool.kv.store import Store
from kvtool.pool.config import PoolConfig, RankConfig
from kvtool.pool.directory import segment_size
from kvtool.pool.filetier import file_path
from kvtool.pool.meeting import Joining
from kvtool.pool.names import STATE
from kvtool.pool.rank import Rank
from kvtool.pool.state import RankState
from kvtool.sim.sched import Process, Task
from kvtool.sim.shape import Shape
from kvtool.sim.world import World
from kvtool.transfer.filehead import PAGE, page_up

MPI_NOTICE_S = 0.1
"""When MPI tells the others of a death."""


class Watch:
    """ULFM's notices, in the place of `MpiWatch`."""

    def __init__(self, ranks: list[RankProcess], world: World) -> None:
        self._ranks, self._world = ranks, world

    def failed(self) -> set[int]:
        now_s = self._world.sched.now_s
        return {rank.number for rank in self._ranks if rank.died_s is not None and now_s - rank.died_s > MPI_NOTICE_S}


class Together:
    """A `pool.meeting.Meeting`: all ranks of a fresh pool, as `MpiMeeting` has them meet under one mpiexec."""

    incarnation, alone = 1, False

    def __init__(self, world: World, ranks: list[RankProcess], number: int) -> None:
        self._world, self._ranks, self.rank = world, ranks, number
        self.watch: Any = Watch(ranks, world)

    def meet(self, mine: RankState) -> list[RankState]:
        me = self._ranks[self.rank]
        me.told, me.gathering = mine, self._world.sched.current
        while any(rank.told is None for rank in self._ranks):
            self._world.sched.call()
            self._world.sched.park()
        for rank in self._ranks:
            if rank.gathering is not None:
                self._world.sched.wake(rank.gathering)
        me.gathering = None
        return copy.deepcopy([rank.told for rank in self._ranks if rank.told is not None])


class RankProcess:
    """One rank of the pool, through all its incarnations."""

    def __init__(self, world: World, shape: Shape, number: int, host: str, run_dir: str) -> None:
        self.world, self.shape, self.number, self.host, self._run_dir = world, shape, number, host, run_dir
        self.name = f"rank{number}"
        self.process: Process | None = None
        self.rank: Rank | None = None
        self.told: RankState | None = None
        self.gathering: Task | None = None
        self.died_s: float | None = None
        self.acked: set[BlockKey] = set()
        """What clients were told is durable here."""
        self.committed: set[BlockKey] = set()
        """What was ever stored here."""
        self.kept: set[BlockKey] = set()
        """What its file must still have when it starts again."""
        self.power_cut = False
        self.on_death: Callable[[RankProcess], None] = lambda rank: None
        self.on_recovery: Callable[[RankProcess, Store], None] = lambda rank, store: None

    @property
    def platter(self) -> Any:
        """Its file's medium; None when it has none."""
        return self.world.platters.get(str(file_path(Path(self._run_dir), "sim", self.number)))

    @property
    def lives(self) -> bool:
        return self.process is not None and not self.process.dead

    @property
    def store(self) -> Store | None:
        return self.rank.tiers.store if self.lives and self.rank is not None else None

    def start(self, ranks: list[RankProcess] | None = None) -> None:
        """With all others at once, or (None) alone: again, or as a newcomer."""
        self.process = self.world.sched.process(self.name, self.host)
        self.process.clock_offset_s = self.world.rng.uniform(0.0, 1000.0)
        self.process.at_exit.append(self._died)
        self.died_s = None
        self.rank, self.power_cut = None, False
        config, process = self._config(), self.process

        def run() -> None:
            try:
                meeting = Joining(config, self.number) if ranks is None else Together(self.world, ranks, self.number)
                rank = Rank(config, meeting)
            except KvtoolError as error:  # as `main` does
                self.world.journal.log("not started", self.name, str(error)[:80])
                self.world.journal.count("rank not started")
                process.kill()
                return
            self.rank = rank
            self._watch_commits(rank.tiers.store)
            self.on_recovery(self, rank.tiers.store)
            rank.run()
            rank.clean_up()
            self.world.journal.log("ended", self.name)
            process.kill()

        self.process.spawn(run, "main")

    def _watch_commits(self, store: Store) -> None:
        """Note what this rank ever stored: an oracle compares that with what clients were told."""
        commit = store.commit

        def noted(owner: int, slot: int, *rest: Any) -> Commit:
            done = commit(owner, slot, *rest)
            entry = store._at[slot]
            if done is Commit.STORED and entry is not None:
                self.committed.add(entry.key)
            return done

        store.commit = noted  # type: ignore[method-assign, assignment]

    def _died(self) -> None:
        self.died_s = self.world.sched.now_s
        self.on_death(self)

    def _config(self) -> RankConfig:
        shape = self.shape
        size = shape.layout.block_size
        given: dict[str, Any] = {
            "run_dir": self._run_dir,
            "state_file": f"{self._run_dir}/{STATE}",
            "file_dir": self._run_dir,
            "prefix": f"sim{self.world.seed % 2**32:08x}",
            "name": "sim",
            "key": "00" * 32,
            "base": 1,
            "layout": asdict(shape.layout),
            "dram_size": segment_size(shape.slots, size, shape.file_slots),
            "file_size": (shape.file_slots + 1) * (PAGE + page_up(size)) if shape.file_slots else 0,
            "write": shape.write,
            "flush_s": 5.0,
            "lease_term_s": shape.lease_term_s,
            "reserve_term_s": shape.reserve_term_s,
            "ucx": True,
            "host": self.host,
            "copies": shape.copies,
            "copy_rate": 2.0**24,
        }
        usual = PoolConfig(shape.layout)
        rest = {f.name: getattr(usual, f.name) for f in fields(RankConfig) if f.name not in given}
        return RankConfig(**given, **rest)
