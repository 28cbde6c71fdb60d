"""Puts over all ranks: reserve, write, commit, a batch at a time.

A block is written straight into its slot where the rank's memory is mapped, else into staging and from there by one
UCX transfer for each rank. While bytes may still be on their way into a slot, the connection under which it was
reserved stays open, since its end is what tells the rank that nobody writes there any more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtool.errors import KvtoolError, ProtocolError
from kvtool.kv.layout import KVLayout
from kvtool.kv.record import Grant, Granted, Want
from kvtool.pool import wire
from kvtool.pool.access import UCX_SETTLE_S, Access
from kvtool.pool.base import Cancelling, Outcome, Path, Put, PutResult
from kvtool.pool.driver import UCX_SIZE, Driver
from kvtool.pool.filling import BATCH, fill_room, fill_rooms, outcome_of, refusal
from kvtool.pool.memory import SlotMemory
from kvtool.pool.ranks import Ranks, Route
from kvtool.pool.wire import Op

ANSWER_SHARE = 0.8


@dataclass
class _Part:
    """One rank's share of a batch. `writing`: its connection is held open until the end of the put."""

    access: Access
    path: Path
    memory: SlotMemory | None
    """As it was when the put began: a rank that dies meanwhile is let go of by other threads."""
    positions: list[int] = field(default_factory=list)
    request: int = 0
    granted: list[tuple[int, Granted]] = field(default_factory=list)
    commits: list[tuple[int, int, int]] = field(default_factory=list)
    writing: bool = True


