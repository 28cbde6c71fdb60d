"""Real ranks under a real mpiexec, real clients: what comes back, and what is found out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from blocks import KEYS, LAYOUT, payload, puts
from watching import clean, held, keys_of, slot_of, until

from kvtool.errors import Refused, SpecRefused
from kvtool.kv.layout import KVLayout
from kvtool.pool.base import Outcome, Put, Tier
from kvtool.pool.base import Path as By
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import pool_status
from kvtool.pool.state import read_state

pytestmark = pytest.mark.real

HERE = Path(__file__).parent


def test_blocks_come_back_byte_for_byte_and_in_place(pool, client):
    client.delete(KEYS)  # what others put into the pool that the tests share
    assert {r.outcome for r in client.write(puts(KEYS[:12]))} == {Outcome.STORED}
    assert client.match(KEYS[:20]) == 12
    with client.read(KEYS[:20]) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:12]]
        assert {(block.tier, block.path) for block in read.blocks} == {(Tier.DRAM, By.SHM)}
        assert all(block.data.readonly for block in read.blocks)
        assert read.whole() == 12
        assert {kind for _, kind in held(pool.run_dir)} == {"lease"}
    until(lambda: clean(pool.run_dir), 1, "leases end with the read")
    assert client.counts().misses == {"absent": 8}
    assert all(keys_of(client, rank, KEYS[:12]) for rank in range(2)), "both ranks should hold some"


def test_a_second_put_is_a_duplicate_and_copies_nothing(client):
    client.write(puts(KEYS[:12]))

    def never(room):
        raise AssertionError("a duplicate was filled")

    again = client.write([Put(key, LAYOUT.block_size, never) for key in KEYS[:12]])
    assert {result.outcome for result in again} == {Outcome.DUPLICATE}


def test_a_process_elsewhere_reads_and_writes_by_ucx(pool, client):
    client.delete(KEYS)
    client.write(puts(KEYS[:12]))
    done = subprocess.run(
        [sys.executable, HERE / "peer.py", "ucx", pool.state_file], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["first"] and said["second"] and said["whole"] == 12
    assert said["outcomes"] == ["stored"] and said["again"] == ["duplicate"]
    assert said["read"] == {"dram/ucx": 52} and said["put"]["stored/ucx"] == 40
    with client.read(KEYS[200:240]) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[200:240]]
        assert {block.path for block in read.blocks} == {By.SHM}
    until(lambda: clean(pool.run_dir), 6, "nothing is left of the UCX client")


def test_a_full_pool_moves_blocks_to_files_and_serves_them_from_there(pool, client):
    assert {r.outcome for r in client.write(puts(KEYS), budget_s=20)} <= {Outcome.STORED, Outcome.DUPLICATE}
    assert client.match(KEYS) == len(KEYS), "a block was lost on its way to the files"
    tiers = set()
    for at in range(0, len(KEYS), 16):
        with client.read(KEYS[at : at + 16], budget_s=10) as read:
            assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[at : at + 16]]
            tiers |= {block.tier for block in read.blocks}
    assert Tier.FILE in tiers
    for rank in pool_status(pool.run_dir).ranks:
        assert rank.answer["counts"]["demoted"] > 0 and rank.answer["slots_used"] <= rank.answer["slots"]


def test_a_flipped_byte_in_memory_is_a_miss_and_the_block_is_quarantined(pool, client):
    key = b"flip" + KEYS[0][4:]
    client.write(puts([key]))
    state = read_state(pool.state_file)
    (rank,) = [rank for rank in range(2) if keys_of(client, rank, [key])]
    memory, slot = slot_of(state, rank, key)
    memory.slot(slot, LAYOUT.block_size)[1000] ^= 0x10
    with client.read([key]) as read:
        assert list(read.blocks) == []
    assert client.counts().misses == {"corrupt": 1}
    until(lambda: client.match([key]) == 0, 1, "the rank forgets the block")
    assert pool_status(pool.run_dir).ranks[rank].answer["counts"]["corrupt"] >= 1
    assert client.write(puts([key]))[0].outcome is Outcome.STORED
    until(lambda: clean(pool.run_dir), 1, "the quarantine ends with the reader's lease")


def flip_record(path: Path, key: bytes) -> int:
    """Flip a byte in each record of `key`; its children's records name it too, at another place of their header."""
    raw, count, at = path.read_bytes(), 0, -1
    with path.open("r+b") as file:
        while (at := raw.find(key, at + 1)) >= 0:
            if at % 4096 == 16:
                file.seek(at - 16 + 4096 + 5000)
                file.write(bytes([raw[at - 16 + 4096 + 5000] ^ 1]))
                count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


