"""One-sided transfers, in the place of NIXL: bytes copied piece by piece, while both sides do other things.

The production `UcxReader` runs on this, with what was seen of NIXL 1.5: over TCP the owner's own hands move the bytes,
so nothing moves while it hangs or does not call progress; a transfer that was given up still happens later; a dead peer
is an error. Pieces make torn reads and late writes possible, which is what checksums and quarantines are for.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgpack

from kvtool.sim.net import KEEPALIVE_S
from kvtool.sim.sched import Process
from kvtool.transfer.nixl import Metadata

if TYPE_CHECKING:
    from kvtool.sim.world import World

PROGRESS_S = 0.05
"""An owner that called progress that lately moves bytes."""
RETRY_S = (0.001, 0.05)
PIECES_MAX = 3


class Disconnected(Exception):
    """NIXL's nixlRemoteDisconnectError."""


class NotFound(Exception):
    """NIXL's nixlNotFoundError."""


class BackendError(Exception):
    """NIXL's nixlBackendError."""


class Transfer:
    """A posted read or write: pairs of (local address, remote address, size)."""

    def __init__(self, agent: Agent, operation: str, moves: list[tuple[int, int, int]], owner: Agent | None) -> None:
        self.agent, self.operation, self.owner = agent, operation, owner
        self.state = "PROC"
        self._stuck_since_s: float | None = None
        rng = agent.world.rng
        self._pieces: list[tuple[int, int, int]] = []
        for local, remote, size in moves:
            cuts = sorted({0, size, *(rng.randrange(size) for _ in range(rng.randint(0, PIECES_MAX - 1)))})
            self._pieces += [(local + a, remote + a, b - a) for a, b in itertools.pairwise(cuts)]
        if rng.random() < 0.3:
            rng.shuffle(self._pieces)

    def release(self) -> None:
        """Stops nothing, as in NIXL."""

    def post(self) -> None:
        self.agent.world.sched.at(self._delay_s(), self._step, RETRY_S[0])

    def _delay_s(self) -> float:
        assert self.owner is not None
        return self.agent.world.net.delay_s(self.agent.process.host, self.owner.process.host)

    def _step(self, retry_s: float) -> None:
        """Move the next piece, if there are hands to move it."""
        assert self.owner is not None
        world, owner = self.agent.world, self.owner
        cut = world.net.is_cut(self.agent.process.host, owner.process.host)
        if owner.process.dead and not cut:
            self.state = "ERR"
        elif cut and self.agent.process.dead:
            self.state = "ERR"  # what its kernel had not sent yet is lost
        elif cut or owner.process.stopped or self.agent.process.stopped or not owner.makes_progress():
            self._wait(cut, retry_s)
        else:
            self._stuck_since_s = None
            self._move(*self._pieces.pop(0))
            if self._pieces:
                world.sched.at(self._delay_s() / 4, self._step, RETRY_S[0])
            else:
                self.state = "DONE"

    def _wait(self, cut: bool, retry_s: float) -> None:
        world = self.agent.world
        if cut and self._stuck_since_s is None:
            self._stuck_since_s = world.sched.now_s
        if cut and self._stuck_since_s is not None and world.sched.now_s - self._stuck_since_s > KEEPALIVE_S:
            self.state = "ERR"
            world.journal.count("one-sided: gave up in a cut")
            return
        world.sched.at(retry_s, self._step, min(2 * retry_s, RETRY_S[1]))

    def _move(self, local: int, remote: int, size: int) -> None:
        assert self.owner is not None
        if self.operation == "WRITE":
            ctypes.memmove(remote, local, size)
            self.owner.written(remote, size)
            if self.agent.process.dead:
                self.agent.world.journal.count("one-sided: write of a dead client arrived")
        else:
            ctypes.memmove(local, remote, size)


class Agent:
    """What `make_agent` gives; the names are NIXL's."""

    def __init__(self, world: World, name: str, process: Process) -> None:
        self.world, self.name, self.process = world, name, process
        self.backends = {"UCX": "UCX"}
        self.agent = self
        self.progressed_s = -1.0
        self.address = 0
        self.writes: list[tuple[float, int, int]] = []
        """One-sided writes into this agent's memory: (when, address, size)."""
        world.agents[name] = self

    def register_memory(self, regions: Sequence[Any], kind: str) -> Any:
        return regions

    def deregister_memory(self, regions: Any) -> None:
        self.world.agents.pop(self.name, None)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def getNotifs(self, notes: Any, handles: Any) -> None:
        self.progressed_s = self.world.sched.now_s

    def makes_progress(self) -> bool:
        return self.world.sched.now_s - self.progressed_s <= PROGRESS_S

    def written(self, address: int, size: int) -> None:
        self.writes.append((self.world.sched.now_s, address, size))

    def add_remote_agent(self, metadata: bytes) -> str:
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        pass

    def initialize_xfer(self, operation: str, local: Any, remote: Any, peer: str) -> Transfer:
        self.world.sched.call()
        owner = self.world.agents.get(peer)
        moves = [(here[0], there[0], here[1]) for here, there in zip(local, remote, strict=True)]
        return Transfer(self, operation, moves, owner)

    def transfer(self, handle: Transfer) -> str:
        owner = handle.owner
        if owner is None:
            raise NotFound
        if owner.process.dead and not self.world.net.is_cut(self.process.host, owner.process.host):
            raise Disconnected
        self.world.journal.count(f"one-sided: {handle.operation.lower()}")
        handle.post()
        return handle.state

    def check_xfer_state(self, handle: Transfer) -> str:
        if handle.state == "ERR":
            raise Disconnected
        return handle.state


class Nixl:
    """The module `transfer.nixl`."""

    def __init__(self, here: Callable[[], World]) -> None:
        self._here = here
        self._bind = SimpleNamespace(
            DRAM_SEG="DRAM",
            nixlXferDList=lambda kind, ranges: ranges,
            nixlRemoteDisconnectError=Disconnected,
            nixlNotFoundError=NotFound,
            nixlBackendError=BackendError,
        )

    def make_agent(self, name: str) -> Agent:
        return Agent(self._here(), name, self._here().process)

    def load(self) -> Any:
        return SimpleNamespace(nixlBind=self._bind)

    def pack(self, agent: str, address: int, size: int, ucx: bytes) -> bytes:
        self._here().agents[agent].address = address  # which is not the same in another run
        packed: bytes = msgpack.packb([agent, size, ucx])
        return packed

    def unpack(self, raw: bytes) -> Metadata:
        agent, size, ucx = msgpack.unpackb(raw)
        owner = self._here().agents.get(agent)
        return Metadata(agent, owner.address if owner is not None else 0, size, ucx)
