"""Scrubbing: blocks are read and checked before somebody needs them.

Disks and memory lose bits silently. In the background every record of the file is read again and again, slowly and only
while nothing else moves; on demand (`kvtool pool verify`) everything in memory and file, at once. What is damaged is
forgotten: a good copy in the other tier, or on another rank, goes on being served, and without one it is a miss.

`Pace` and `Pass` are rules: they are told the time. `Scrub` runs where the rules live, and its checks on threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from kvtool.errors import BlockCorrupt, KvtoolError
from kvtool.kv.block import BlockKey
from kvtool.kv.record import Reading
from kvtool.kv.source import Source
from kvtool.pool.tiers import Event, Tiers
from kvtool.transfer.checksum import checksum

OWNER = -1
"""Of the leases under which blocks are checked; clients count from 1, the copier is 0."""
REST_S = 600.0
"""Between two rounds of the background."""
GAP_S = 0.1
VERIFY_AHEAD = 8


class Pace:
    """When the background may read the next record: `rate` bytes a second at most, and no small record after another
    without a pause."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.next_at_s = 0.0

    def may(self, now_s: float, busy: bool) -> bool:
        return self.rate > 0 and now_s >= self.next_at_s and not busy

    def read(self, size: int, now_s: float) -> None:
        self.next_at_s = now_s + max(GAP_S, size / self.rate)

    def round_ended(self, now_s: float) -> None:
        self.next_at_s = now_s + REST_S


@dataclass
class Checked:
    """What one round, or all rounds, found."""

    dram: int = 0
    file: int = 0
    dram_damaged: int = 0
    file_damaged: int = 0
    """Damaged, or the disk gave an error instead of them."""
    moved: int = 0
    """Not checked: they went or moved meanwhile, or are transient."""
    bytes: int = 0


class Round:
    """One round over `keys`: what is to be checked next, what was found."""

    def __init__(self, keys: Iterable[BlockKey]) -> None:
        self._keys: Iterator[BlockKey] = iter(keys)
        self.found = Checked()
        self.running = 0
        self.exhausted = False

    @property
    def done(self) -> bool:
        return self.exhausted and not self.running

    def next(self) -> BlockKey | None:
        key = next(self._keys, None)
        self.exhausted = key is None
        return key


class Scrub:
    """The scrubbing of one rank. `post` as for `Tiers`; `executor` hashes memory."""

    def __init__(
        self, tiers: Tiers, post: Callable[[Event], None], rate: float, executor: Executor | None = None
    ) -> None:
        self.tiers, self.post, self.pace = tiers, post, Pace(rate)
        self.total = Checked()
        self._executor = executor
        self._numbers = itertools.count(1)
        self._round: Round | None = None
        self._verifying: Round | None = None

    def tick(self, now_s: float, busy: bool) -> float:
        """Begin what may begin; when to come again. `busy`: somebody is waiting for this rank."""
        if self._verifying is not None:
            self._verify_more(now_s)
        elif self.pace.may(now_s, busy or self.tiers.store.moving > 0):
            self._background(now_s)
        return max(self.pace.next_at_s, now_s + GAP_S) if self.pace.rate > 0 else now_s + REST_S

    def verify(self, start: bool, now_s: float) -> dict[str, object]:
        """Begin to check everything, unless that is under way already, if `start`; how far it is."""
        if start and (self._verifying is None or self._verifying.done):
            self._verifying = Round(list(self.tiers.store.catalog()))
            self._verify_more(now_s)
        going = self._verifying
        return {"running": going is not None and not going.done, **asdict(going.found if going else Checked())}

    def report(self) -> dict[str, int]:
        """What was checked since the start, for a status."""
        return asdict(self.total)

    def close(self) -> None:
        if isinstance(self._executor, ThreadPoolExecutor):
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _background(self, now_s: float) -> None:
        if self.tiers.files is None:
            self.pace.round_ended(now_s)
            return
        if self._round is None:
            self._round = Round(list(self.tiers.store.catalog()))
        while not self._round.running:
            key = self._round.next()
            if key is None:
                self._round = None
                self.pace.round_ended(now_s)
                return
            source = self._lend(key, now_s)
            if source is not None and source.file_slot >= 0:
                self.pace.read(source.length, now_s)
                self._check_file(self._round, source)

    def _verify_more(self, now_s: float) -> None:
        going = self._verifying
        while going is not None and not going.exhausted and going.running < VERIFY_AHEAD:
            key = going.next()
            if key is None:
                break
            number = next(self._numbers)
            source = self.tiers.store.lend((OWNER, number), [key], now_s)[0]
            if source is None:
                going.found.moved += 1
                continue
            if source.slot >= 0:
                self._check_memory(going, source, number)
            if source.file_slot >= 0 and self.tiers.files is not None:
                self._check_file(going, source)

    def _lend(self, key: BlockKey, now_s: float) -> Source | None:
        """Where a block is, without holding it: a file's slot that went to another block is found out by its header."""
        number = next(self._numbers)
        source = self.tiers.store.lend((OWNER, number), [key], now_s)[0]
        if source is not None and source.slot >= 0:
            self.tiers.store.release((OWNER, number), now_s)
        return source

    def _check_file(self, going: Round, source: Source) -> None:
        assert self.tiers.files is not None
        going.running += 1

        def ended(now_s: float, error: BaseException | None) -> None:
            damaged = isinstance(error, KvtoolError) and self.tiers.store.file_damaged(
                source.key, source.file_slot, source.record, now_s
            )
            for found in (going.found, self.total):
                found.file += error is None or damaged
                found.file_damaged += damaged
                found.moved += error is not None and not damaged
                found.bytes += source.length

        future = self.tiers.files.check(source.file_slot, source.key, source.length, generation=source.record)
        future.add_done_callback(lambda future: self._post(going, future, ended))

    def _check_memory(self, going: Round, source: Source, number: int) -> None:
        store, generation = self.tiers.store, self.tiers.store.dram.generation(source.slot)
        going.running += 1

        def ended(now_s: float, error: BaseException | None) -> None:
            damaged = isinstance(error, BlockCorrupt) and store.corrupt(source.key, source.slot, generation, now_s)
            store.release((OWNER, number), now_s)
            for found in (going.found, self.total):
                found.dram += error is None or damaged
                found.dram_damaged += damaged
                found.moved += error is not None and not damaged
                found.bytes += source.length

        data = self.tiers.memory.slot(source.slot, source.length)

        def check() -> None:
            if checksum(data, source.key) != source.checksum:
                raise BlockCorrupt(f"block {source.key.hex()[:8]} in memory is damaged")

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvtool-scrub")
        self._executor.submit(check).add_done_callback(lambda future: self._post(going, future, ended))

    def _post(self, going: Round, future: Future[Any], ended: Callable[[float, BaseException | None], None]) -> None:
        error = None if future.cancelled() else future.exception()

        def event(now_s: float) -> list[Reading]:
            going.running -= 1
            ended(now_s, error)
            if going is self._verifying:
                self._verify_more(now_s)
            return []

        self.post(event)
