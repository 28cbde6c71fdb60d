"""Block files outlive their pool: what was durable is back after a kill -9, and all of it after an orderly end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from blocks import KEYS, LAYOUT, payload, puts, room_for
from watching import CONFIG, FILE_SIZE, found, until

from kvtool.errors import PoolUnavailable, Refused
from kvtool.kv.layout import KVLayout
from kvtool.kv.retention import Pin, Retention
from kvtool.pool.base import Outcome, Tier
from kvtool.pool.client import PoolClient
from kvtool.pool.embedded import EmbeddedPool
from kvtool.pool.filetier import files_of
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.state import started_at


def embedded(path, slots=16, file_size=FILE_SIZE, layout=LAYOUT, write="back"):
    return EmbeddedPool(layout, room_for(slots), file_size, file_path=path, write=write)


def test_an_orderly_end_writes_memory_to_the_file_and_the_next_pool_has_every_block(tmp_path):
    first = embedded(tmp_path / "blocks")
    assert {r.outcome for r in first.write(puts(KEYS[:12]))} == {Outcome.STORED}
    first.write(puts(KEYS[300:301], transient_s=60))
    kept = Retention(90, 3600.0, Pin.SOFT, 2)
    first.write([replace(put, retention=kept) for put in puts(KEYS[200:201])])
    first.close()
    second = embedded(tmp_path / "blocks")
    assert second.match(KEYS[:12]) == 12 and second.match(KEYS[300:301]) == 0, "transient blocks never go to files"
    with second.read(KEYS[:12]) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:12]]
        assert {block.tier for block in read.blocks} == {Tier.FILE}
    entry = second._store._index[KEYS[200]]
    assert (entry.retention.priority, entry.retention.pin, entry.retention.copies) == (90, Pin.SOFT, 2)
    assert entry.wanted_until_s - time.monotonic() == pytest.approx(3600, abs=60)
    assert second._store._index[KEYS[5]].parent == KEYS[4]
    assert [line.kind for line in second.audit()] == ["soft pin"]
    second.close()


def test_through_says_durable_and_back_does_not(tmp_path):
    pool = embedded(tmp_path / "blocks", write="through")
    assert all(r.outcome is Outcome.STORED and r.durable for r in pool.write(puts(KEYS[:40])))
    assert pool.write(puts(KEYS[50:51], transient_s=60))[0].durable is False
    pool.close()
    back = embedded(tmp_path / "blocks")
    assert back.match(KEYS[:40]) == 40 and not any(r.durable for r in back.write(puts(KEYS[60:70])))
    back.close()


def test_a_smaller_file_keeps_what_fits_and_another_layout_is_refused_with_both(tmp_path):
    path = tmp_path / "blocks"
    pool = embedded(path)
    pool.write(puts(KEYS[:16]))
    pool.close()
    small = embedded(path, file_size=8 * (LAYOUT.block_size + 4096))
    assert path.stat().st_blocks * 512 <= 8 * (LAYOUT.block_size + 4096)
    assert 0 < small._store.counts.recovered <= 7 == small._store.files.count
    small.close()
    other = KVLayout(layers=4, kv_heads=1, head_dim=32, block_tokens=32)
    with pytest.raises(Refused, match=r"wanted blocks .* of 4 layers .*, found blocks .* of 2 layers .*; give"):
        embedded(path, layout=other)


def test_a_flipped_bit_in_the_file_is_a_miss_after_the_restart(tmp_path):
    path = tmp_path / "blocks"
    pool = embedded(path)
    pool.write(puts(KEYS[:4]))
    pool.close()
    raw = bytearray(path.read_bytes())
    at = raw.index(payload(KEYS[2]))
    raw[at + 5000] ^= 1
    path.write_bytes(raw)
    pool = embedded(path)
    assert pool.match(KEYS[:4]) == 4
    with pool.read(KEYS[:4]) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:2]]
    assert pool._store.counts.corrupt == 1 and pool.match(KEYS[:4]) == 2
    pool.close()


_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from blocks import KEYS, LAYOUT, puts, room_for
from kvtool.pool.embedded import EmbeddedPool
from pathlib import Path
pool = EmbeddedPool(LAYOUT, room_for(8), 2**23, file_path=Path(sys.argv[1]), write="through")
print("up", flush=True)
for at in range(0, 400, 2):
    for n, result in zip((at, at + 1), pool.write(puts(KEYS[at : at + 2]))):
        print(n if result.durable else -1, flush=True)
"""


