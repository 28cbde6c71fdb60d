"""Damage is found before a reader finds it: at a slow pace in the background, and all at once on demand."""

from __future__ import annotations

import json

import pytest
from blocks import KEYS as REAL_KEYS
from blocks import LAYOUT, payload, puts, room_for
from diskrank import KEYS, SIZE, AtOnce, Rank, Remembering
from diskrank import payload as payload_of
from typer.testing import CliRunner
from watching import CONFIG, found, slot_of

from kvtool.cli.main import app
from kvtool.errors import Refused
from kvtool.pool.client import PoolClient
from kvtool.pool.embedded import EmbeddedPool
from kvtool.pool.filetier import file_path, files_of
from kvtool.pool.launch import start_pool, stop_pool
from kvtool.pool.scrub import GAP_S, REST_S, Pace, Scrub
from kvtool.pool.state import read_state
from kvtool.pool.verify import verify_file, verify_ranks

MIB = 2**20


def scrubbed(rank: Rank, rate: float = 1e9) -> Scrub:
    scrub = Scrub(rank.tiers, rank.events.append, rate, AtOnce())
    scrub.pace.rate = rate
    return scrub


def filled(through: bool = True) -> Rank:
    """Four blocks in memory, all of them in the file too, and one more there."""
    rank = Rank(Remembering(), through)
    for key in KEYS[:5]:
        rank.put(key, None)
    assert {entry.file_slot >= 0 for entry in rank.store._index.values()} == {True}
    return rank


def damage_file(rank: Rank, key: bytes) -> None:
    at = rank.disk.image.index(payload_of(key)[:64])
    rank.disk.image[at + 7] ^= 1


def in_memory(rank: Rank) -> list[bytes]:
    return [key for key, entry in rank.store._index.items() if entry.slot >= 0]


def test_the_pace_keeps_to_its_rate_and_lets_others_go_first():
    pace = Pace(MIB)
    assert pace.may(0.0, busy=False) and not pace.may(0.0, busy=True)
    pace.read(4 * MIB, 0.0)
    assert not pace.may(3.9, busy=False) and pace.may(4.0, busy=False)
    pace.read(1, 4.0)
    assert pace.next_at_s == 4.0 + GAP_S
    pace.round_ended(5.0)
    assert not pace.may(5.0 + REST_S - 1, busy=False) and pace.may(5.0 + REST_S, busy=False)
    assert not Pace(0.0).may(0.0, busy=False), "a rate of 0 is none"


def test_the_background_reads_every_record_and_drops_the_damaged_one_but_not_its_copy_in_memory():
    rank = filled()
    scrub = scrubbed(rank)
    (only_filed,) = set(KEYS[:5]) - set(in_memory(rank))
    both = in_memory(rank)[1]
    for key in (only_filed, both):
        damage_file(rank, key)
    for step in range(100):
        scrub.tick(step * 1.0, busy=step < 10)
        assert step >= 10 or scrub.total.file == 0, "somebody was waiting"
        rank.settle()
    assert (scrub.total.file, scrub.total.file_damaged, scrub.total.dram) == (5, 2, 0), "one round, then rest"
    assert rank.store.resident().keys() == set(KEYS[:5]) - {only_filed}
    assert rank.get(1, both) == payload_of(both) and rank.get(2, only_filed) is None
    assert rank.store._index[both].file_slot < 0 and not rank.store._index[both].durable
    assert rank.store.counts.corrupt == 2 and rank.store.lost_slots() == 0
    scrub.tick(200.0 + REST_S, busy=False)
    rank.settle()
    assert scrub.total.file == 6, "the next round begins"