class Putting:
    """One call of `write`. Positions are those of `blocks`."""

    def __init__(
        self,
        ranks: Ranks,
        driver: Driver,
        layout: KVLayout,
        blocks: Sequence[Put],
        deadline_s: float,
        at: int | str | None = None,
        cancel: Cancelling | None = None,
    ) -> None:
        self._ranks, self._door, self._layout = ranks, ranks.door, layout
        self._driver, self._to, self._cancel = driver, at, cancel
        self._blocks, self._deadline_s = blocks, deadline_s
        self._results: list[PutResult | None] = [None] * len(blocks)
        self._answers_by_s = deadline_s

    async def run(self) -> list[PutResult]:
        self._door.look_after()
        for at in range(0, len(self._blocks), BATCH):
            left = list(range(at, min(at + BATCH, len(self._blocks))))
            if self._cancel is not None and self._cancel.is_set():
                self._fail(range(at, len(self._blocks)), "cancelled")
                break
            while left:
                again, progress = await self._round(left)
                if again and not progress and self._ranks.now_s() >= self._deadline_s:
                    for position in again:
                        reason = "no slot came free within the budget of this put"
                        self._results[position] = PutResult(Outcome.REFUSED, reason=reason)
                    break
                left = again
        return [result or PutResult(Outcome.FAILED, reason="no answer") for result in self._results]

    async def _round(self, positions: list[int]) -> tuple[list[int], bool]:
        """One reserve, write, commit for each rank; who must ask again, and whether anything was written."""
        parts: list[_Part] = []
        again: list[int] = []
        try:
            await self._split(positions, parts)
            self._reserve(parts)
            for part in parts:
                again += await self._granted(part)
            for part in parts:
                if part.granted:
                    await self._write(part)
            for part in parts:
                if part.commits:
                    await self._commit(part)
        finally:
            for part in parts:
                if part.request:  # broken off before its answer came
                    part.access.link.forget(part.request, self._deadline_s)
                self._abort(part)
                if part.writing:
                    part.access.link.end_writing()
        return again, any(part.commits for part in parts)

    def _fail(self, positions: Sequence[int], reason: str) -> None:
        for position in positions:
            if self._results[position] is None:
                self._results[position] = PutResult(Outcome.FAILED, reason=reason)

    async def _split(self, positions: list[int], parts: list[_Part]) -> None:
        """To the first owner of each that can be written to."""
        route = Route(self._ranks, [self._blocks[position].key for position in positions], self._to, reading=False)
        pending = route.first()
        while pending:
            access, mine = pending.pop(0)
            if access is None:
                self._fail([positions[at] for at in mine], "no rank of the pool is up")
                continue
            part = await self._open(access)
            if not isinstance(part, str):
                part.positions = [positions[at] for at in mine]
                parts.append(part)
                continue
            self._ranks.lost()
            others = route.next(mine)
            pending += others
            left = set(mine).difference(*(share for _, share in others))
            self._fail([positions[at] for at in sorted(left)], part)

    async def _open(self, access: Access) -> _Part | str:
        """A part whose connection is held open, or why there is none."""
        down = f"rank {access.state.rank} is down or does not answer"
        now_s = self._ranks.now_s()
        by_s = now_s + (self._deadline_s - now_s) / 2  # leave time for the others
        try:
            if not access.link.usable:
                return down
            path = await self._driver.reach(access, by_s)
            memory = await self._driver.writable(access, by_s) if path is Path.SHM else None
        except KvtoolError as error:
            return str(error)
        if path is None:
            return f"rank {access.state.rank}: neither shared memory nor UCX nor a socket reaches it"
        if path is Path.SHM and memory is None:
            return down
        return _Part(access, path, memory) if access.link.begin_writing() else down

    def _reserve(self, parts: list[_Part]) -> None:
        now_s = self._ranks.now_s()
        left_s = max(0.0, self._deadline_s - now_s)
        wait_s = left_s * ANSWER_SHARE
        self._answers_by_s = now_s + left_s * (1 + ANSWER_SHARE) / 2  # time to write and commit to those who do answer
        for part in parts:
            wants = [self._want(position) for position in part.positions]
            try:
                body = wire.pack_wants(wait_s, wants)
                part.request = part.access.link.start(Op.RESERVE, body, self._deadline_s)
            except KvtoolError as error:
                self._fail(part.positions, str(error))

    def _want(self, position: int) -> Want:
        block = self._blocks[position]
        return Want(block.key, block.size, block.parent, block.transient_s, block.retention)

    async def _granted(self, part: _Part) -> list[int]:
        """Take in a rank's answers; the positions that must ask again."""
        if not part.request:
            return []
        try:
            body = await self._driver.finish((part.access.link, part.request), self._answers_by_s)
            part.request = 0
            answers, why = wire.unpack_grants(body)
            if len(answers) != len(part.positions):
                raise ProtocolError(
                    f"rank {part.access.state.rank} answered {len(answers)} wants of the {len(part.positions)} asked"
                )
        except KvtoolError as error:
            part.request = 0
            self._ranks.lost()
            self._fail(part.positions, str(error))
            return []
        again = []
        for position, answer in zip(part.positions, answers, strict=True):
            if answer.grant is Grant.GRANTED:
                part.granted.append((position, answer))
            elif answer.grant is Grant.WAIT:
                again.append(position)
            else:
                size = self._blocks[position].size
                self._results[position] = refusal(answer, size, self._layout.block_size, why)
        return again

    async def _write(self, part: _Part) -> None:
        if part.path is Path.SHM:
            size = sum(self._blocks[position].size for position, _ in part.granted)
            await self._driver.work(size, lambda: self._write_mapped(part))
            return
        if part.path is Path.SOCKET:
            await self._driver.work(UCX_SIZE, lambda: self._write_socket(part))
            return
        try:
            step = max(1, self._door.blocks // 4)
        except KvtoolError as error:  # closed meanwhile
            self._fail([position for position, _ in part.granted], str(error))
            return
        granted = part.granted
        for at in range(0, len(granted), step):
            some = granted[at : at + step]
            if not await self._driver.work(UCX_SIZE, functools.partial(self._write_ucx, part, some)):
                break

    def _write_mapped(self, part: _Part) -> None:
        memory = part.memory
        assert memory is not None
        work = [(self._blocks[at], memory.slot(grant.slot, self._blocks[at].size)) for at, grant in part.granted]
        for (_, grant), sum_ in zip(part.granted, fill_rooms(work), strict=True):
            part.commits.append((grant.slot, grant.generation, sum_))

    def _write_socket(self, part: _Part) -> None:
        """One transfer for all of a rank's blocks."""
        blocks = [self._blocks[position] for position, _ in part.granted]
        slots = [(grant.slot, grant.generation) for _, grant in part.granted]
        try:
            lane = part.access.lanes.take(self._deadline_s)
        except KvtoolError as error:
            self._fail([position for position, _ in part.granted], str(error))
            return
        try:
            with self._door.inbox.take([self._layout.block_size], self._deadline_s) as (room,):
                body = wire.pack_write(lane.number, lane.next_transfer(), slots)
                part.access.link.say(Op.WRITE, body, self._deadline_s)
                sources = [functools.partial(_bytes_of, block, room) for block in blocks]
                wanted = [(b.size, b.key, source) for b, source in zip(blocks, sources, strict=True)]
                sums = lane.put(wanted, self._deadline_s)
            part.commits = [(*slot, sum_) for slot, sum_ in zip(slots, sums, strict=True)]
        except KvtoolError as error:
            self._fail([position for position, _ in part.granted], str(error))
        finally:
            part.access.lanes.give(lane)

    def _write_ucx(self, part: _Part, granted: Sequence[tuple[int, Granted]]) -> bool:
        from kvtool.transfer.ucx import PeerDead

        blocks = [self._blocks[position] for position, _ in granted]
        try:
            staged = self._door.reader.staging.take([block.size for block in blocks], self._deadline_s)
        except KvtoolError as error:
            self._fail([position for position, _ in granted], str(error))
            return False
        with staged:
            sums = []
            for block, room in zip(blocks, staged, strict=True):
                sums.append(fill_room(block, room))
            offsets = [part.access.offset(grant.slot) for _, grant in granted]
            try:
                pieces = list(zip(offsets, staged, strict=True))
                self._door.reader.write(part.access.peer, pieces, self._deadline_s)
            except KvtoolError as error:
                self._ranks.lost()
                self._fail([position for position, _ in part.granted], str(error))
                if not isinstance(error, PeerDead):  # it may still be written: neither abort nor hang up
                    done = {slot for slot, _, _ in part.commits}
                    reserved = [(g.slot, g.generation) for _, g in part.granted if g.slot not in done]
                    part.granted = [(p, g) for p, g in part.granted if g.slot in done]
                    self._door.abandon(part.access.link, reserved)
                    part.writing = False
                return False
        part.commits += [(g.slot, g.generation, sum_) for (_, g), sum_ in zip(granted, sums, strict=True)]
        return True

    async def _commit(self, part: _Part) -> None:
        by_slot = {grant.slot: position for position, grant in part.granted}
        positions = [by_slot[slot] for slot, _, _ in part.commits]
        try:
            request = part.access.link.start(Op.COMMIT, wire.pack_commits(part.commits), self._deadline_s)
            body = await self._driver.finish((part.access.link, request), self._deadline_s)
            commits = wire.unpack_committed(body)
            if len(commits) != len(positions):
                raise ProtocolError(
                    f"rank {part.access.state.rank} answered {len(commits)} of {len(positions)} commits"
                )
        except KvtoolError as error:
            self._ranks.lost()
            self._fail(positions, str(error))
        else:
            for position, commit in zip(positions, commits, strict=True):
                self._results[position] = outcome_of(commit, part.path)
        committed = {slot for slot, _, _ in part.commits}
        part.granted = [(position, grant) for position, grant in part.granted if grant.slot not in committed]

    def _abort(self, part: _Part) -> None:
        """Give back what was reserved and not committed: `fill` raised, or a transfer failed."""
        aborts = [(grant.slot, grant.generation) for _, grant in part.granted]
        if aborts:
            settle_s = UCX_SETTLE_S if part.path is Path.UCX else 0.0
            part.access.link.tell(Op.ABORT, wire.pack_aborts(settle_s, aborts))
            self._fail([position for position, _ in part.granted], "the put was broken off")


def _bytes_of(block: Put, room: memoryview) -> memoryview:
    """Where they lie, or filled into `room`."""
    if block.data is not None:
        if len(block.data) != block.size:
            raise ValueError(f"put of {block.key.hex()[:16]}: wanted {block.size} bytes, found {len(block.data)}")
        return block.data
    piece = room[: block.size]
    fill_room(block, piece)
    return piece
