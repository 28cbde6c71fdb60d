"""A batch of keys on its way through their owners: who is asked what, in which order, and what is left at the end.

Keys that are kept once make one round: a message to each rank that owns some, all sent before the first answer is
waited for. Keys that are kept several times go to the next owner when one is down, slow or does not have them, until
nobody is left to ask. An owner who takes longer than most of his last answers did is not waited for alone: the next is
asked too, and whoever is first is taken (hedging: Dean & Barroso, "The tail at scale", CACM 2013). The answer of the
other is undone when it comes.

`leading`: only the run of keys from the first counts, so nothing behind its end is asked any more.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtool.errors import KvtoolError
from kvtool.kv.block import BlockKey
from kvtool.pool import wire
from kvtool.pool.access import Access
from kvtool.pool.base import Cancelling, Path
from kvtool.pool.driver import UCX_SIZE, Asked, Driver
from kvtool.pool.lane import Lane
from kvtool.pool.line import RankSlow
from kvtool.pool.memory import SlotMemory
from kvtool.pool.ranks import Ranks, Route, Share
from kvtool.pool.wire import Found, Op


@dataclass
class Part:
    """One message to one rank, and what came of it. `at`, `names`: position and key of each hit of `found`."""

    access: Access
    memory: SlotMemory | None
    """As it was when the call began: a rank that dies meanwhile is let go of by other threads."""
    positions: list[int]
    keys: list[BlockKey]
    number: int
    request: int = 0
    sent_s: float = 0.0
    found: Found | None = None
    at: Sequence[int] = ()
    names: Sequence[BlockKey] = ()
    lane: Lane | None = None
    """Where all its blocks come by socket, without a lease."""

    def give_lane(self) -> None:
        lane, self.lane = self.lane, None
        if lane is not None:
            self.access.lanes.give(lane)

    @property
    def asked(self) -> Asked:
        return self.access.link, self.request


@dataclass(frozen=True)
class Question:
    """`take` gets a part and the answer's body; it gives the positions that this rank has not, and why. `leases`: an
    answer gives the right to read, which must be given back."""

    op: Op
    pack: Callable[[Part], bytes]
    take: Callable[[Part, bytes], tuple[Sequence[int], str]]
    leases: bool = False


@dataclass
class Hedges:
    asked: int = 0
    won: int = 0


@dataclass
class Setting:
    """What all calls of one client share."""

    ranks: Ranks
    driver: Driver
    hedges: Hedges = field(default_factory=Hedges)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    namespace: str = ""

    def __post_init__(self) -> None:
        self.now_s = self.ranks.now_s


class Asking:
    """Use once: `run`, then look at `cut` and `reason` (leading) or `missing` (each key on its own), and `parts`."""

    def __init__(
        self,
        setting: Setting,
        keys: Sequence[BlockKey],
        question: Question,
        route: Route,
        deadline_s: float,
        answers_by_s: float,
        leading: bool = True,
        cancel: Cancelling | None = None,
    ) -> None:
        self._ranks, self._driver, self._now_s = setting.ranks, setting.driver, setting.now_s
        self._numbers, self._hedges = setting.numbers, setting.hedges
        self._keys, self._question, self._route = keys, question, route
        self._deadline_s, self._answers_by_s = deadline_s, answers_by_s
        self._leading, self._cancel = leading, cancel
        self.cut, self.reason = len(keys), "absent"
        self.missing: dict[int, str] = {}
        self.parts: list[Part] = []
        """Those that were answered."""
        self._waiting: list[Part] = []

    async def run(self, shares: Sequence[Share]) -> None:
        """Ask, beginning with `shares`. When it raises, nothing is held."""
        try:
            turn = await self._begin(shares)
            while turn:
                again: list[Share] = []
                for part in turn:
                    again += await self._settle(part)
                turn = await self._begin(again) if again else []
        except BaseException:
            self.let_go()
            raise

    def let_go(self) -> None:
        """Forget what was asked, and give back every lease."""
        for part in self._waiting:
            part.give_lane()
            part.access.link.forget(part.request, self._answers_by_s)
        for part in self.parts:
            part.give_lane()
            if part.found is not None:
                part.access.link.tell(Op.RELEASE, wire.pack_numbers([part.number]))
        self._waiting, self.parts = [], []

    def end(self, positions: Sequence[int], reason: str) -> None:
        """Nobody is left who could have these."""
        if not self._leading:
            for position in positions:
                self.missing[position] = reason
        elif positions and positions[0] < self.cut:
            self.cut, self.reason = positions[0], reason

    # How

    async def _begin(self, shares: Sequence[Share], final: bool = True) -> list[Part]:
        """Ask each rank about its share; those that cannot be asked are passed by. `final` False: leave it at that."""
        parts, pending = [], list(shares)
        while pending:
            access, positions = pending.pop(0)
            if self._leading and positions[-1] >= self.cut:
                positions = positions[: bisect.bisect_left(positions, self.cut)]
            if not positions:
                continue
            if self._cancel is not None and self._cancel.is_set():
                self.end(positions, "cancelled")
                continue
            part = None if access is None else await self._ask(access, positions)
            if isinstance(part, Part):
                parts.append(part)
            else:
                self._ranks.lost()
                if final:
                    pending += self._passed(positions, part or "rank_down")
        return parts

    async def _ask(self, access: Access, positions: list[int]) -> Part | str:
        part = None
        try:
            if await self._driver.reach(access, self._reach_by_s()) is None:
                return "rank_down"
            keys = self._keys
            mine = list(keys) if len(positions) == len(keys) else [keys[position] for position in positions]
            part = Part(access, access.memory, positions, mine, next(self._numbers), sent_s=self._now_s())
            op, body = self._question.op, self._question.pack(part)
            if op in (Op.LOOKUP, Op.GATHER) and access.path is Path.SOCKET and len(mine) <= access.at_once:
                with contextlib.suppress(KvtoolError):  # else they are asked for when the answer is here
                    lane = access.lanes.idle()
                    if lane is None:
                        lane = await self._driver.work(UCX_SIZE, self._dial(access))
                    part.lane, transfer = lane, lane.next_transfer()
                    op, body = Op.FETCH, wire.pack_fetch(lane.number, transfer, op is Op.GATHER, body)
            part.request = access.link.start(op, body, self._deadline_s, part.number)
        except KvtoolError as error:
            if part is not None:
                part.give_lane()
            return _why(error)
        self._waiting.append(part)
        return part

    def _dial(self, access: Access) -> Callable[[], Lane]:
        return lambda: access.lanes.take(self._reach_by_s())

    def _reach_by_s(self) -> float:
        """A rank that does not even shake hands must leave time for the others."""
        now_s = self._now_s()
        return now_s + (self._answers_by_s - now_s) / 2

    def _passed(self, positions: Sequence[int], reason: str) -> list[Share]:
        """Who is asked next about `positions`; an end for those who are left without anybody."""
        shares = self._route.next(positions)
        if len(shares) == 0:
            self.end(positions, reason)
            return []
        asked = {position for _, share in shares for position in share}
        self.end([position for position in positions if position not in asked], reason)
        return shares

    async def _settle(self, part: Part) -> list[Share]:
        """Wait for one answer; who is to be asked about what it lacks."""
        if self._route.more(part.positions[0]) and all(map(self._route.more, part.positions)):
            hedge_at_s = part.sent_s + part.access.answers.patience_s
            if hedge_at_s < self._answers_by_s and await self._driver.race([[part.asked]], hedge_at_s) is None:
                return await self._hedge(part)
        return await self._take(part)

    async def _hedge(self, part: Part) -> list[Share]:
        shares = self._route.next(part.positions)
        wanted = sum(not self._leading or position < self.cut for position in part.positions)
        others = await self._begin(shares, final=False)
        if others and sum(len(other.positions) for other in others) == wanted:
            self._hedges.asked += 1
            if await self._driver.race([[part.asked], [o.asked for o in others]], self._answers_by_s) == 1:
                self._hedges.won += 1
                self._forget(part)
                again: list[Share] = []
                for other in others:
                    again += await self._take(other)
                return again
        for other in others:
            self._forget(other)
        self._route.back(part.positions)
        return await self._take(part)

    def _forget(self, part: Part) -> None:
        self._waiting.remove(part)
        part.give_lane()
        part.access.link.forget(part.request, self._answers_by_s)

    async def _take(self, part: Part) -> list[Share]:
        try:
            body = await self._driver.finish(part.asked, self._answers_by_s)
        except KvtoolError as error:
            self._waiting.remove(part)
            part.give_lane()
            self._ranks.lost()
            return self._passed(part.positions, _why(error))
        self._waiting.remove(part)
        part.access.answers.add(self._now_s() - part.sent_s)
        self.parts.append(part)
        try:
            left, reason = self._question.take(part, body)
        except KvtoolError as error:  # nonsense
            left, reason = part.positions, _why(error)
        if part.lane is not None and part.found is not None and not part.found.hits:
            part.lane.owed = False  # nothing comes
            part.give_lane()
        return self._passed(left, reason) if left else []


def _why(error: KvtoolError) -> str:
    return "timeout" if isinstance(error, RankSlow) else "rank_down"
