"""Membership: who of the pool's ranks lives, and which epoch that makes.

Two ways to hear of a death: the socket between every two ranks closes (milliseconds), and Open MPI's ULFM reports a
failed process (it watches hosts as well). MPI is asked a few times a second without waiting; a blocking MPI call would
spin on a whole core. The epoch is the start's plus the number of dead, so survivors that know the same dead agree
without talking. The lowest live rank rewrites the state file.

A hung rank is no dead one: it may go on. Ranks ping each other and report who does not answer; clients skip such a
rank by themselves (circuit breaker) and placement stays as it is.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtool.errors import ProtocolError
from kvtool.pool import wire
from kvtool.pool.loop import Connection, Loop, short_path
from kvtool.pool.state import PoolState, write_state
from kvtool.pool.wire import Message, Op, Status

log = logging.getLogger("kvtool.pool")

MPI_POLL_S = 0.2
PING_S = 1.0
HUNG_S = 3.0
CONNECT_TIMEOUT_S = 5.0


class MpiWatch:
    """Failure notices of ULFM, by polling. `communicator`: an `mpi4py.MPI.Comm` with ERRORS_RETURN."""

    def __init__(self, communicator: Any) -> None:
        self._comm = communicator
        self._failed: set[int] = set()
        self._told = False

    def failed(self) -> set[int]:
        """Ranks that MPI knows to have failed; never waits."""
        from mpi4py import MPI

        try:
            self._comm.Iprobe()  # lets MPI make progress on its notices
        except MPI.Exception:
            pass  # a failed peer makes probing for any source an error
        try:
            group = self._comm.Get_failed()
            count = group.Get_size()
            if count > len(self._failed):
                ranks = MPI.Group.Translate_ranks(group, range(count), self._comm.Get_group())
                self._failed.update(int(rank) for rank in ranks)
        except MPI.Exception as error:
            if not self._told:
                self._told = True  # once: this is asked five times a second
                log.warning("mpi cannot tell who failed, sockets still do why=%r", str(error))
        return self._failed


class Membership:
    """This rank's view of all ranks. `state` is shared with whoever answers clients."""

    def __init__(self, rank: int, state: PoolState, state_file: Path, watch: MpiWatch | None) -> None:
        self.rank, self.state, self._file, self._watch = rank, state, state_file, watch
        self._base_epoch = state.epoch
        self._dead: set[int] = set()
        self._links: dict[int, Connection] = {}
        self._pinged_s = self._polled_s = 0.0
        self.leaving = False
        self.on_death: Callable[[int], None] = lambda rank: None

    @property
    def epoch(self) -> int:
        return self.state.epoch

    def connect(self, loop: Loop, key: bytes, fingerprint: str) -> None:
        """Link up with every higher rank; the lower ones link up with us. All listen already."""
        for peer in self.state.ranks[self.rank + 1 :]:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(CONNECT_TIMEOUT_S)
            try:
                if peer.host == self.state.ranks[self.rank].host:
                    with short_path(Path(peer.unix)) as name:
                        sock.connect(name)
                else:
                    sock.close()
                    sock = socket.create_connection(peer.tcp, CONNECT_TIMEOUT_S)
                self._introduce(sock, key, fingerprint)
            except (OSError, ProtocolError) as error:
                sock.close()
                log.warning("no link to rank %d why=%r", peer.rank, str(error))
                continue
            link = loop.adopt(sock)
            link.admitted, link.peer_rank, link.name = True, peer.rank, f"rank {peer.rank}"
            self._links[peer.rank] = link

    def _introduce(self, sock: socket.socket, key: bytes, fingerprint: str) -> None:
        """Answer the greeting, which a listening rank sends as soon as its loop runs."""
        splitter = wire.Splitter()
        greeting: list[Message] = []
        while not greeting:
            data = sock.recv(4096)
            if not data:
                raise ProtocolError("it closed the link before greeting")
            greeting = splitter.feed(data)
        nonce = wire.unpack_nonce(greeting[0].body)
        hello = {"proof": wire.proof(key, nonce), "fingerprint": fingerprint, "name": f"rank {self.rank}"}
        sock.sendall(wire.frame(Op.HELLO, 1, self.epoch, wire.pack_map({**hello, "peer": self.rank})))

    def linked(self, link: Connection) -> None:
        """A lower rank introduced itself."""
        assert link.peer_rank is not None
        self._links[link.peer_rank] = link

    def answered(self, link: Connection, message: Message) -> bool:
        """Whether this message was an answer to one of ours."""
        if self._links.get(link.peer_rank if link.peer_rank is not None else -1) is not link:
            return False
        if message.op is Op.HELLO:
            if message.status is not Status.OK:
                log.warning("rank %s refused the link why=%r", link.peer_rank, message.body.decode(errors="replace"))
            return True
        return message.op is Op.PING and message.request == 0

    def closed(self, link: Connection) -> None:
        if link.peer_rank is not None and self._links.get(link.peer_rank) is link:
            del self._links[link.peer_rank]
            self._died(link.peer_rank, "its link closed")

    def tick(self, now_s: float) -> float:
        """Ask MPI and ping the others when it is time; when to come again."""
        if now_s - self._polled_s >= MPI_POLL_S:
            self._polled_s = now_s
            if self._watch is not None:
                for rank in sorted(self._watch.failed() - self._dead):
                    self._died(rank, "MPI reported its failure")
        if now_s - self._pinged_s >= PING_S:
            self._pinged_s = now_s
            for link in list(self._links.values()):
                link.send(Op.PING, 0)  # both sides send; hearing anything at all is the answer
        return self._polled_s + MPI_POLL_S

    def hung(self, now_s: float) -> list[int]:
        """Live ranks that have not been heard of for too long."""
        return sorted(rank for rank, link in self._links.items() if now_s - link.heard_s > HUNG_S)

    def publish(self) -> None:
        """Write the state file, if that is ours to do."""
        live = [rank.rank for rank in self.state.ranks if rank.alive]
        if live and live[0] == self.rank:
            write_state(self._file, self.state)

    def _died(self, rank: int, how: str) -> None:
        if rank in self._dead or rank == self.rank or self.leaving:
            return
        self._dead.add(rank)
        self.state.ranks[rank].alive = False
        self.state.epoch = self._base_epoch + len(self._dead)
        log.warning("rank died rank=%d how=%r epoch=%d", rank, how, self.epoch)
        self.publish()
        self.on_death(rank)
