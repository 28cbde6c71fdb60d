"""Disks that fail, run full, hang or get slow: puts and reads go on, the reason is said, the disk is not hammered."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import pytest
from blocks import KEYS as REAL_KEYS
from blocks import LAYOUT, puts, room_for
from blocks import payload as real_payload
from diskrank import KEYS, SLOTS, Rank, Remembering, payload

from kvtool.kv.record import Commit, State
from kvtool.kv.room import MOVES_MAX, STUCK_S
from kvtool.pool.base import Outcome
from kvtool.pool.embedded import EmbeddedPool
from kvtool.transfer.disk import FileDisk
from kvtool.transfer.files import BlockFile


@dataclass
class Failing(Remembering):
    """Fails with `error` while there is one."""

    error: int = 0
    reads_too: bool = False
    tries: int = 0

    def pwritev(self, views, at: int) -> int:
        self.tries += 1
        self._fail()
        return super().pwritev(views, at)

    def preadv(self, views, at: int) -> int:
        if self.reads_too:
            self._fail()
        return super().preadv(views, at)

    def sync(self) -> None:
        self._fail()
        super().sync()

    def _fail(self) -> None:
        if self.error:
            raise OSError(self.error, "No space left on device" if self.error == errno.ENOSPC else "Input/output error")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("through", [False, True])
def test_puts_go_on_while_the_disk_fails_and_it_is_tried_ever_more_rarely(error, through):
    disk = Failing()
    rank = Rank(disk, through)
    disk.error, disk.tries = error, 0
    for round_ in range(30):
        for key in KEYS:
            rank.now_s += 0.1
            assert rank.put(key, None) in (Commit.STORED, None), "a put may be a duplicate, and never fails"
        assert len(rank.store.resident()) == SLOTS and rank.store.lost_slots() == 0, f"round {round_}"
    assert 1 <= rank.store.counts.demote_failed == disk.tries <= 24, "48 s of puts, tries after 0.1, 0.2, ... 10 s"
    report = rank.tiers.report()
    assert report["failures"] >= 5 and ("No space left" if error == errno.ENOSPC else "Input/output") in report["why"]
    assert "files are left alone for now:" in rank.store.why_full()
    disk.error = 0
    rank.now_s += 11.0
    results = {rank.put(key, None) for key in KEYS}
    assert rank.store.backoff.failures == 0 and rank.tiers.report()["why"] == ""
    assert len(rank.store.resident()) > SLOTS and (Commit.DURABLE in results) == through


def test_a_block_that_cannot_be_read_is_a_miss_and_the_others_are_not():
    disk = Failing()
    rank = Rank(disk, through=False)
    for key in KEYS[:8]:
        rank.put(key, None)
    filed = [key for key, state in rank.store.resident().items() if state is State.FILED]
    disk.error, disk.reads_too = errno.EIO, True
    assert rank.get(1, filed[0]) is None and rank.store.counts.promote_failed == 1
    disk.error = 0
    assert rank.get(2, filed[1]) == payload(filed[1])
    assert rank.store.lost_slots() == 0 and filed[0] not in rank.store.resident()


class Hanging(Executor):
    """Keeps what it is given, while the disk hangs, until it is let go."""

    def __init__(self) -> None:
        self.hangs, self.kept = False, []

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.kept.append((future, fn, args, kwargs))
        if not self.hangs:
            self.let_go()
        return future

    def let_go(self) -> None:
        while self.kept:
            future, fn, args, kwargs = self.kept.pop(0)
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)


@pytest.mark.parametrize("through", [False, True])
def test_a_disk_that_hangs_is_as_if_there_were_no_files_until_it_answers(through):
    rank = Rank(Remembering(), through)
    hanging = Hanging()
    rank.file._executor, rank.file._at_once = hanging, hanging.submit
    for key in KEYS[:6]:
        rank.put(key, None)
    filed = [key for key, state in rank.store.resident().items() if state is State.FILED]
    hanging.hangs = True
    stuck = [rank.begin(key) for key in KEYS[6:8]]  # what they displace is on its way to a disk that does not answer
    assert rank.store.moving and filed
    rank.now_s += STUCK_S + 0.1
    for key in KEYS[8:]:
        rank.now_s += 0.1
        assert rank.begin(key) is Commit.STORED, "puts go on without the disk"
    assert rank.store.moving <= MOVES_MAX
    assert rank.get(1, filed[0]) is None, "a miss at once, and not when the reader's patience is over"
    assert not rank.store.audit(rank.now_s + 1.0)[0].kind.startswith("lease")
    hanging.hangs = False
    hanging.let_go()
    rank.settle()
    assert rank.store.moving == 0 and rank.store.lost_slots() == 0 and stuck
    assert rank.get(2, filed[0]) in (None, payload(filed[0]))
    assert rank.put(KEYS[0], None) in (Commit.STORED, Commit.DURABLE, None)


class Slow(FileDisk):
    """A real file whose reads wait while `go` is not set."""

    go = threading.Event()

    def preadv(self, views, at: int) -> int:
        assert self.go.wait(20)
        return super().preadv(views, at)


def test_a_read_from_a_slow_disk_is_answered_within_its_budget_with_what_is_there(tmp_path):
    Slow.go.set()
    pool = EmbeddedPool(LAYOUT, room_for(8), 2**22, file_dir=tmp_path)
    pool._tiers.files.close()
    pool._tiers.files = BlockFile(
        None, LAYOUT.block_size, pool._store.files.count, disk=Slow(tmp_path / "slow"), fresh=True
    )
    try:
        for at in range(0, 24, 2):
            assert {r.outcome for r in pool.write(puts(REAL_KEYS[at : at + 2]), 10)} == {Outcome.STORED}
        here = [key for key, state in pool._store.resident().items() if state is State.COMMITTED][-1]
        assert pool._store.resident()[REAL_KEYS[0]] is State.FILED
        Slow.go.clear()
        began_s = time.monotonic()
        with pool.read(REAL_KEYS[:1], 0.2) as read:
            assert list(read.blocks) == []
        with pool.read([here], 5) as read:
            assert bytes(read.blocks[0].data) == real_payload(here), "memory does not wait for the disk"
        assert time.monotonic() - began_s < 3 and pool.counts().misses["timeout"] == 1
        Slow.go.set()
        with pool.read(REAL_KEYS[:1], 10) as read:
            assert bytes(read.blocks[0].data) == real_payload(REAL_KEYS[0])
    finally:
        Slow.go.set()
        pool.close()
