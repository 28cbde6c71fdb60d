"""The client for asyncio: many calls on one loop, and what a cancelled task leaves behind (nothing).

Where ranks are stopped, clients come by socket: what they find in mapped memory needs nobody's answer for a while.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from blocks import KEYS, LAYOUT, payload, puts
from watching import CONFIG, clean, held, stopped, until

from kvtool.pool import Outcome, Put, connect_async

pytestmark = pytest.mark.real

SIZE = LAYOUT.block_size


def room(count):
    return [bytearray(SIZE) for _ in range(count)]


def fresh(tag: bytes, count: int) -> list[bytes]:
    return [tag + key[len(tag) :] for key in KEYS[:count]]


async def _cleaned(pool, client, what: str) -> None:
    loop = asyncio.get_running_loop()
    until_s = loop.time() + CONFIG.lease_term_s * 0.7  # before the clock does it
    while loop.time() < until_s:
        await client.alive()  # a client takes in late answers with its next call
        if await asyncio.to_thread(clean, pool.run_dir):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{what}: {held(pool.run_dir)}")


def test_a_thousand_calls_run_at_once_on_one_loop_without_a_thread_each(pool):
    keys = fresh(b"many", 12)

    async def main():
        async with connect_async(pool.run_dir) as client:
            await client.write(puts(keys))
            before = threading.active_count()
            buffers = [room(12) for _ in range(100)]
            gets = [client.get_into(keys, mine) for mine in buffers]
            asks = [client.match(keys) for _ in range(500)] + [client.exists(keys) for _ in range(400)]
            results = await asyncio.gather(*gets, *asks)
            assert {result.count for result in results[:100]} == {12}
            assert all(bytes(mine[5]) == payload(keys[5]) for mine in buffers)
            assert set(results[100:600]) == {12} and results[600:] == [[True] * 12] * 400
            assert threading.active_count() <= before + 1
            with await client.read(keys) as read:
                assert read.whole() == 12
            assert client.counts().blocks_asked == 1212

    asyncio.run(main())
    until(lambda: clean(pool.run_dir), 2, "nothing is held")


@pytest.mark.parametrize("call", ["get_into", "read", "match", "write"])
def test_a_cancelled_call_gives_back_all_that_it_held(pool, call):
    keys = fresh(b"stop" + call[:2].encode(), 8)

    async def main():
        async with connect_async(pool.run_dir, path="socket") as client:
            await client.write(puts(keys))
            what = {
                "get_into": lambda: client.get_into(keys, room(8), 10),
                "read": lambda: client.read(keys, 10),
                "match": lambda: client.match(keys, 10),
                "write": lambda: client.write(puts(fresh(b"more" + call[:2].encode(), 8)), 10),
            }[call]
            with stopped(pool.rank_pids):
                task = asyncio.create_task(what())
                await asyncio.sleep(0.05)
                assert not task.done()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asyncio.wait_for(task, 1)
            await _cleaned(pool, client, "answers that came later are undone")
            assert (await client.get_into(keys, room(8))).count == 8

    asyncio.run(main())


def test_a_put_that_is_cancelled_while_it_is_being_filled_waits_for_that_and_stores_nothing(pool):
    keys, begun, go_on = fresh(b"fill", 80), threading.Event(), threading.Event()

    def fill(block: memoryview) -> None:
        begun.set()
        assert go_on.wait(10)
        block[:] = bytes(len(block))

    async def main():
        async with connect_async(pool.run_dir) as client:
            client._driver.inline_max = 0
            task = asyncio.create_task(client.write([Put(key, SIZE, fill) for key in keys[:4]], 10))
            assert await asyncio.to_thread(begun.wait, 5)
            task.cancel()
            done, _ = await asyncio.wait((task,), timeout=0.1)
            assert not done, "memory is not given back while a thread writes to it"
            assert {kind for _, kind in await asyncio.to_thread(held, pool.run_dir)} == {"reservation"}
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 2)
            await _cleaned(pool, client, "the reservation is aborted")
            assert await client.exists(keys[:4]) == [False] * 4

    asyncio.run(main())


def test_a_hung_pool_costs_one_budget_and_the_loop_goes_on(pool):
    keys = fresh(b"hang", 8)

    async def main():
        async with connect_async(pool.run_dir, path="socket") as client:
            await client.write(puts(keys))
            ticks = 0

            async def ticking():
                nonlocal ticks
                while True:
                    await asyncio.sleep(0.01)
                    ticks += 1

            ticker, loop = asyncio.create_task(ticking()), asyncio.get_running_loop()
            with stopped(pool.rank_pids):
                began_s = loop.time()
                assert (await client.get_into(keys, room(8), 0.4)).count == 0
                assert loop.time() - began_s < 0.8 and ticks > 5
                began_s = loop.time()
                for _ in range(50):
                    assert await client.match(keys, 0.4) == 0
                    assert (await client.write(puts(keys), 0.4))[0].outcome is Outcome.FAILED
                assert loop.time() - began_s < 0.6
            ticker.cancel()
            for _ in range(200):
                if await client.match(keys) == 8:
                    break
                await asyncio.sleep(0.01)
            assert await client.match(keys) == 8
            await _cleaned(pool, client, "late answers are undone")

    asyncio.run(main())


@pytest.mark.parametrize("path", ["socket", "ucx"])
def test_blocks_come_by_the_other_paths_too(pool, path):
    if path == "ucx":
        pytest.importorskip("nixl_cu13")
    keys = fresh(b"path" + path.encode(), 16)

    async def main():
        async with connect_async(pool.run_dir, path=path) as client:
            results = await client.write(puts(keys), 10)
            assert {(r.outcome, r.reason) for r in results} == {(Outcome.STORED, "")}
            buffers = room(16)
            result = await client.get_into(keys, buffers, 10)
            assert {got.path.value for got in result.blocks} == {path}
            assert [bytes(buffer) for buffer in buffers] == [payload(key) for key in keys]
            with await client.read(keys, 10) as read:
                assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in keys]

    asyncio.run(main())
    until(lambda: clean(pool.run_dir), 6, "nothing is held")
