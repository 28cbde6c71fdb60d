"""What a client may do to a rank's memory: nothing by reading. After it closed: nothing. And never for ever."""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from blocks import KEYS, LAYOUT, payload, puts
from watching import clean, until

from kvtool.errors import PoolUnavailable
from kvtool.pool.base import Outcome
from kvtool.pool.client import PoolClient
from kvtool.pool.line import RankSlow
from kvtool.pool.wire import Op

pytestmark = pytest.mark.real

MINE = [b"accs" + key[4:] for key in KEYS]


def writable_maps(prefix: str) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if prefix in line and "w" in line.split()[1]]


def test_reading_maps_memory_that_even_a_bug_cannot_damage_and_putting_maps_another(pool, client):
    other = PoolClient(pool.state_file, LAYOUT, client_name="reader")
    before = len(writable_maps(pool.prefix))
    client.write(puts(MINE[:12]))
    assert len(writable_maps(pool.prefix)) == before + 2, "one for each rank, with the first put"
    with other.read(MINE[:12]) as read:
        assert len(writable_maps(pool.prefix)) == before + 2, "a reader has none"
        assert read.whole() == 12
        block = read.blocks[0].data
        assert isinstance(block.obj, mmap.mmap)
        for behind in (memoryview(block.obj), np.frombuffer(block.obj, np.uint8)):
            with pytest.raises((TypeError, ValueError)):
                behind[0] = 1
        assert not any(placed.held.generations.flags.writeable for placed in read._placed)
    other.close()
    until(lambda: clean(pool.run_dir), 2, "leases end with the read")


def test_a_view_in_place_sees_through_the_other_mapping_that_its_slot_was_given_away(pool, client):
    client.write(puts(MINE[:12]))
    with client.read(MINE[:1]) as read:
        (placed,) = read._placed
        owner = next(access for access in client._ranks.all() if access.memory.generations is placed.held.generations)
        memory = owner.writable(time.monotonic() + 5)
        assert read.whole() == 1
        memory.generations[placed.slot] += 1
        assert read.whole() == 0
        memory.generations[placed.slot] -= 1


def test_sending_waits_for_other_senders_no_longer_than_its_deadline(pool, client):
    client.match(MINE[:40])
    link = client._ranks.all()[0].link
    with link._sending:
        began_s = time.monotonic()
        with pytest.raises(RankSlow, match="others wait to be sent"):
            link.start(Op.PING, b"", began_s + 0.1)
        link.tell(Op.PING, b"")
        assert time.monotonic() - began_s < 1.0
        assert link._asked == {}, "what was not sent is not waited for"
    link.call(Op.PING, b"", time.monotonic() + 5)


def test_a_closed_client_is_misses_and_failures_and_makes_nothing_new(pool):
    client = PoolClient(pool.state_file, LAYOUT, path="ucx", client_name="closed")
    client.write(puts(MINE[:12]), budget_s=10)
    door = client._ranks.door
    client.close()
    with client.read(MINE[:12]) as read:
        assert list(read.blocks) == []
    assert client.match(MINE[:12]) == 0
    assert {result.outcome for result in client.write(puts(MINE[:2]))} == {Outcome.FAILED}
    with pytest.raises(PoolUnavailable, match="closed"):
        _ = door.reader
    assert door._reader is None


def test_a_client_that_is_closed_while_threads_read_gives_them_misses(pool, client):
    client.write(puts(MINE[:12]))
    other, failures = PoolClient(pool.state_file, LAYOUT, client_name="closing"), []
    begun = threading.Barrier(4)

    def work() -> None:
        try:
            begun.wait(5)
            for _ in range(200):
                with other.read(MINE[:12], budget_s=1) as read:
                    assert [bytes(b.data) for b in read.blocks] == [payload(key) for key in MINE[: len(read.blocks)]]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(5)
    other.close()
    for thread in threads:
        thread.join(20)
    assert failures == []
    until(lambda: clean(pool.run_dir), 3, "nothing is held")
