"""Client processes: the production `PoolClient` under a workload that reads, writes, dawdles and dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtool.kv.block import BlockKey
from kvtool.pool.base import Outcome, Put
from kvtool.pool.client import PoolClient
from kvtool.pool.names import STATE
from kvtool.sim.blocks import LENGTH, chains, content, short
from kvtool.sim.oracles import Oracles
from kvtool.sim.sched import Process
from kvtool.sim.shape import Shape
from kvtool.sim.world import World

BUDGETS_S = (0.2, 1.0, 3.0)
CALM_BUDGET_S = 5.0
_T = TypeVar("_T")


class ClientProcess:
    """One client. `ending` tells its threads to finish what they do and leave."""

    def __init__(
        self, world: World, shape: Shape, oracles: Oracles, number: int, host: str, path: str, run_dir: str
    ) -> None:
        self.world, self.shape, self.oracles = world, shape, oracles
        self._state_file = Path(run_dir, STATE)
        self.name, self.path = f"client{number}", path
        self.process: Process = world.sched.process(self.name, host)
        self.process.clock_offset_s = world.rng.uniform(0.0, 1000.0)
        self.ending = False
        self.running = 0
        self.prompt = shape.calm
        """Whether it never dawdles while it writes."""
        self.calls = 0
        self.pool: PoolClient | None = None
        self._idle_s = 0.0  # time that is not the pool's: in `fill`, or while this process was stopped
        self.size = shape.layout.block_size

    def start(self, threads: int) -> None:
        self.process.spawn(lambda: self._main(threads), "main")

    def _main(self, threads: int) -> None:
        self._open()
        for number in range(1, threads):
            self.process.spawn(self._work, f"thread{number}")
        self._work()

    def _open(self) -> None:
        self.pool = PoolClient(self._state_file, self.shape.layout, path=self.path, client_name=self.name)

    def _work(self) -> None:
        self.running += 1
        rng, sched = self.world.rng, self.world.sched
        while True:
            sched.call()
            sched.sleep(rng.expovariate(1 / self.shape.think_s))
            if self.ending:
                break
            self.calls += 1
            keys = chains()[rng.randrange(len(chains()))]
            deeds = (self._read, self._write, self._write, self._match, self._dawdle, self._transient, self._alive)
            rng.choices(deeds, (6, 3, 3, 1, 1, 1, 0.3))[0](keys[: rng.randint(1, LENGTH)])
        self.running -= 1
        if not self.running:
            self.close()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def _budget_s(self) -> float:
        return CALM_BUDGET_S if self.shape.calm else self.world.rng.choice(BUDGETS_S)

    # Deeds

    def _bounded(self, what: str, budget_s: float, call: Callable[[], _T]) -> _T:
        sched = self.world.sched
        began_s, idle_s, stopped_s = sched.now_s, self._idle_s, self.process.stopped_s
        found = call()
        mine_s = (self._idle_s - idle_s) + (self.process.stopped_s - stopped_s)
        self.oracles.bounded(f"{self.name} {what}", budget_s, sched.now_s - began_s - mine_s)
        return found

    def put(self, key: BlockKey, parent: BlockKey | None, transient_s: float | None = None) -> Put:
        def fill(room: memoryview) -> None:
            """In pieces, as memcpy is not atomic; sometimes slower than the reservation lasts."""
            sched, rng, data = self.world.sched, self.world.rng, content(key, self.size)
            began_s = sched.now_s
            half = rng.randrange(self.size)
            sched.call()
            room[:half] = data[:half]
            if rng.random() < 0.02 and not self.prompt:
                self.world.journal.count("client: slow writer")
                sched.sleep(rng.uniform(0.5, 3.0) * self.shape.reserve_term_s)
            elif rng.random() < 0.3:
                sched.sleep(rng.uniform(0, 0.001))
            sched.call()
            room[half:] = data[half:]
            self._idle_s += sched.now_s - began_s

        return Put(key, self.size, fill, parent, transient_s)

    def _write(self, keys: list[BlockKey]) -> None:
        self.write(keys, self._budget_s())

    def write(self, keys: list[BlockKey], budget_s: float, transient_s: float | None = None) -> list[Outcome]:
        assert self.pool is not None
        pool = self.pool
        puts = [self.put(key, keys[at - 1] if at else None, transient_s) for at, key in enumerate(keys)]
        results = self._bounded("write", budget_s, lambda: pool.write(puts, budget_s))
        outcomes = [result.outcome for result in results]
        for key, result in zip(keys, results, strict=True):
            self.oracles.put(self, key, result, transient_s)
        counted = [f"{outcomes.count(kind)} {kind.value}" for kind in Outcome if kind in outcomes]
        counted += sorted({result.reason[:70] for result in results if result.reason})
        self.world.journal.log("wrote", self.name, short(keys[-1]), len(keys), *counted)
        return outcomes

    def _read(self, keys: list[BlockKey]) -> None:
        self.read(keys, self._budget_s())

    def read(self, keys: list[BlockKey], budget_s: float, use_s: float | None = None) -> int:
        """How many blocks were read whole; each is compared with what its key says."""
        assert self.pool is not None
        pool, sched, rng = self.pool, self.world.sched, self.world.rng
        misses = dict(pool.counts().misses)
        with self._bounded("read", budget_s, lambda: pool.read(keys, budget_s)) as found:
            copies = []
            for block in found.blocks:
                half = rng.randrange(self.size)
                first = bytes(block.data[:half])
                if use_s is not None or rng.random() < 0.2:
                    sched.call()
                    sched.sleep(rng.uniform(0, 0.002) if use_s is None else use_s / len(found.blocks))
                copies.append(first + bytes(block.data[half:]))
            whole = found.whole()
            for block, copy in zip(found.blocks[:whole], copies, strict=False):
                self.oracles.served(self, block.key, copy, block)
        missed = sorted(f"{count - misses.get(why, 0)} {why}" for why, count in pool.counts().misses.items())
        missed = [miss for miss in missed if not miss.startswith("0 ")]
        self.world.journal.log(
            "read", self.name, short(keys[-1]), len(keys), "whole", whole, "of", len(found.blocks), *missed
        )
        if whole < len(found.blocks):
            self.world.journal.count("client: read outlived its lease")
        return whole

    def _dawdle(self, keys: list[BlockKey]) -> None:
        """Use blocks for about as long as the lease lasts, or longer."""
        self.read(keys, 0.5, self.world.rng.uniform(0.5, 3.0) * self.shape.lease_term_s)

    def _match(self, keys: list[BlockKey]) -> None:
        assert self.pool is not None
        pool = self.pool
        count = self._bounded("match", 0.5, lambda: pool.match(keys, 0.5))
        self.world.journal.log("match", self.name, short(keys[-1]), count)

    def _transient(self, keys: list[BlockKey]) -> None:
        assert self.pool is not None
        pool, rng = self.pool, self.world.rng
        self.write(keys[-1:], self._budget_s(), rng.choice([0.1, 1.0, 10.0]))
        if rng.random() < 0.5:
            self._bounded("drop", 0.5, lambda: pool.drop(keys[-1:], 0.5))

    def _alive(self, _: list[BlockKey]) -> None:
        assert self.pool is not None
        self._bounded("alive", 2.0, self.pool.alive)
