"""Membership on real clocks, links and files: drives the rules of `kv.membership` for one rank.

Ranks are linked with each other, the lower dials the higher; what the rules want said goes over those links, and what
is heard on them is told to the rules. A rank without a link is looked for: has its process ended (on this host its
pid and start time say so, milliseconds after the kernel closed its sockets), does its host refuse, or can it be
dialled again? MPI is asked a few times a second.

The state file is written by the lowest rank of a host that serves and is not hung, and read by all of them once a
second: ranks that cannot link (several replacements of a pool that died as a whole, each the first in its own view)
find each other by it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import ProtocolError
from kvtool.kv.membership import Members, Timing
from kvtool.kv.steps import Changed, Hung, Ping, Publish, Retire, Seek, SendView
from kvtool.kv.view import Entry, Status
from kvtool.pool import wire
from kvtool.pool.dial import Dialled, Dialler
from kvtool.pool.loop import Connection, Loop
from kvtool.pool.mpiwatch import MpiWatch
from kvtool.pool.published import Published
from kvtool.pool.roster import entry_of, identity_of, pack_view, rank_of, ranks_of, unpack_view
from kvtool.pool.state import PoolState, RankState, runs
from kvtool.pool.tenants import Tenant
from kvtool.pool.wire import Message, Op

log = logging.getLogger("kvtool.pool")

MPI_POLL_S = 0.2
FILE_POLL_S = 1.0


@dataclass
class _Peer:
    link: Connection | None = None
    record: bytes = b""
    """Of the incarnation that the link leads to."""
    dialling: bool = False


class Membership:
    """This rank's view of all ranks. `state` is shared with whoever answers clients; its ranks include this one.

    `on_retire` is called, once, when this rank must end, with the reason.
    """

    def __init__(
        self,
        rank: int,
        state: PoolState,
        state_file: Path,
        watch: MpiWatch | None,
        now_s: Callable[[], float] = time.monotonic,
        lost_s: float = Timing.lost_s,
    ) -> None:
        mine = next(one for one in state.ranks if one.rank == rank)
        self.rank, self.state = rank, state
        self._pool = mine.identity.rpartition("/")[0]
        self._file, self._watch, self._now_s = Published(state_file), watch, now_s
        self._host = mine.host
        timing = Timing(lost_s=lost_s, revive_s=min(Timing.revive_s, lost_s))
        self.rules = Members(mine.identity, [entry_of(one) for one in state.ranks], state.base, now_s(), timing)
        self._peers: dict[str, _Peer] = {}
        self._polled_s = self._looked_s = now_s()
        self.leaving = False
        self.on_retire: Callable[[str], None] = lambda why: None
        self._renew()

    @property
    def epoch(self) -> int:
        return self.state.epoch

    @property
    def mine(self) -> RankState:
        return rank_of(self.rules.mine)

    @property
    def linked(self) -> list[int]:
        """Ranks that there is a link to."""
        return [self._number(identity) for identity in self.rules.linked_peers]

    def hung(self, now_s: float) -> list[int]:
        """Ranks that serve, as far as is known, and have not been heard of for too long."""
        return [self._number(identity) for identity in self.rules.hung(now_s)]

    def connect(self, loop: Loop, key: bytes, fingerprint: str) -> None:
        """Link up with every higher rank, from `tick` on; the lower ones link up with us."""
        self._loop = loop

        def hello() -> dict[str, object]:
            entry = pack_view([self.rules.mine])
            return {"fingerprint": fingerprint, "name": f"rank {self.rank}", "peer": entry}

        self._dialler = Dialler(loop.post, key, hello)

    def admit(self, link: Connection, introduction: bytes) -> None:
        """Another rank dialled us and says who it is: its own entry.

        Raises:
            ProtocolError: not one of this pool, or not any more.
        """
        entries, _ = unpack_view(introduction, self._pool)
        if len(entries) != 1 or entries[0].identity == self.rules.identity:
            raise ProtocolError(f"{self.rules.identity} wants links from other ranks that say who they are")
        (entry,), now_s = entries, self._now_s()
        known = self.rules.view.get(entry.identity)
        if known is not None and known.order > entry.order:
            link.send(Op.VIEW, 0, pack_view([known]))  # it may not know that it was replaced, or declared dead
            if known.record != entry.record:
                raise ProtocolError(
                    f"{entry.identity} is incarnation {known.standing.incarnation} by now, "
                    f"found incarnation {entry.standing.incarnation}"
                )
        self.rules.received([entry], now_s)
        self._adopt(entry.identity, entry.record, link)
        self._carry_out()

    def answered(self, link: Connection, message: Message) -> bool:
        """Whether this message was between ranks; clients' requests are somebody else's."""
        if link.peer_rank is None:
            return False
        identity = identity_of(self._pool, link.peer_rank)
        peer = self._peers.get(identity)
        if peer is None or peer.link is not link:
            return False
        now_s = self._now_s()
        self.rules.heard(identity, message.epoch, now_s)
        if message.op is Op.VIEW and message.request == 0:
            entries, whole = unpack_view(message.body, self._pool)
            self.rules.received(entries, now_s, identity, whole)
        elif message.op is Op.HELLO:
            log.warning("rank %s refused the link why=%r", link.peer_rank, message.body.decode(errors="replace"))
        elif not (message.op is Op.PING and message.request == 0):
            self._carry_out()
            return False
        self._carry_out()
        return True

    def closed(self, link: Connection) -> None:
        """A link is lost; what that means is found out in `tick`."""
        if link.peer_rank is None:
            return
        identity = identity_of(self._pool, link.peer_rank)
        peer = self._peers.get(identity)
        if peer is not None and peer.link is link:
            peer.link = None
            self.rules.link_lost(identity, self._now_s())
            log.info("link lost rank=%d", link.peer_rank)

    def tick(self, now_s: float) -> float:
        """Ask MPI, look at the state file, and do what the rules want; when to come again."""
        if now_s - self._polled_s >= MPI_POLL_S:
            self._polled_s = now_s
            for rank in self._watch.failed() if self._watch is not None else ():
                self.rules.ended(identity_of(self._pool, rank), 1, "MPI reported its failure", now_s)
        if now_s - self._looked_s >= FILE_POLL_S:
            self._looked_s = now_s
            self._look()
        due_s = self.rules.tick(now_s)
        self._carry_out()
        return min(due_s, self._polled_s + MPI_POLL_S)

    def filled(self, share: float, now_s: float) -> None:
        """How much of this rank's DRAM is in use: a newcomer takes more keys as it fills."""
        self.rules.filled(share, now_s)
        self._carry_out()

    # What others ask for by message

    def view(self, link: Connection, message: Message, now_s: float) -> None:
        link.send(Op.VIEW, message.request, pack_view(self.rules.view.entries, whole=True))

    def join(self, link: Connection, message: Message, now_s: float) -> None:
        """A replacement or a new rank wants to be admitted; the answer is the view."""
        entries, _ = unpack_view(message.body, self._pool)
        if len(entries) != 1:
            raise ProtocolError(f"join: wanted one entry, found {len(entries)}")
        known = self.rules.view.get(entries[0].identity)
        if known is not None and known.standing.serves:
            self._is_gone(known, now_s)
        refusal = self.rules.asked_to_join(entries[0], now_s)
        if refusal:
            link.refuse(message.request, Op.JOIN, refusal)
        else:
            link.send(Op.JOIN, message.request, pack_view(self.rules.view.entries, whole=True))
        self._carry_out()

    def drain(self, link: Connection, message: Message, now_s: float) -> None:
        """Take nothing new from now on; with {"leave": true}, go for good, and with {"rank": N, "leave": true} know
        that dead rank N is not coming back. The copier moves the blocks; how many are left is in this rank's STATUS."""
        wanted = wire.unpack_map(message.body)
        if isinstance(wanted.get("rank"), int):
            self.rules.dismiss(identity_of(self._pool, wanted["rank"]), now_s)
        else:
            self.rules.drain(now_s)
        link.send(Op.DRAIN, message.request, wire.pack_map({"status": self.mine.status}))
        if wanted.get("leave") is True and "rank" not in wanted:
            self.rules.leave(now_s)
        self._carry_out()

    def publish_for(self, tenants: Sequence[Tenant]) -> None:
        """Each of them has a state file of its own."""
        self._file.tenants = tenants

    def publish(self) -> None:
        """Write the state file, if that is ours to do. A full disk is no reason to end: it is tried again."""
        if not self.rules.publishes or self.leaving:
            return
        self._learn_from_file()
        self._renew()
        self._file.write(self.state)

    # How

    def _carry_out(self) -> None:
        publish = False
        while actions := self.rules.take_actions():
            for action in actions:
                match action:
                    case SendView(to, entries, whole):
                        self._send(to, Op.VIEW, pack_view(entries, whole))
                    case Ping(to):
                        self._send(to, Op.PING, b"")
                    case Seek(entry, dial):
                        self._seek(entry, dial)
                    case Publish():
                        publish = True
                    case Changed(entry, how):
                        self._changed(entry, how)
                    case Hung(identity, hung):
                        what = "does not answer" if hung else "answers again"
                        log.warning("rank %s rank=%d", what, self._number(identity))
                    case Retire(why):
                        log.warning("rank retires rank=%d why=%r", self.rank, why)
                        self.leaving = True
                        self.on_retire(why)
        if publish:
            self.publish()

    def _send(self, to: str, op: Op, body: bytes) -> None:
        peer = self._peers.get(to)
        if peer is not None and peer.link is not None:
            peer.link.send(op, 0, body)

    def _changed(self, entry: Entry, how: str) -> None:
        self._renew()
        standing = entry.standing
        say = log.warning if standing.status is Status.DEAD else log.info
        say(
            "rank %s rank=%d incarnation=%d weight=%.3f how=%r epoch=%d",
            standing.status.name.lower(), entry.number, standing.incarnation, standing.weight, how, self.epoch,
        )  # fmt: skip
        peer = self._peers.get(entry.identity)
        if peer is not None and peer.link is not None and peer.record != entry.record:
            self._drop(peer, "its rank was replaced")

    def _renew(self) -> None:
        self.state.ranks = ranks_of(self.rules.view.entries)
        self.state.epoch = self.rules.epoch

    def _look(self) -> None:
        """Somebody else may have written the state file, or removed it."""
        if not self.leaving and self._file.changed() and not self._learn_from_file():
            self.publish()

    def _learn_from_file(self) -> bool:
        """Whether the file says all that we know, or is not ours any more."""
        entries = self._file.entries(self.state.key)
        if entries is None:
            return True
        self.rules.received(entries, self._now_s())
        return not self.rules.view.beyond(entries)

    def _is_gone(self, entry: Entry, now_s: float) -> bool:
        state = rank_of(entry)
        if entry.place != self._host or runs(state.pid, state.started):
            return False
        self.rules.ended(entry.identity, entry.standing.incarnation, "its process has ended", now_s)
        return True

    def _seek(self, entry: Entry, dial: bool) -> None:
        """Is it dead? If not, and the link is ours to make, dial."""
        local, identity = entry.place == self._host, entry.identity
        peer = self._peers.setdefault(identity, _Peer())
        if (local and self._is_gone(entry, self._now_s())) or peer.dialling or not (dial or not local):
            return

        def ended(dialled: Dialled | None, error: Exception | None) -> None:
            peer.dialling = False
            self._dialled(entry, dialled, error)
            self._carry_out()

        peer.dialling = self._dialler.dial(rank_of(entry), local, dial, ended)

    def _dialled(self, entry: Entry, dialled: Dialled | None, error: Exception | None) -> None:
        peer, now_s, local = self._peers[entry.identity], self._now_s(), entry.place == self._host
        current = self.rules.view[entry.identity]
        if dialled is None:
            log.info("no link yet rank=%d why=%r", entry.number, str(error))
            if local or peer.link is not None or current.record != entry.record:
                return
            if isinstance(error, ConnectionRefusedError):
                self.rules.ended(entry.identity, entry.standing.incarnation, "its host refuses connections", now_s)
            elif isinstance(error, OSError):
                self.rules.unreachable(entry.identity, now_s)
        elif dialled.session is None or peer.link is not None or current.record != entry.record:
            dialled.sock.close()  # a lower one lives, and dials us itself
        else:
            link = self._loop.adopt(dialled.sock)
            link.admit(dialled.session, client=True)
            link.name = f"rank {entry.number}"
            self._adopt(entry.identity, entry.record, link)

    def _adopt(self, identity: str, record: bytes, link: Connection) -> None:
        peer = self._peers.setdefault(identity, _Peer())
        if peer.link is not None:  # whoever holds its other end shall notice, and dial again if it still needs one
            self._drop(peer, "replaced by a newer link")
        if link.sock.family != socket.AF_UNIX:  # a cut ends the link; a hung rank's host acknowledges, and does not
            timeout_ms = int(self.rules.timing.lost_s * 500)
            link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        link.peer_rank, peer.link, peer.record = self._number(identity), link, record
        self.rules.linked(identity, self._now_s())

    def _drop(self, peer: _Peer, why: str) -> None:
        link = peer.link
        assert link is not None
        identity = identity_of(self._pool, link.peer_rank if link.peer_rank is not None else -1)
        peer.link, link.peer_rank = None, None
        link.loop.close(link, why)
        self.rules.link_lost(identity, self._now_s())

    @staticmethod
    def _number(identity: str) -> int:
        return int(identity.rpartition("/")[2])
