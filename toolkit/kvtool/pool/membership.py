"""Membership: who of the pool's ranks lives, and which epoch that makes.

Two things count as a death, and a lost link alone is not one of them: the process of a lost link has ended (on this
host its pid and start time say so, milliseconds after the kernel closed its sockets; on another, nobody listens where
it did), or Open MPI's ULFM reports it (it watches hosts as well). A link that was lost for any other reason, such as a
peer that took our words for nonsense, is dialled again, by the lower of the two: were both to call each other dead,
both would be the lowest live rank and write the state file.

MPI is asked a few times a second without waiting; a blocking MPI call would spin on a whole core. The epoch is the
start's plus the number of dead, so survivors that know the same dead agree without talking. The lowest live rank
rewrites the state file.

A hung rank is no dead one: it may go on. Ranks ping each other and report who does not answer; clients skip such a
rank by themselves (circuit breaker) and placement stays as it is.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.errors import ProtocolError
from kvtool.pool.dial import Dialled, Dialler
from kvtool.pool.loop import Connection, Loop
from kvtool.pool.state import PoolState, runs, write_state
from kvtool.pool.wire import Message, Op, Status

log = logging.getLogger("kvtool.pool")

MPI_POLL_S = 0.2
PING_S = 1.0
HUNG_S = 3.0
SEEK_S, SEEK_MAX_S = 0.01, 1.0
"""How soon, and at longest how often, a rank without a link is looked for."""


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


@dataclass
class _Peer:
    """Another rank. Without a `link` it is looked for at `seek_at_s`, ever more slowly until one holds."""

    link: Connection | None = None
    away_since_s: float = 0.0
    seek_at_s: float = 0.0
    seek_s: float = SEEK_S
    dialling: bool = False


class Membership:
    """This rank's view of all ranks. `state` is shared with whoever answers clients."""

    def __init__(self, rank: int, state: PoolState, state_file: Path, watch: MpiWatch | None) -> None:
        self.rank, self.state, self._file, self._watch = rank, state, state_file, watch
        self._base_epoch = state.epoch
        self._dead: set[int] = set()
        now_s = time.monotonic()
        self._peers = {r.rank: _Peer(None, now_s, now_s) for r in state.ranks if r.rank != rank}
        self._pinged_s = self._polled_s = 0.0
        self.leaving = False

    @property
    def epoch(self) -> int:
        return self.state.epoch

    @property
    def linked(self) -> list[int]:
        """Ranks that there is a link to."""
        return sorted(rank for rank, peer in self._peers.items() if peer.link is not None)

    def connect(self, loop: Loop, key: bytes, fingerprint: str) -> None:
        """Link up with every higher rank, from `tick` on; the lower ones link up with us."""
        self._loop = loop
        hello = {"fingerprint": fingerprint, "name": f"rank {self.rank}", "peer": self.rank}
        self._dialler = Dialler(loop.post, key, hello)

    def admit(self, link: Connection, rank: int) -> None:
        """A lower rank introduces itself.

        Raises:
            ProtocolError: it is not one that may.
        """
        if not 0 <= rank < self.rank or rank in self._dead:
            raise ProtocolError(f"rank {self.rank} wants links from live lower ranks, found one from rank {rank}")
        old = self._peers[rank].link
        self._set(rank, link)
        self._peers[rank].seek_s = SEEK_S
        if old is not None:  # whoever holds its other end shall notice, and dial again if it still needs one
            old.peer_rank = None
            old.loop.close(old, "replaced by a newer link")

    def answered(self, link: Connection, message: Message) -> bool:
        """Whether this message was an answer to one of ours."""
        peer = self._peers.get(link.peer_rank) if link.peer_rank is not None else None
        if peer is None or peer.link is not link:
            return False
        if message.op is Op.HELLO and message.status is Status.REFUSED:
            log.warning("rank %s refused the link why=%r", link.peer_rank, message.body.decode(errors="replace"))
            return True
        return message.op is Op.PING and message.request == 0

    def closed(self, link: Connection) -> None:
        """A link is lost; what that means is found out in `tick`."""
        peer = self._peers.get(link.peer_rank) if link.peer_rank is not None else None
        if peer is not None and peer.link is link:
            peer.link, peer.away_since_s = None, time.monotonic()
            peer.seek_at_s = peer.away_since_s
            log.info("link lost rank=%d", link.peer_rank)

    def tick(self, now_s: float) -> float:
        """Ask MPI, ping the others and look for those without a link when it is time; when to come again."""
        if now_s - self._polled_s >= MPI_POLL_S:
            self._polled_s = now_s
            if self._watch is not None:
                for rank in sorted(self._watch.failed() - self._dead):
                    self._died(rank, "MPI reported its failure")
        if now_s - self._pinged_s >= PING_S:
            self._pinged_s = now_s
            for peer in self._peers.values():
                if peer.link is not None:
                    peer.link.send(Op.PING, 0)  # both sides send; hearing anything at all is the answer
        due_s = self._polled_s + MPI_POLL_S
        for rank, peer in self._peers.items():
            if peer.link is None and rank not in self._dead:
                if now_s >= peer.seek_at_s:
                    self._seek(rank, peer, now_s)
                due_s = min(due_s, peer.seek_at_s)
        return due_s

    def hung(self, now_s: float) -> list[int]:
        """Live ranks that have not been heard of for too long."""
        heard_s = {rank: p.away_since_s if p.link is None else p.link.heard_s for rank, p in self._peers.items()}
        return sorted(rank for rank, at_s in heard_s.items() if rank not in self._dead and now_s - at_s > HUNG_S)

    def publish(self) -> None:
        """Write the state file, if that is ours to do."""
        live = [rank.rank for rank in self.state.ranks if rank.alive]
        if live and live[0] == self.rank:
            write_state(self._file, self.state)

    def _seek(self, rank: int, peer: _Peer, now_s: float) -> None:
        """Is it dead? If not, and the link is ours to make, dial."""
        state = self.state.ranks[rank]
        peer.seek_at_s = now_s + peer.seek_s
        peer.seek_s = min(2 * peer.seek_s, SEEK_MAX_S)
        local = state.host == self.state.ranks[self.rank].host
        if local and not runs(state.pid, state.started):
            self._died(rank, "its link closed and its process has ended")
        elif not peer.dialling and (rank > self.rank or not local):

            def ended(dialled: Dialled | None, error: Exception | None) -> None:
                peer.dialling = False
                self._dialled(rank, dialled, error, local)

            peer.dialling = self._dialler.dial(state, local, rank > self.rank, ended)

    def _dialled(self, rank: int, dialled: Dialled | None, error: Exception | None, local: bool) -> None:
        peer = self._peers[rank]
        if dialled is None:
            if isinstance(error, ConnectionRefusedError) and not local and peer.link is None:
                self._died(rank, "its link closed and nobody listens where it did")
            else:
                log.info("no link yet rank=%d why=%r", rank, str(error))
        elif peer.link is not None or rank in self._dead or rank < self.rank:  # a lower one lives, and dials us itself
            dialled.sock.close()
        else:
            link = self._loop.adopt(dialled.sock)
            assert dialled.session is not None
            link.admit(dialled.session, client=True)
            link.peer_rank, link.name, peer.seek_s = rank, f"rank {rank}", SEEK_S
            self._set(rank, link)

    def _set(self, rank: int, link: Connection) -> None:
        link.peer_rank, self._peers[rank].link = rank, link

    def _died(self, rank: int, how: str) -> None:
        if rank in self._dead or rank == self.rank or self.leaving:
            return
        self._dead.add(rank)
        self.state.ranks[rank].alive = False
        self.state.epoch = self._base_epoch + len(self._dead)
        log.warning("rank died rank=%d how=%r epoch=%d", rank, how, self.epoch)
        self.publish()
