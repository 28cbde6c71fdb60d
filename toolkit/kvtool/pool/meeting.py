"""How a rank meets the others when it starts: all at once by MPI, or alone, as a replacement or a newcomer.

One that comes alone reads the state file, asks the ranks that it names for the newest view, takes the incarnation after
the last one of its identity, and asks to join. Any one of them can admit it; the others are told. Are all of them dead
or hung, it admits itself: it goes on with the view that the file has, and what lives finds it by the file (see
`pool.membership`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from kvtool.errors import KvtoolError, PoolUnavailable, Refused, Unavailable
from kvtool.kv.layout import KVLayout
from kvtool.kv.view import Entry, View
from kvtool.pool.config import RankConfig
from kvtool.pool.link import Link
from kvtool.pool.mpiwatch import MpiWatch
from kvtool.pool.roster import entry_of, identity_of, pack_view, rank_of, ranks_of, unpack_view
from kvtool.pool.state import RankState, read_state
from kvtool.pool.wire import Op

log = logging.getLogger("kvtool.pool")

ANSWER_S = 1.0
ADMIT_S = 10.0
_POLL_S = 0.05


class Meeting(Protocol):
    rank: int
    incarnation: int
    watch: MpiWatch | None
    alone: bool
    """Whether others hold blocks already, and this one does not."""

    def meet(self, mine: RankState) -> list[RankState]:
        """All ranks, `mine` among them, once this one listens."""
        ...


class MpiMeeting:
    """All ranks of a fresh pool, under one mpiexec."""

    def __init__(self, communicator: Any) -> None:
        self._comm = communicator
        self.rank: int = communicator.Get_rank()
        self.watch: MpiWatch | None = MpiWatch(communicator)
        self.incarnation, self.alone = 1, False

    def meet(self, mine: RankState) -> list[RankState]:
        everyone = self._comm.allgather(asdict(mine))
        return [RankState(**{**rank, "tcp": tuple(rank["tcp"])}) for rank in everyone]


class Joining:
    """`rank` comes alone to the pool of `config`."""

    def __init__(self, config: RankConfig, rank: int) -> None:
        self._config, self.rank = config, rank
        self._identity = identity_of(config.name, rank)
        self._layout, self._key = KVLayout(**config.layout), bytes.fromhex(config.key)
        self.watch: MpiWatch | None = None
        self.alone = True
        self._deaf: set[str] = set()  # asked last from now on
        self._view = View(self._read_file())
        for other in self._others():
            try:
                self._view.merge(self._ask(other, Op.VIEW, b""))
                break
            except KvtoolError as error:
                log.info("no view from rank=%d why=%r", other.rank, str(error))
        known = self._view.get(self._identity)
        self.incarnation = known.standing.incarnation + 1 if known is not None else 1

    def meet(self, mine: RankState) -> list[RankState]:
        """
        Raises:
            Refused: those who live do not admit it; their sentence.
        """
        until_s = time.monotonic() + ADMIT_S
        entry = entry_of(mine)
        while refusal := self._join(entry):
            if time.monotonic() >= until_s:
                raise Refused(f"the pool does not admit {self._identity}, incarnation {self.incarnation}: {refusal}")
            time.sleep(_POLL_S)
            self._view.merge(self._read_file())  # others may have come back meanwhile, at other addresses
        if entry not in self._view.entries:  # nobody there who could hold its keys meanwhile
            entry = entry_of(replace(mine, status="live"))
        self._view.merge([entry])
        if self._view[self._identity].record != entry.record:
            raise Refused(f"another process serves as {self._identity} by now")
        return ranks_of(self._view.entries)

    def _join(self, mine: Entry) -> str:
        """Why those who answered refused; "" when one admitted it, whose view has it now, or none answered. Who answers
        and is not understood, such as a rank of another version, is no reason to begin a pool beside his."""
        refusal = ""
        for other in self._others():
            try:
                self._view.merge(self._ask(other, Op.JOIN, pack_view([mine])))
                return ""
            except Unavailable as error:
                log.info("not admitted by rank=%d why=%r", other.rank, str(error))
            except KvtoolError as error:
                refusal = str(error)
        return refusal

    def _others(self) -> Sequence[RankState]:
        serving = [entry for entry in self._view.entries if entry.standing.serves and entry.identity != self._identity]
        return [rank_of(entry) for entry in sorted(serving, key=lambda entry: entry.identity in self._deaf)]

    def _read_file(self) -> list[Entry]:
        try:
            state = read_state(Path(self._config.state_file))
        except PoolUnavailable:
            return []  # the first of its pool
        if state.key != self._config.key:
            raise Refused(f"{self._config.state_file} is another pool's; this rank was started for one that is gone")
        return [entry_of(rank) for rank in state.ranks]

    def _ask(self, other: RankState, op: Op, body: bytes) -> list[Entry]:
        name = f"rank {self.rank} joins"
        link = Link(other, self._key, self._layout, name, False, lambda epoch: None)
        try:
            answer = link.call(op, body, time.monotonic() + ANSWER_S)
        except Unavailable:
            self._deaf.add(other.identity)
            raise
        finally:
            link.close()
        entries, _ = unpack_view(answer, self._config.name)
        return entries