def test_a_flipped_byte_in_a_file_is_a_miss_and_never_served(pool, client):
    client.write(puts(KEYS), budget_s=20)
    filed = next(key for key in KEYS if all(slot_of(read_state(pool.state_file), r, key)[1] is None for r in range(2)))
    flipped = sum(flip_record(path, filed) for path in pool.run_dir.glob("*.blocks"))
    assert flipped, "its record should be in one of the files"
    with client.read([filed], budget_s=5) as read:
        assert list(read.blocks) == []
    assert client.match([filed]) == 0
    until(lambda: clean(pool.run_dir), 3, "nothing is left of the failed promotion")


def test_a_read_larger_than_staging_is_cut_at_once_and_not_after_its_budget(pool):
    client = PoolClient(pool.state_file, LAYOUT, path="ucx", client_name="small staging")
    client._ranks.door._size = 16 * LAYOUT.block_size
    try:
        client.write(puts(KEYS[:30]), budget_s=10)
        client.read(KEYS[:1], budget_s=10).release()  # connects
        began_s = time.monotonic()
        with client.read(KEYS[:30], budget_s=4) as read:
            assert 1 <= len(read.blocks) <= 16
            assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[: len(read.blocks)]]
        assert time.monotonic() - began_s < 1.0
        assert client.counts().misses == {"full": 30 - len(read.blocks)}
    finally:
        client.close()
    until(lambda: clean(pool.run_dir), 6, "nothing is left of the UCX client")


def test_many_threads_over_a_small_pool_see_only_right_bytes(pool, client):
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(30):
                start = (seed * 37 + step * 11) % 380
                keys = KEYS[start : start + 8]
                if step % 3 == 0:
                    client.write(puts(keys), budget_s=5)
                with client.read(keys, budget_s=5) as read:
                    copies = [bytes(block.data) for block in read.blocks]
                    whole = read.whole()
                assert copies[:whole] == [payload(key) for key in keys[:whole]]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    until(lambda: clean(pool.run_dir), 3, "nothing is held when nobody works")


def test_another_layout_is_refused_with_both_printed(pool):
    other = KVLayout(layers=3, kv_heads=1, head_dim=64, block_tokens=32)
    with pytest.raises(Refused, match=r"holds 2 layers .* this client has 3 layers"):
        PoolClient(pool.state_file, other)


def test_a_stranger_without_the_key_is_turned_away(pool, client, tmp_path):
    state = json.loads(pool.state_file.read_text())
    forged = tmp_path / "pool.json"
    forged.write_text(json.dumps({**state, "key": "00" * 32}))
    stranger = PoolClient(forged, LAYOUT)
    assert stranger.match(KEYS[:1]) == 0 and not stranger.alive()
    stranger.close()
    assert pool.state_file.stat().st_mode & 0o777 == 0o600 and pool.run_dir.stat().st_mode & 0o777 == 0o700


def test_a_client_without_the_unix_socket_asks_over_tcp(pool, tmp_path):
    state = json.loads(pool.state_file.read_text())
    for rank in state["ranks"]:
        rank["unix"] = str(tmp_path / "not here")
    elsewhere = tmp_path / "pool.json"
    elsewhere.write_text(json.dumps(state))
    client = PoolClient(elsewhere, LAYOUT)
    try:
        assert {r.outcome for r in client.write(puts(KEYS[:12]), 10)} <= {Outcome.STORED, Outcome.DUPLICATE}
        with client.read(KEYS[:12], 10) as read:
            assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:12]]
        assert {access.link._sock.family for access in client._ranks.all()} == {socket.AF_INET}
    finally:
        client.close()


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(SpecRefused, match="no room for one block"):
        PoolConfig(LAYOUT, dram_size=1000)
