"""What a client does without a message, or with one that nobody waits for: on ranks whose memory it has mapped.

Blocks are found in their ranks' directories (`nearby`) and looked at, copied or read in place there; a put of what is
there already is told by them too; and a block that is put alone goes by the short way (`single`). Each step leaves what
it cannot vouch for to the messages of `calls`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from kvtool.errors import KvtoolError
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.kv.retention import DEFAULT
from kvtool.pool import wire
from kvtool.pool.access import Access
from kvtool.pool.asking import Asking, Setting
from kvtool.pool.base import BlockView, GetResult, Got, Outcome, Path, Put, PutResult, Tier
from kvtool.pool.buffers import Room
from kvtool.pool.driver import Driver
from kvtool.pool.nearby import Nearby
from kvtool.pool.ranks import Ranks, Route, Share
from kvtool.pool.reading import Counting, Held, Placed, PoolRead
from kvtool.pool.single import Single
from kvtool.pool.wire import Op

_SAY_S = 0.1
"""For a message without an answer to go out."""
_HELD = PutResult(Outcome.DUPLICATE)


class Here:
    """Beside `Calls`, which has the rest."""

    setting: Setting
    layout: KVLayout
    counting: Counting
    _ranks: Ranks
    _driver: Driver
    _now_s: Callable[[], float]
    _single: Single

    def _near(self, access: Access) -> Nearby | None:
        """The directory of a rank whose memory is mapped, unless it is known to be gone or hung. It tells the epoch
        too, as an answer would."""
        near = access.nearby
        if near is None or not access.link.connected or not access.link.usable:
            return None
        self._ranks.saw_epoch(near.epoch)
        return near

    def _matched_here(self, asking: Asking, route: Route, keys: Sequence[BlockKey]) -> list[Share]:
        """Who must be asked by message; ends the run where a rank's own directory says so."""
        shares: list[Share] = []
        if not route.simple:  # what one rank lacks says nothing of what it has behind that
            return route.first()
        for access, positions in route.first():
            known = None if access is None else self._match_local(access, [keys[position] for position in positions])
            if known is None:
                shares.append((access, positions))
            elif known < len(positions):
                left = positions[known:]
                others = route.next(left)
                shares += others
                if not others:
                    asking.end(left, "absent")
        return shares

    def _had_here(self, asking: Asking, route: Route, keys: Sequence[BlockKey]) -> list[Share]:
        """As `_matched_here`, each key on its own."""
        shares: list[Share] = []
        for access, positions in route.first():
            near = None if access is None else self._near(access)
            flags = None if near is None else near.has([keys[position] for position in positions])
            if flags is None:
                shares.append((access, positions))
                continue
            left = [position for position, there in zip(positions, flags, strict=True) if not there]
            others = route.next(left) if left else []
            shares += others
            if not others:
                asking.end(left, "absent")
        return shares

    def _match_local(self, access: Access, keys: Sequence[BlockKey]) -> int | None:
        """How many leading `keys` this rank's memory shows to be there, without a message; None: it must be asked."""
        near = self._near(access)
        return None if near is None else near.match(keys)

    async def _got_here(
        self,
        shares: Sequence[Share],
        keys: Sequence[BlockKey],
        rooms: Sequence[Room],
        found: list[Got | None],
        leading: bool,
    ) -> list[Share]:
        """Take what needs no message; the shares of those that do."""
        left: list[Share] = []
        for access, positions in shares:
            local: Sequence[Got | None] = ()
            if access is not None:
                mine, theirs = keys, rooms
                if len(positions) < len(keys):
                    mine, theirs = [keys[n] for n in positions], [rooms[n] for n in positions]
                job = functools.partial(self._get_local, access, mine, theirs, leading)
                local = await self._driver.work(len(mine) * self.layout.block_size, job)
            for position, one in zip(positions, local, strict=False):
                found[position] = one
            rest = [position for position in positions if found[position] is None] if local else positions
            if rest:
                left.append((access, rest))
        return left

    def _get_local(
        self, access: Access, keys: Sequence[BlockKey], rooms: Sequence[Room], leading: bool
    ) -> Sequence[Got | None]:
        """Blocks copied and checked without a message, None for those that must be asked for; may be shorter than
        `keys`."""
        near = self._near(access)
        return () if near is None else near.get(keys, rooms, leading)

    def get_one_near(self, key: BlockKey, room: Room) -> GetResult | None:
        """A block that is in the mapped memory of its first owner, without the ado of a batch; None: the long way."""
        if self._ranks.copies > 1:
            return None
        (access, _), *_ = self._ranks.split([key])
        near = None if access is None else self._near(access)
        got = None if near is None else near.get_one(key, room)
        if got is None:
            return None
        self.counting.got([got])
        return GetResult([got], 1)

    def _read_near(self, keys: Sequence[BlockKey]) -> PoolRead | None:
        """Views of blocks in mapped memory, found without a message and leased by one that nobody waits for; None: the
        ranks must be asked."""
        if self._ranks.copies > 1:
            return None
        shares = self._ranks.split(keys) if keys else []
        blocks: list[tuple[int, BlockView, Placed]] = []
        helds: list[Held] = []
        for access, positions in shares:
            near = None if access is None else self._near(access)
            mine = [keys[position] for position in positions] if len(shares) > 1 else keys
            found = None if near is None or access is None else self._view_near(access, near, mine, len(shares) > 1)
            if found is None:
                for held in helds:
                    held.release()
                return None
            held, views = found
            helds.append(held)
            for position, key, (slot, generation, data) in zip(positions, mine, views, strict=False):
                block = BlockView(key, data, Tier.DRAM, Path.SHM)
                blocks.append((position, block, Placed(held, slot, generation)))
        blocks.sort(key=lambda block: block[0])
        return PoolRead([block for _, block, _ in blocks], [placed for _, _, placed in blocks], helds)

    def _view_near(
        self, access: Access, near: Nearby, keys: Sequence[BlockKey], whole: bool
    ) -> tuple[Held, list[tuple[int, int, memoryview]]] | None:
        number, now_s = next(self.setting.numbers), self._now_s()
        link, told = access.link, False

        def lease(uses: Sequence[tuple[int, int]]) -> None:
            nonlocal told
            link.say(Op.LEASE, wire.pack_lease(number, uses), now_s + _SAY_S)
            told = True

        def release() -> None:
            if told:
                link.tell(Op.RELEASE, wire.pack_numbers([number]))

        try:
            views = near.views(keys, whole, lease)
        except KvtoolError:
            return None
        if views is None:
            release()
            return None
        return Held(now_s + self._ranks.term_s, self._now_s, near.generations, release), views

    def _write_near(self, blocks: Sequence[Put], at: int | str | None) -> list[PutResult | None]:
        """Puts of what is there already, as the directory of its rank shows; None for the others."""
        results: list[PutResult | None] = [None] * len(blocks)
        if self._ranks.copies > 1:
            return results
        for access, positions in Route(self._ranks, [block.key for block in blocks], at, reading=False).first():
            near = None if access is None else self._near(access)
            if near is None or access is None or near.ask:
                continue
            plain = [n for n in positions if blocks[n].transient_s is None and blocks[n].retention is DEFAULT]
            for position, there in zip(plain, near.holds([blocks[n].key for n in plain]), strict=True):
                if there:
                    results[position] = _HELD
        return results

    async def _write_one_near(self, block: Put, budget_s: float) -> list[PutResult] | None:
        """A put of one block to its first owner, whose memory is mapped, without the ado of a batch; None: the long
        way."""
        if self._ranks.copies > 1 or self._ranks.namespaces:
            return None
        (access, _), *_ = self._ranks.split([block.key])
        near = None if access is None else self._near(access)
        if near is None or access is None or near.ask:
            return None
        result: PutResult | None = None
        if block.transient_s is None and block.retention is DEFAULT and near.holds([block.key])[0]:
            result = _HELD
        else:
            result = await self._single.put(access, block, self._now_s() + budget_s)
        if result is None:
            return None
        self.counting.put([result], [block.size], Path.SHM)
        return [result]