def test_verify_checks_memory_and_file_and_what_is_damaged_in_memory_is_served_from_the_file():
    rank = filled()
    scrub = scrubbed(rank)
    key = in_memory(rank)[2]
    rank.memory.slot(rank.store._index[key].slot, SIZE)[100] ^= 1
    answer = scrub.verify(True, 1.0)
    while answer["running"]:
        rank.settle()
        answer = scrub.verify(False, 1.0)
    assert answer == {
        "running": False, "dram": 4, "dram_damaged": 1, "file": 5, "file_damaged": 0, "moved": 0, "bytes": 9 * SIZE,
    }  # fmt: skip
    rank.settle()
    assert rank.get(1, key) == payload_of(key), "from its file"
    assert len(rank.store.leases) == 0 and rank.store.lost_slots() == 0 and rank.store.audit(100.0) == []
    assert scrub.verify(True, 2.0)["running"] and rank.settle() is None
    assert scrub.verify(False, 2.0)["dram_damaged"] == 0


def test_a_file_without_a_pool_is_verified_and_what_is_damaged_is_erased(tmp_path):
    path = tmp_path / "blocks"
    pool = EmbeddedPool(LAYOUT, room_for(8), 2 * MIB, file_path=path)
    pool.write(puts(REAL_KEYS[:8]))
    pool.close()
    assert verify_file(path).found == {"file": 8, "file_damaged": 0, "bytes": 8 * LAYOUT.block_size}
    raw = bytearray(path.read_bytes())
    raw[raw.index(payload(REAL_KEYS[3])) + 9] ^= 1
    path.write_bytes(raw)
    assert verify_file(path).damaged == 1 and verify_file(path).found["file"] == 7
    pool = EmbeddedPool(LAYOUT, room_for(8), 2 * MIB, file_path=path)
    assert [pool.match([key]) for key in REAL_KEYS[:8]] == [1, 1, 1, 0, 1, 1, 1, 1]
    pool.close()


@pytest.mark.real
def test_pool_verify_of_a_real_pool_running_and_stopped(tmp_path):
    handle = start_pool(CONFIG, tmp_path)
    client = PoolClient(handle.state_file, LAYOUT)
    run = CliRunner()
    try:
        client.write(puts(REAL_KEYS[:70]))
        before = verify_ranks(tmp_path, 20)
        assert [each.damaged for each in before] == [0, 0] and not any(each.why for each in before)
        assert sum(each.found["dram"] + each.found["file"] for each in before) >= 70
        at = [slot_of(read_state(handle.state_file), rank, REAL_KEYS[60]) for rank in range(2)]
        memory, slot = next(each for each in at if each[1] is not None)
        memory.slot(slot, LAYOUT.block_size)[5] ^= 1
        result = run.invoke(app, ["pool", "verify", "--run-dir", str(tmp_path), "--json"])
        assert result.exit_code == 1 and sum(each["damaged"] for each in json.loads(result.stdout)) == 1
        assert run.invoke(app, ["pool", "verify", "--run-dir", str(tmp_path)]).exit_code == 0, "it is forgotten"
        assert found(client, REAL_KEYS[60:61]) == 0 and found(client, REAL_KEYS[:60]) == 60
        stop_pool(tmp_path)
        assert run.invoke(app, ["pool", "verify", "--run-dir", str(tmp_path)]).exit_code == 0
        result = run.invoke(app, ["pool", "verify", "--run-dir", str(tmp_path), "--json"])  # a table folds long paths
        assert result.exit_code == 0 and "pool-1.blocks" in result.stdout
        path = files_of(tmp_path)[0]
        assert path == file_path(tmp_path, "pool", 0)
        raw = bytearray(path.read_bytes())
        raw[raw.index(payload_on(raw)) + 9] ^= 1
        path.write_bytes(raw)
        assert run.invoke(app, ["pool", "verify", "--run-dir", str(tmp_path)]).exit_code == 1
    finally:
        client.close()
        stop_pool(tmp_path, purge=True)
    result = run.invoke(app, ["pool", "verify", "--run-dir", str(tmp_path)])
    assert isinstance(result.exception, Refused) and "no block files are left" in str(result.exception)


def payload_on(raw: bytes) -> bytes:
    return next(payload(key) for key in REAL_KEYS[:70] if payload(key) in raw)
