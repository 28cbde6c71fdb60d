"""A put of one block into the mapped memory of one rank: one message where the client holds a spare slot, else two.

What is not as simple as that (no room at once, another rank, UCX, a pool that writes through) is left to `putting`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtool.errors import KvtoolError
from kvtool.kv.record import Grant, Want
from kvtool.pool import wire
from kvtool.pool.access import Access
from kvtool.pool.base import Outcome, Path, Put, PutResult
from kvtool.pool.driver import Driver
from kvtool.pool.filling import fill_room, outcome_of
from kvtool.pool.memory import SlotMemory
from kvtool.pool.spare import Spare, Spares
from kvtool.pool.wire import Op, Storing

_DUPLICATE = PutResult(Outcome.DUPLICATE)


@dataclass
class Single:
    """What all such puts of one client share."""

    driver: Driver
    now_s: Callable[[], float]
    lost: Callable[[], None]
    """To be called when a rank could not be used."""

    async def put(self, access: Access, block: Put, deadline_s: float) -> PutResult | None:
        """What came of it; None: nothing was done, and it takes more than this."""
        memory, link, spares = access.mapped_for_writing, access.link, access.spares
        if memory is None or spares is None or not 0 < block.size <= memory.slot_size or not link.begin_writing():
            return None
        try:
            next_key = spares.wanted()
            spare = spares.take() or await self._reserve(access, block, deadline_s)
            if not isinstance(spare, Spare):
                return spare
            return await self._store(access, memory, spares, block, spare, next_key, deadline_s)
        except KvtoolError as error:
            self.lost()
            return PutResult(Outcome.FAILED, reason=str(error))
        finally:
            link.end_writing()

    async def _reserve(self, access: Access, block: Put, deadline_s: float) -> Spare | PutResult | None:
        losses = access.link.losses
        request = access.link.start(Op.RESERVE, wire.pack_wants(0.0, [_want(block)]), deadline_s)
        answers, _ = wire.unpack_grants(await self.driver.finish((access.link, request), deadline_s))
        if len(answers) == 1 and answers[0].grant is Grant.GRANTED:
            return Spare(answers[0].slot, answers[0].generation, losses, self.now_s())
        return _DUPLICATE if answers and answers[0].grant is Grant.DUPLICATE else None

    async def _store(
        self,
        access: Access,
        memory: SlotMemory,
        spares: Spares,
        block: Put,
        spare: Spare,
        next_key: bytes | None,
        deadline_s: float,
    ) -> PutResult:
        room = memory.slot(spare.slot, block.size)
        try:
            sum_ = await self.driver.work(block.size, lambda: fill_room(block, room))
        except BaseException:
            spares.give_back(spare)
            raise
        now_s, losses = self.now_s(), access.link.losses
        body = wire.pack_store(Storing(spare.slot, spare.generation, sum_, _want(block), next_key))
        try:
            request = access.link.start(Op.STORE, body, deadline_s)
        except KvtoolError:
            spares.give_back(spare)
            raise
        answer = await self.driver.finish((access.link, request), deadline_s)
        grant, commit, next_ = wire.unpack_stored(answer)
        if grant is Grant.DUPLICATE:
            spares.keep(spare)
            return _DUPLICATE
        if next_ is not None and next_.grant is Grant.GRANTED:
            spares.keep(Spare(next_.slot, next_.generation, losses, now_s))
        return outcome_of(commit, Path.SHM)


def _want(block: Put) -> Want:
    return Want(block.key, block.size, block.parent, block.transient_s, block.retention)
