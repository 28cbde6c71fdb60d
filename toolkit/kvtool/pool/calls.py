"""The calls of a client, each written once for both clients; how they wait is their driver's business (`driver`).

A call that wants more than one lease outlives is made in parts: as many blocks as can be read in a share of the lease
term at the pace seen lately. Between the parts it looks at its budget and at the caller's `cancel`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvtool.errors import KvtoolError
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.pool import wire
from kvtool.pool.access import Access
from kvtool.pool.asking import Asking, Part, Question, Setting
from kvtool.pool.base import (
    BlockView,
    Cancelling,
    GetResult,
    Got,
    Path,
    PoolCounts,
    Put,
    PutResult,
    finished,
    leading_run,
)
from kvtool.pool.buffers import Room
from kvtool.pool.fetching import Fetching
from kvtool.pool.here import Here
from kvtool.pool.pace import Pace
from kvtool.pool.putting import ANSWER_SHARE, Putting
from kvtool.pool.questions import HAS, MATCH, keys_of, take_found, take_gathered
from kvtool.pool.ranks import Route
from kvtool.pool.reading import Counting, PoolRead
from kvtool.pool.single import Single
from kvtool.pool.told import Untold
from kvtool.pool.wire import Op

ALIVE_S = 1.0
PROBE_S = 0.25
WINDOW_MAX = 512
"""Blocks in one part of a `get_into`: many enough to keep every rank busy, few enough to be cancelled soon."""
VIEW_SHARE, COPY_SHARE = 0.5, 0.25
"""Of a lease term, for the checks of a read in place (the rest is its reader's), and for a copy."""


class Calls(Here):
    """One client's calls. Deadlines are points on the client's clock."""

    def __init__(self, setting: Setting, layout: KVLayout) -> None:
        self.setting, self.layout = setting, layout
        self._ranks, self._driver, self._now_s = setting.ranks, setting.driver, setting.now_s
        self._single = Single(setting.driver, setting.now_s, setting.ranks.lost)
        self.pace = Pace()
        self.counting = Counting(layout.block_tokens)
        self._untold = Untold(self.counting)
        self._probing = threading.Lock()
        self._probed_s, self._alive = -ALIVE_S, False

    # What is there

    async def match(self, keys: Sequence[BlockKey], budget_s: float, at: int | str | None = None) -> int:
        deadline_s = self._now_s() + budget_s
        count = 0
        while count < len(keys):
            some = keys[count : count + wire.BATCH_MAX]
            route = Route(self._ranks, some, at)
            asking = Asking(self.setting, some, MATCH if route.simple else HAS, route, deadline_s, deadline_s)
            await asking.run(self._matched_here(asking, route, some))
            count += asking.cut
            if asking.cut < len(some):
                break
        return count

    async def exists(self, keys: Sequence[BlockKey], budget_s: float, at: int | str | None = None) -> list[bool]:
        deadline_s = self._now_s() + budget_s
        there: list[bool] = []
        for start in range(0, len(keys), wire.BATCH_MAX):
            some = keys[start : start + wire.BATCH_MAX]
            route = Route(self._ranks, some, at)
            asking = Asking(self.setting, some, HAS, route, deadline_s, deadline_s, leading=False)
            await asking.run(self._had_here(asking, route, some))
            there += [position not in asking.missing for position in range(len(some))]
        return there

    # Reading

    async def read(
        self,
        keys: Sequence[BlockKey],
        budget_s: float,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> PoolRead:
        deadline_s = self._now_s() + budget_s
        fits = self.pace.blocks_in(self._ranks.term_s * VIEW_SHARE, self.layout.block_size)
        some = keys[: min(fits, wire.BATCH_MAX)]
        if at is None and cancel is None and len(some) == len(keys):
            near = self._read_near(keys)
            if near is not None:
                self.counting.read(near.blocks, len(keys), "absent")
                return near
        route = Route(self._ranks, some, at)
        asking = self._lookup(some, deadline_s, route, True, cancel)
        await asking.run(route.first())
        views = await Fetching(self.setting, asking, self.pace, deadline_s).views()
        found = [views.blocks[position] for position in range(asking.cut)]
        blocks: list[BlockView] = [block for block, _ in found]
        reason = "too_long" if asking.cut == len(some) else asking.reason
        self.counting.read(blocks, len(keys), reason)
        self.tell_counts()
        return PoolRead(blocks, [placed for _, placed in found], views.helds)

    async def get_into(
        self,
        keys: Sequence[BlockKey],
        rooms: Sequence[Room],
        budget_s: float,
        leading: bool = True,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> GetResult:
        deadline_s = self._now_s() + budget_s
        got: list[Got | None] = [None] * len(keys)
        left, reason, most = list(range(len(keys))), "absent", self._window()
        while left:
            some = left[:most]
            if self._now_s() >= deadline_s:
                reason = "timeout"
                break
            missing = await self._get_some(keys, rooms, got, some, deadline_s, leading, at, cancel)
            again = [position for position in some if missing.get(position) == "full"]
            if again and len(some) == len(again) == 1:
                again = []
            most = max(1, len(some) // 4) if again else min(2 * most, self._window())  # what is leased holds room too
            if missing and leading and not again:
                reason = missing[min(missing)]
                break
            for position, why in missing.items():
                if not again or why != "full":
                    got[position] = Got(reason=why)
            left = again + left[len(some) :]
        whole = finished(got, reason)
        self.counting.got(whole)
        self.tell_counts()
        return GetResult(whole, leading_run(whole), self._ranks.door.held(rooms))

    async def _get_some(
        self,
        keys: Sequence[BlockKey],
        rooms: Sequence[Room],
        got: list[Got | None],
        some: Sequence[int],
        deadline_s: float,
        leading: bool,
        at: int | str | None,
        cancel: Cancelling | None,
    ) -> dict[int, str]:
        """One part of a `get_into`; which of its positions were not got, and why."""
        mine, theirs = [keys[position] for position in some], [rooms[position] for position in some]
        found: list[Got | None] = [None] * len(some)
        route = Route(self._ranks, mine, at)
        asking = self._lookup(mine, deadline_s, route, leading, cancel)
        shares = route.first()
        if cancel is None or not cancel.is_set():
            shares = await self._got_here(shares, mine, theirs, found, leading)
        await asking.run(shares)
        await Fetching(self.setting, asking, self.pace, deadline_s).copy(theirs, found)
        missing: dict[int, str] = {}
        for index, (position, one) in enumerate(zip(some, found, strict=True)):
            if one is not None and index < asking.cut:
                got[position] = one
            elif leading:
                missing[position] = asking.reason
            else:
                missing[position] = asking.missing.get(index, "absent")
        return missing

    def _window(self) -> int:
        fits = self.pace.blocks_in(self._ranks.term_s * COPY_SHARE, self.layout.block_size)
        return min(fits, WINDOW_MAX)

    def _lookup(
        self, keys: Sequence[BlockKey], deadline_s: float, route: Route, leading: bool, cancel: Cancelling | None
    ) -> Asking:
        budget_s = max(0.0, deadline_s - self._now_s())
        wait_s = budget_s * ANSWER_SHARE
        answers_by_s = deadline_s - budget_s * (1 - ANSWER_SHARE) / 2  # time to fetch from those who do answer

        gather = not leading or not route.simple  # a leading run may go on at another rank, and come back

        def pack(part: Part) -> bytes:
            wait = wait_s if part.access.files.allows(part.sent_s) else 0.0
            return wire.pack_lookup(part.number, wait, part.keys)

        def take(part: Part, body: bytes) -> tuple[Sequence[int], str]:
            left, reason = take_gathered(part, body) if gather else take_found(part, body)
            hints = self._ranks.hints
            if part.found is not None and part.found.near:
                hints.learn(part.names, part.found.near, self._now_s())
            if left and hints:
                hints.wrong([keys[left[0]]])
            return left, reason

        question = Question(Op.GATHER if gather else Op.LOOKUP, pack, take)
        return Asking(self.setting, keys, question, route, deadline_s, answers_by_s, leading, cancel)

    # Writing

    async def write(
        self,
        blocks: Sequence[Put],
        budget_s: float,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> list[PutResult]:
        deadline_s = self._now_s() + budget_s
        blocks = self._as_often_as_wanted(blocks)
        if len(blocks) == 1 and at is None and cancel is None:
            one = await self._write_one_near(blocks[0], budget_s)
            if one is not None:
                return one
        near: list[PutResult | None] = [None] * len(blocks)
        if cancel is None or not cancel.is_set():
            near = self._write_near(blocks, at)
        left = [block for block, result in zip(blocks, near, strict=True) if result is None]
        if left:
            others = iter(await Putting(self._ranks, self._driver, self.layout, left, deadline_s, at, cancel).run())
            near = [result or next(others) for result in near]
        results = [result for result in near if result is not None]
        self.counting.put(results, [block.size for block in blocks], Path.SHM)
        return results

    def _as_often_as_wanted(self, blocks: Sequence[Put]) -> Sequence[Put]:
        """Blocks that do not say how often they are wanted have what the pool says of the client's namespace."""
        copies = self._ranks.namespaces.get(self.setting.namespace)
        if copies is None:
            return blocks
        return [
            block if block.retention.copies else replace(block, retention=replace(block.retention, copies=copies))
            for block in blocks
        ]

    async def drop(self, keys: Sequence[BlockKey], budget_s: float) -> int:
        def take(part: Part, body: bytes) -> Sequence[int]:
            return part.positions[: wire.unpack_count(body)]  # which of them went does not matter

        return await self._forget(Op.DROP, keys, budget_s, take)

    async def delete(self, keys: Sequence[BlockKey], budget_s: float) -> int:
        def take(part: Part, body: bytes) -> Sequence[int]:
            return [position for position, there in zip(part.positions, body, strict=False) if there]

        return await self._forget(Op.DELETE, keys, budget_s, take)

    async def _forget(
        self, op: Op, keys: Sequence[BlockKey], budget_s: float, gone_of: Callable[[Part, bytes], Sequence[int]]
    ) -> int:
        """Tell every owner at once, or they would make each other copies; how many keys one of them had."""
        deadline_s, count = self._now_s() + budget_s, 0
        for start in range(0, len(keys), wire.BATCH_MAX):
            some = keys[start : start + wire.BATCH_MAX]
            route, gone = Route(self._ranks, some, reading=False), set[int]()
            shares = route.first()
            while others := route.next(range(len(some))):
                shares += others

            def take(part: Part, body: bytes, gone: set[int] = gone) -> tuple[Sequence[int], str]:
                gone.update(gone_of(part, body))
                return (), ""

            await Asking(
                self.setting, some, Question(op, keys_of, take), route, deadline_s, deadline_s, leading=False
            ).run(shares)
            count += len(gone)
        return count

    # Who is there

    async def alive(self) -> bool:
        now_s, ranks = self._now_s(), self._ranks
        ranks.refresh()
        for access in ranks.all():
            access.link.look()  # it may have hung up
        if any(a.link.connected and now_s - a.link.heard_s < ALIVE_S and a.link.usable for a in ranks.all()):
            return True
        if now_s - self._probed_s < ALIVE_S or not self._probing.acquire(blocking=False):
            return self._alive
        try:
            self._probed_s = now_s
            self._alive = False
            for access in ranks.all():
                self._alive = self._alive or await self._probe(access)
            if not self._alive:
                ranks.lost()
        finally:
            self._probing.release()
        return self._alive

    async def _probe(self, access: Access) -> bool:
        by_s = self._now_s() + PROBE_S
        try:
            if await self._driver.reach(access, by_s) is not None:
                await self._driver.finish((access.link, access.link.start(Op.PING, b"", by_s)), by_s)
                return True
        except KvtoolError:
            pass
        return False

    # Counting

    def tell_counts(self, at_once: bool = False) -> None:
        """Have a rank know what was read; once a second, and when the client leaves."""
        self._untold.tell((access.link for access in self._ranks.all()), self._now_s(), at_once)

    def counts(self) -> PoolCounts:
        counts = self.counting.snapshot()
        hedges = self.setting.hedges
        breakers, breaks = self._ranks.breakers()
        return replace(counts, breakers=breakers, breaks=breaks, hedges={"asked": hedges.asked, "won": hedges.won})
