"""Several hosts, simulated: what is read often comes near, drained ranks lose nothing, two copies outlive one death."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from kvtool.pool.base import Path as By
from kvtool.pool.names import CONFIG
from kvtool.pool.wire import Op, pack_map
from kvtool.sim.blocks import chains, content
from kvtool.sim.client import ClientProcess
from kvtool.sim.net import Delays
from kvtool.sim.oracles import Oracles
from kvtool.sim.rank import RankProcess
from kvtool.sim.run import START_S, prepared
from kvtool.sim.shape import shape_of
from kvtool.sim.world import World, enter, leave

SHAPE = replace(
    shape_of(Random(1)), ranks=2, hosts=2, slots=128, faults=frozenset(), copies=1, lease_term_s=5.0, reserve_term_s=5.0
)


class Scene:
    """Ranks on hosts, and one client that does what a test says."""

    def __init__(self, run_dir: str, hosts: list[str], copies: int) -> None:
        self.world = World(7, Delays())
        self.shape = replace(SHAPE, ranks=len(hosts), copies=copies)
        self.oracles = Oracles(self.world, self.shape)
        self.run_dir = run_dir
        self.ranks = [RankProcess(self.world, self.shape, n, host, run_dir) for n, host in enumerate(hosts)]
        self.oracles.ranks = self.ranks
        self.world.sched.after = self.oracles.stepped

    def start(self) -> None:
        for rank in self.ranks:
            rank.start(self.ranks)
        self.world.sched.run(START_S)

    def client(self, host: str, job: Callable[[ClientProcess], None], within_s: float) -> None:
        """Run `job` in a client on `host`, to its end."""
        client = ClientProcess(self.world, self.shape, self.oracles, 0, host, "auto", self.run_dir)
        client.prompt = True
        over: list[bool] = []

        def run() -> None:
            client._open()
            job(client)
            client.close()
            over.append(True)

        client.process.spawn(run, "job")
        self.world.sched.run(self.world.sched.now_s + within_s)
        assert over, "the job did not end"


@contextmanager
def scene(hosts: list[str], copies: int = 1) -> Iterator[Scene]:
    with prepared() as base, tempfile.TemporaryDirectory(dir=base) as run_dir:
        Path(run_dir, CONFIG).touch()
        made = Scene(run_dir, hosts, copies)
        enter(made.world)
        try:
            made.start()
            yield made
        finally:
            leave()


def read_by(client: ClientProcess, key: bytes) -> By | None:
    """The way one block came, checked; None: it is not there."""
    assert client.pool is not None
    with client.pool.read([key], 5.0) as read:
        for block in read.blocks:
            assert bytes(block.data) == content(key, client.size)
            return block.path
    return None


def test_what_a_host_reads_often_is_copied_there_and_goes_when_it_is_not_read_any_more():
    ways: list[By | None] = []

    def job(client: ClientProcess) -> None:
        assert client.pool is not None
        keys = [key for chain in chains() for key in chain]
        far = next(key for key in keys if client.pool._ranks._placement.owner(key) == 0)
        client.write([far], 5.0)
        for _ in range(20):
            ways.append(read_by(client, far))
            client.world.sched.sleep(0.05)
        client.world.sched.sleep(100.0)
        ways.append(read_by(client, far))

    with scene(["here", "there"]) as pool:
        pool.client("there", job, 200.0)
        stores = [rank.store for rank in pool.ranks]
        assert ways[0] is By.UCX and ways[-2] is By.SHM and ways[-1] is By.UCX
        assert 8 <= ways.index(By.SHM) <= 15 and set(ways[ways.index(By.SHM) : -1]) == {By.SHM}
        assert [len(store.resident()) for store in stores if store is not None] == [1, 0], "the copy ended by the clock"


def test_a_rank_that_drains_hands_everything_on_and_nobody_misses_it_meanwhile():
    missed: list[bytes] = []

    def job(client: ClientProcess) -> None:
        assert client.pool is not None
        keys = [chain[-1] for chain in chains()]
        client.write(keys, 5.0)
        access = client.pool._ranks.named(0)
        assert access is not None
        access.link.call(Op.DRAIN, pack_map({}), client.pool._ranks.now_s() + 5.0)
        for _ in range(30):
            missed.extend(key for key in keys if read_by(client, key) is None)
            client.world.sched.sleep(0.1)

    with scene(["here", "there", "there"]) as pool:
        pool.client("there", job, 60.0)
        drained = pool.ranks[0].rank
        assert drained is not None and drained.copier is not None
        assert missed == [] and drained.copier.status()["empty"]
        rest = [rank.store.resident() for rank in pool.ranks[1:] if rank.store is not None]
        assert all(any(chain[-1] in store for store in rest) for chain in chains())


def test_with_two_copies_the_death_of_a_rank_costs_no_block():
    found: list[int] = []

    def job(client: ClientProcess) -> None:
        keys = [chain[-1] for chain in chains()]
        client.write(keys, 5.0)
        client.world.sched.sleep(2.0)
        found.append(sum(read_by(client, key) is not None for key in keys))
        dying.kill()
        found.append(sum(read_by(client, key) is not None for key in keys))
        client.world.sched.sleep(5.0)
        found.append(sum(read_by(client, key) is not None for key in keys))

    with scene(["a", "b", "c"], copies=2) as pool:
        assert pool.ranks[1].process is not None
        dying = pool.ranks[1].process
        pool.client("a", job, 60.0)
        assert found == [len(chains())] * 3
        left = [rank.store.resident() for rank in pool.ranks if rank.store is not None]
        assert len(left) == 2 and all(chain[-1] in store for store in left for chain in chains())
