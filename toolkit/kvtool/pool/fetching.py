"""From leases to bytes: what ranks answered, as checked blocks in place, or copied into the caller's buffers.

In place, where a rank's memory is mapped: a view, hashed once. Elsewhere blocks come by UCX or by socket into the
client's staging, one transfer a rank, or straight into the caller's buffer: by socket, and by UCX if it is registered.
A copy into a buffer is hashed as it is made (`transfer.checksum`), so it is the copy that is vouched for; whatever
happens to the lease meanwhile cannot spoil it.

A block whose bytes are not its own is a miss: "lapsed" when its lease is over, else "corrupt", and its rank is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtool.errors import KvtoolError
from kvtool.kv.block import BlockKey
from kvtool.pool import wire
from kvtool.pool.asking import Asking, Part, Setting
from kvtool.pool.base import BlockView, Got, Path, Tier, hit_of
from kvtool.pool.buffers import HostRoom, Room
from kvtool.pool.driver import UCX_SIZE
from kvtool.pool.pace import Pace
from kvtool.pool.reading import Held, Placed
from kvtool.pool.wire import Op
from kvtool.transfer.checksum import checksum
from kvtool.transfer.landing import Landing
from kvtool.transfer.staging import Staged

Hit = tuple[int, BlockKey, tuple[int, int, int, int, int]]
"""(position, key, (slot, length, generation, checksum, 1 if it came from a file))"""


def nothing() -> None:
    """The release of what holds nothing."""


@dataclass
class Views:
    """Blocks in place by position, and the leases or staging that they need."""

    blocks: dict[int, tuple[BlockView, Placed]] = field(default_factory=dict)
    helds: list[Held] = field(default_factory=list)


class Fetching:
    """The bytes of one `Asking`, which ran."""

    def __init__(self, setting: Setting, asking: Asking, pace: Pace, deadline_s: float) -> None:
        self._ranks, self._driver, self._now_s = setting.ranks, setting.driver, setting.now_s
        self._asking, self._pace, self._deadline_s = asking, pace, deadline_s
        self._staged = 0
        self._sums: dict[int, int] = {}  # by position, of what came by socket

    def hits(self, part: Part) -> list[Hit]:
        """A rank's blocks that count: before the cut of a leading run, else all."""
        assert part.found is not None
        cut = self._asking.cut
        return [
            (position, key, hit)
            for position, key, hit in zip(part.at, part.names, part.found.hits, strict=True)
            if position < cut
        ]

    # In place

    async def views(self) -> Views:
        """Verified views of all blocks before the cut. When it raises, nothing is held."""
        views = Views()
        try:
            while self._asking.parts:
                part = self._asking.parts.pop(0)
                try:
                    if part.found is not None:
                        await self._view(part, views)
                finally:
                    part.give_lane()
        except BaseException:
            for held in views.helds:
                held.release()
            self._asking.let_go()
            raise
        return views

    async def _view(self, part: Part, views: Views) -> None:
        hits, found = self.hits(part), part.found
        assert found is not None
        lapses_at_s, release = part.sent_s + found.term_s, self._release(part)
        if part.memory is not None:
            memory = part.memory
            held = Held(lapses_at_s, self._now_s, memory.generations, release)
            data: Sequence[memoryview] = [memory.slot(hit[0], hit[1]).toreadonly() for _, _, hit in hits]
        else:
            try:
                data, held = await self._bring(part, hits, lapses_at_s)
            finally:
                release()
        views.helds.append(held)
        path = Path.SHM if part.memory is not None else part.access.path or Path.UCX
        size = sum(hit[1] for _, _, hit in hits)
        await self._driver.work(size, lambda: self._check(part, hits, data, held, path, views))

    def _check(
        self, part: Part, hits: Sequence[Hit], data: Sequence[memoryview], held: Held, path: Path, views: Views
    ) -> None:
        began_s, size = self._now_s(), 0
        for (position, key, hit), view in zip(hits, data, strict=False):
            slot, length, generation, wanted, filed = hit
            found = self._sums.get(position)
            if (checksum(view, key) if found is None else found) != wanted:
                self._asking.end([position], self._failed(part, key, slot, generation, held.deadline_s))
                break
            size += length
            block = BlockView(key, view, Tier.FILE if filed else Tier.DRAM, path)
            views.blocks[position] = (block, Placed(held, slot, generation))
        self._pace.add(size, self._now_s() - began_s)

    # Into buffers

    async def copy(self, rooms: Sequence[Room], got: list[Got | None]) -> None:
        """Every hit into its room; `got` by position. A miss among them also ends a leading run."""
        try:
            while self._asking.parts:
                part = self._asking.parts.pop(0)
                try:
                    if part.found is not None:
                        await self._copy(part, rooms, got)
                finally:
                    part.give_lane()
        except BaseException:
            self._asking.let_go()
            raise

    async def _copy(self, part: Part, rooms: Sequence[Room], got: list[Got | None]) -> None:
        hits, found = self.hits(part), part.found
        assert found is not None
        for position, _, hit in hits:
            if hit[1] > rooms[position].size:
                self._asking.end([position], "too_small")
        hits = [item for item in self.hits(part) if item[2][1] <= rooms[item[0]].size]
        lapses_at_s, release = part.sent_s + found.term_s, self._release(part)
        if part.memory is not None:
            memory = part.memory
            sources = [memory.slot(hit[0], hit[1]) for _, _, hit in hits]
            size = sum(hit[1] for _, _, hit in hits)
            try:
                await self._driver.work(
                    size, lambda: self._fill(part, hits, sources, rooms, got, lapses_at_s, Path.SHM)
                )
            finally:
                release()
            return
        try:
            await self._copy_far(part, hits, rooms, got, lapses_at_s)
        finally:
            release()

    async def _copy_far(
        self, part: Part, hits: Sequence[Hit], rooms: Sequence[Room], got: list[Got | None], lapses_at_s: float
    ) -> None:
        if part.access.path is Path.SOCKET and all(isinstance(rooms[position], HostRoom) for position, _, _ in hits):
            await self._driver.work(UCX_SIZE, lambda: self._receive(part, hits, rooms, got, lapses_at_s))
            return
        if part.access.path is Path.UCX and self._ranks.door.lands:
            hits = await self._land(part, hits, rooms, got, lapses_at_s)
        while hits:
            step = max(1, self._door_blocks(part) // 2)
            data, held = await self._bring(part, hits[:step], lapses_at_s)
            if not data:
                self._asking.end([position for position, _, _ in hits[step:]], "rank_down")
                return
            now, hits = hits[: len(data)], hits[len(data) :]
            path = part.access.path or Path.UCX
            try:
                await self._driver.work(
                    sum(hit[1] for _, _, hit in now),
                    functools.partial(self._fill, part, now, data, rooms, got, lapses_at_s, path),
                )
            finally:
                held.release()

    async def _land(
        self, part: Part, hits: Sequence[Hit], rooms: Sequence[Room], got: list[Got | None], lapses_at_s: float
    ) -> list[Hit]:
        """By UCX straight into registered buffers, one transfer; what is left are the hits whose buffers are not."""
        door, access, rest = self._ranks.door, part.access, []
        there: list[tuple[Hit, HostRoom, Landing]] = []
        for item in hits:
            room = rooms[item[0]]
            landing = door.landing(room.address, item[2][1]) if isinstance(room, HostRoom) else None
            if landing is None or not isinstance(room, HostRoom):
                rest.append(item)
            elif landing.free:
                there.append((item, room, landing))
            else:
                self._asking.end([item[0]], "held")
        ranges = [(access.offset(hit[0]), hit[1]) for (_, _, hit), _, _ in there]
        addresses, landings = [room.address for _, room, _ in there], [landing for _, _, landing in there]

        def bring() -> None:
            door.reader.read_into(access.peer, ranges, addresses, list(set(landings)), self._deadline_s)

        def check() -> None:
            for (position, key, (slot, length, generation, wanted, filed)), room, _ in there:
                if checksum(room.view[:length], key) == wanted:
                    got[position] = hit_of(length, bool(filed), Path.UCX)
                else:
                    self._asking.end([position], self._failed(part, key, slot, generation, lapses_at_s))

        if there:
            try:
                await self._driver.work(UCX_SIZE, bring)
            except KvtoolError:
                access.transfers.bad(self._now_s())
                late = "timeout" if self._now_s() >= self._deadline_s else "rank_down"
                free = all(landing.free for landing in landings)
                self._asking.end([item[0] for item, _, _ in there], late if free else "held")
                self._ranks.lost()
                return rest
            access.transfers.good()
            await self._driver.work(sum(size for _, size in ranges), check)
        return rest

    def _fill(
        self,
        part: Part,
        hits: Sequence[Hit],
        sources: Sequence[memoryview],
        rooms: Sequence[Room],
        got: list[Got | None],
        lapses_at_s: float,
        path: Path,
    ) -> None:
        began_s, total = self._now_s(), 0
        for (position, key, hit), source in zip(hits, sources, strict=True):
            slot, length, generation, wanted, filed = hit
            if position >= self._asking.cut:
                continue
            if rooms[position].fill(source, key) == wanted:
                total += length
                got[position] = hit_of(length, bool(filed), path)
            else:
                self._asking.end([position], self._failed(part, key, slot, generation, lapses_at_s))
        self._pace.add(total, self._now_s() - began_s)

    def _receive(
        self, part: Part, hits: Sequence[Hit], rooms: Sequence[Room], got: list[Got | None], lapses_at_s: float
    ) -> None:
        """By socket straight into buffers in host memory; each block is checked as it has come."""
        views = []
        for position, _, hit in hits:
            room = rooms[position]
            assert isinstance(room, HostRoom)
            views.append(room.view[: hit[1]])

        def check(at: int, sum_: int) -> None:
            position, key, (slot, length, generation, wanted, filed) = hits[at]
            if sum_ == wanted:
                got[position] = hit_of(length, bool(filed), Path.SOCKET)
            else:
                self._asking.end([position], self._failed(part, key, slot, generation, lapses_at_s))

        began_s = self._now_s()
        try:
            self._from_lane(part, hits, views, check)
        except KvtoolError:
            part.access.transfers.bad(self._now_s())
            lost = [position for position, _, _ in hits if got[position] is None]
            self._asking.end(lost, "timeout" if self._now_s() >= self._deadline_s else "rank_down")
            self._ranks.lost()
            return
        part.access.transfers.good()
        self._pace.add(sum(map(len, views)), self._now_s() - began_s)

    # By UCX or socket

    def _door_blocks(self, part: Part) -> int:
        try:
            return self._ranks.door.blocks_by(part.access.path)
        except KvtoolError:
            return 0  # closed meanwhile, or no UCX: `_bring` finds that out

    async def _bring(self, part: Part, hits: Sequence[Hit], lapses_at_s: float) -> tuple[Sequence[memoryview], Held]:
        """The first of `hits` in memory of ours, as many as there is room for; held until the lease is let go of."""
        door, access = self._ranks.door, part.access
        none = Held(lapses_at_s, self._now_s, None, nothing)
        if not hits:
            return [], none
        positions = [position for position, _, _ in hits]
        if access.path not in (Path.UCX, Path.SOCKET):  # its memory was unmapped under us
            self._asking.end(positions, "rank_down")
            return [], none
        taken: list[Staged] = []
        try:
            door.look_after()
            room = door.blocks_by(access.path) - self._staged  # waiting for more would be waiting for ourselves
            count = min(len(hits), room)
            if count < len(hits):
                self._asking.end(positions[count:], "full")
            if count <= 0:
                return [], none
            await self._driver.work(UCX_SIZE, lambda: taken.append(self._transfer(part, hits[:count])))
        except KvtoolError:
            access.transfers.bad(self._now_s())
            self._asking.end(positions, "timeout" if self._now_s() >= self._deadline_s else "rank_down")
            self._ranks.lost()
            return [], none
        except BaseException:
            for staged in taken:
                staged.release()
            raise
        access.transfers.good()
        self._staged += count
        staged = taken[0]

        def release() -> None:
            self._staged -= count
            staged.release()

        return [view.toreadonly() for view in staged], Held(lapses_at_s, self._now_s, None, release)

    def _transfer(self, part: Part, hits: Sequence[Hit]) -> Staged:
        """
        Raises:
            KvtoolError: not all of it came by the deadline.
        """
        door, access = self._ranks.door, part.access
        if access.path is Path.UCX:
            ranges = [(access.offset(hit[0]), hit[1]) for _, _, hit in hits]
            return door.reader.read(access.peer, ranges, self._deadline_s)
        staged = door.inbox.take([hit[1] for _, _, hit in hits], self._deadline_s)
        try:
            self._from_lane(part, hits, list(staged), lambda at, sum_: self._sums.__setitem__(hits[at][0], sum_))
        except BaseException:
            staged.release()
            raise
        return staged

    def _from_lane(
        self, part: Part, hits: Sequence[Hit], views: Sequence[memoryview], each: Callable[[int, int], None]
    ) -> None:
        """`hits` into `views`: from the lane where everything comes that was found, else from one of their own.

        Raises:
            KvtoolError: not all of it came by the deadline.
        """
        link, lanes, found, keys = part.access.link, part.access.lanes, part.found, [key for _, key, _ in hits]
        assert found is not None
        if part.lane is None:
            part.lane = lanes.ask(link, part.number, [hit[0] for _, _, hit in hits], self._deadline_s)
        elif len(hits) < len(found.hits):  # some are of no use any more
            wanted = {hit: at for at, (_, _, hit) in enumerate(hits)}
            order = [wanted.get(hit) for hit in found.hits]
            views = [
                memoryview(bytearray(hit[1])) if at is None else views[at]
                for at, hit in zip(order, found.hits, strict=True)
            ]
            keys, told = list(part.names), each

            def each(at: int, sum_: int) -> None:
                mine = order[at]
                if mine is not None:
                    told(mine, sum_)

        try:
            part.lane.receive(views, keys, self._deadline_s, each)
        finally:
            part.give_lane()

    def _release(self, part: Part) -> Callable[[], None]:
        if part.lane is not None:
            return nothing
        return functools.partial(part.access.link.tell, Op.RELEASE, wire.pack_numbers([part.number]))

    def _failed(self, part: Part, key: BlockKey, slot: int, generation: int, lapses_at_s: float) -> str:
        """Bytes that are not the block's: because the lease lapsed, or because the block is corrupt."""
        if self._now_s() >= lapses_at_s:
            return "lapsed"
        part.access.link.tell(Op.CORRUPT, wire.pack_corrupt(key, slot, generation))
        return "corrupt"