@pytest.mark.real
@pytest.mark.parametrize("after", [1, 97])
def test_a_process_killed_in_a_write_loop_loses_no_durable_block(tmp_path, after):
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "blocks"), str(Path(__file__).parent)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "up\n"
    durable = {int(writer.stdout.readline()) for _ in range(after)}
    writer.send_signal(signal.SIGKILL)
    durable |= {int(line) for line in writer.communicate(timeout=20)[0].splitlines() if line.strip()}
    assert -1 not in durable
    pool = EmbeddedPool(LAYOUT, room_for(8), 2**23, file_path=tmp_path / "blocks")
    for n in sorted(durable):
        with pool.read([KEYS[n]]) as read:
            assert [bytes(block.data) for block in read.blocks] == [payload(KEYS[n])], f"durable block {n} is gone"
    assert pool._store.counts.recovered >= len(durable) >= after
    pool.close()


@pytest.mark.real
def test_a_pool_killed_whole_is_back_with_its_durable_blocks_and_one_stopped_with_all(tmp_path):
    config = replace(CONFIG, ranks=2, write="through", ucx=False, heal=False)
    handle = start_pool(config, tmp_path)
    client = PoolClient(handle.state_file, LAYOUT)
    try:
        assert all(result.durable for result in client.write(puts(KEYS[:60])))
        for pid in [*handle.rank_pids, handle.pid]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(started_at(pid) for pid in handle.rank_pids), 5, "they are dead")
        handle = start_pool(config, tmp_path)
        assert sum(rank.answer["counts"]["recovered"] for rank in pool_status(tmp_path).ranks) == 60
        until(lambda: found(client, KEYS[:60]) == 60, 2, "durable blocks are back")
        assert stop_pool(tmp_path)
        assert len(files_of(tmp_path)) == 2
        back = start_pool(replace(config, write="back"), tmp_path)
        until(lambda: client.alive(), 2, "the client finds it")
        assert client.write(puts(KEYS[100:120]))[0].outcome is Outcome.STORED
        back.stop()
        start_pool(config, tmp_path)
        until(lambda: found(client, KEYS[100:120]) == 20 and found(client, KEYS[:60]) == 60, 2, "all of it is back")
        stop_pool(tmp_path)
        with pytest.raises(PoolUnavailable, match=r"wanted blocks of .* of 1 layers .*found blocks of .* of 2 layers"):
            start_pool(replace(config, layout=KVLayout(1, 1, 64, 32)), tmp_path)
    finally:
        client.close()
        stop_pool(tmp_path, purge=True)
    assert files_of(tmp_path) == [] and not list(tmp_path.glob("*.blocks"))


@pytest.mark.real
def test_an_encrypted_pool_restarts_with_its_key_and_refuses_others(tmp_path):
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    config = replace(CONFIG, ranks=1, write="through", ucx=False, file_key=key)
    with pytest.raises(Refused, match=r"mode 0600, found -rw-r--r--"):
        start_pool(config, tmp_path / "run")
    key.chmod(0o600)
    handle = start_pool(config, tmp_path / "run")
    client = PoolClient(handle.state_file, LAYOUT)
    try:
        assert all(result.durable for result in client.write(puts(KEYS[:40])))
        handle.stop()
        start_pool(config, tmp_path / "run")
        until(lambda: found(client, KEYS[:40]) == 40, 2, "the blocks are back")
        raw = files_of(tmp_path / "run")[0].read_bytes()
        assert payload(KEYS[0])[:64] not in raw and KEYS[0] in raw
        handle.stop()
        with pytest.raises(PoolUnavailable, match=r"found an encrypted one; set pool.file_key, or remove it"):
            start_pool(replace(config, file_key=None), tmp_path / "run")
    finally:
        client.close()
        stop_pool(tmp_path / "run", purge=True)
