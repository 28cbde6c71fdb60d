"""Ranks of one engine: MPI processes, or threads of one process with the same calls.

A rank has two channels: `host`, for the executor's own collectives, and `device`, for those that the forward pass runs
on its stream. Both are what MPI gives them: every rank calls in the same order.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

WAIT_S = 60.0
_current = threading.local()


class Channel(Protocol):
    def bcast(self, value: Any) -> Any: ...

    def allgather(self, value: Any) -> list[Any]: ...

    def barrier(self) -> None: ...

    def abort(self) -> None:
        """Let no other rank wait for this one."""


class Alone:
    """The channel of a single rank."""

    def bcast(self, value: Any) -> Any:
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return

    def abort(self) -> None:
        return


class Board:
    """Where the threads of `size` ranks leave and read values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.turn = threading.Barrier(size, timeout=WAIT_S)


@dataclass
class Threaded:
    board: Board
    rank: int

    def allgather(self, value: Any) -> list[Any]:
        self.board.values[self.rank] = value
        self.board.turn.wait()
        gathered = list(self.board.values)
        self.board.turn.wait()
        return gathered

    def bcast(self, value: Any) -> Any:
        return self.allgather(value)[0]

    def barrier(self) -> None:
        self.board.turn.wait()

    def abort(self) -> None:
        self.board.turn.abort()


@dataclass
class ByMpi:
    comm: Any

    def bcast(self, value: Any) -> Any:
        return self.comm.bcast(value, root=0)

    def allgather(self, value: Any) -> list[Any]:
        return list(self.comm.allgather(value))

    def barrier(self) -> None:
        self.comm.Barrier()

    def abort(self) -> None:
        """The process ends with its error, and mpiexec ends the others."""


@dataclass
class Rank:
    rank: int
    size: int
    host: Channel
    device: Channel


def alone() -> Rank:
    return Rank(0, 1, Alone(), Alone())


def threaded(size: int) -> list[Rank]:
    host, device = Board(size), Board(size)
    return [Rank(rank, size, Threaded(host, rank), Threaded(device, rank)) for rank in range(size)]


def by_mpi() -> Rank:
    """This process's rank of MPI's world."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return Rank(world.rank, world.size, ByMpi(world.Dup()), ByMpi(world.Dup()))


def enter(rank: Rank) -> None:
    """This thread speaks for `rank` from now on; `mpi_rank` and the others answer for it."""
    _current.rank = rank


def current() -> Rank:
    found: Rank | None = getattr(_current, "rank", None)
    return found or alone()


def mpi_rank() -> int:
    return current().rank


def mpi_world_size() -> int:
    return current().size


def local_mpi_rank() -> int:
    return current().rank


def mpi_broadcast(value: Any, root: int = 0) -> Any:
    assert root == 0, "the executor broadcasts from rank 0 only"
    return current().host.bcast(value)


def mpi_allgather(value: Any) -> list[Any]:
    return current().host.allgather(value)


def mpi_barrier() -> None:
    current().host.barrier()


def mpi_comm() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@dataclass
class Mapping:
    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    gpus_per_node: int = 8
    enable_attention_dp: bool = False

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def local_rank(self) -> int:
        return self.rank % self.gpus_per_node


@dataclass
class _ParallelConfig:
    tp_size: int
    pp_size: int
    cp_size: int
    enable_attention_dp: bool

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size

    def to_mapping(self) -> Mapping:
        sizes = {"tp_size": self.tp_size, "pp_size": self.pp_size, "cp_size": self.cp_size}
        return Mapping(self.world_size, mpi_rank(), enable_attention_dp=self.enable_attention_dp, **sizes)


class Parallel:
    """What LLM arguments say about their ranks."""

    @property
    def parallel_config(self) -> _ParallelConfig:
        given: Any = self
        sizes = (given.tensor_parallel_size, given.pipeline_parallel_size, given.context_parallel_size)
        return _ParallelConfig(*sizes, given.enable_attention_dp)
