"""One hit ratio that a recount agrees with; gauges that are the truth; a page that Prometheus can read."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from blocks import KEYS, LAYOUT, puts
from prometheus_client.parser import text_string_to_metric_families
from watching import CONFIG, until

from kvtool.cli.reference import render
from kvtool.errors import ProtocolError
from kvtool.pool.base import Outcome
from kvtool.pool.client import PoolClient
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.metrics import METRICS, text
from kvtool.pool.state import read_state
from kvtool.pool.told import ReadsTold

FULL = {
    "rank": 3, "identity": "p/3", "status": "live", "incarnation": 2, "weight": 1.0, "dead": [1],
    "hung": [], "clients": 4, "slots": 10, "slots_used": 5, "file_slots": 20, "file_slots_used": 7, "slot_size": 100,
    "leases": 2, "held_share": 0.25, "waiting_reads": 1, "waiting_puts": 0, "block_tokens": 32,
    "reads": {"asked": 9, "hits": {"dram/shm": 4, "file/ucx": 2}, "bytes": {"dram/shm": 400}, "misses": {"absent": 3}},
    "bytes_in": 1, "bytes_out": 2, "counts": {"stored": 8}, "bytes_moved": {"demoted": 3, "promoted": 4}, "touched": 5,
    "files": {"write": "back", "failures": 0}, "scrub": {"corrupt": 0}, "transfers": {"sent": 1, "bytes": {"sent": 9}},
    "copying": {"owed": 1, "flying": 2, "homeless": 0, "left": 3, "near": 4,
                "counts": {"stored": 7, "bytes": 70, "scans": 2}},
    "eviction": {
        "dram": {"policy": "lru", "ratios": {"arc": 0.5}, "curve": [(20, 0.75)], "changes": 2}, "pins": {"hard": 3},
    },
    "tenants": {"alpha": {"dram": 2, "blocks": 3, "refused": 4, "evicted": 5}},
    "reads_of": {"alpha": {"asked": 2, "hits": {"dram/socket": 1}}},
    "cpu_s": 1.5, "slowest_pass_s": 0.001,
}  # fmt: skip


def families(page: str) -> dict[str, dict[tuple[str, ...], float]]:
    """name -> label values but the rank's -> value, added up over ranks."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "rank")
            values = found.setdefault(sample.name.removeprefix("kvtool_pool_"), {})
            values[labels] = values.get(labels, 0.0) + sample.value
    return found


def test_every_metric_shows_and_prometheus_reads_the_page():
    page = families(text([FULL]))
    assert {metric.name for metric in METRICS} == set(page)
    assert page["hit_tokens_total"] == {("dram", "shm"): 128, ("file", "ucx"): 64}
    assert page["asked_tokens_total"] == {(): 288} and page["missed_tokens_total"] == {("absent",): 96}
    assert page["shadow_size_hit_ratio"] == {("dram", "20"): 0.75} and page["pinned_blocks"] == {(): 3}
    assert page["tenant_asked_tokens_total"] == {("alpha",): 64} and page["tenant_blocks"] == {("alpha",): 3}
    assert page["used_bytes"] == {("dram",): 500, ("file",): 700} and page["ranks_dead"] == {(): 1}


def test_every_metric_is_in_the_reference():
    reference = render()
    assert [metric.full_name for metric in METRICS if f"`{metric.full_name}`" not in reference] == []


def test_what_a_rank_does_not_say_is_left_out_and_odd_words_are_quoted():
    page = text([{"rank": 0, "identity": 'a"b\\c\nd'}])
    assert page.count("\n") == 3 and families(page)["rank_info"] == {('a"b\\c\nd', "", ""): 1.0}


@pytest.mark.parametrize(
    "bad", [{}, {"hits": 3}, {"hits": {"dram/pigeon": 1}}, {"hits": {"dram/shm": -1}}, {"hits": {1: 1}}]
)
def test_what_is_no_count_of_reads_is_refused_and_nothing_of_it_counts(bad):
    told = ReadsTold()
    with pytest.raises(ProtocolError, match="counted: wanted"):
        told.add({"bytes": {}, "misses": {"absent": 1}, **bad})
    assert told == ReadsTold()


def test_reasons_are_bounded_whatever_clients_say():
    told = ReadsTold()
    for at in range(1000):
        told.add({"hits": {}, "bytes": {}, "misses": {f"because {at}": 1}})
    assert told.misses == {"other": 1000} and told.asked == 1000


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    handle = start_pool(replace(CONFIG, lease_term_s=5), tmp_path_factory.mktemp("watched"))
    yield handle
    stop_pool(handle.run_dir)


def pages(handle) -> dict[str, dict[tuple[str, ...], float]]:
    found = ""
    for rank in read_state(handle.state_file).ranks:
        with urllib.request.urlopen(f"http://{rank.metrics}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            found += answer.read().decode()
    return families(found)


@pytest.mark.real
def test_the_hit_ratio_is_what_a_request_log_says(watched):
    """Random reads of both kinds by several clients; the log counts keys, the ranks count tokens."""
    rng, log = Random(5), Counter()
    clients = [
        PoolClient(watched.state_file, LAYOUT, client_name=f"c{n}", path=path)
        for n, path in enumerate(["shm", "socket"])
    ]
    clients[0].write(puts(KEYS[:80]), budget_s=10)
    rooms = [bytearray(LAYOUT.block_size) for _ in range(20)]
    for _ in range(60):
        client, start = rng.choice(clients), rng.randrange(100)
        keys = KEYS[start : start + rng.randrange(1, 20)]
        if rng.random() < 0.5:
            with client.read(keys) as read:
                hits = [block.tier.value for block in read.blocks]
        else:
            got = client.get_into(keys, rooms[: len(keys)], leading=rng.random() < 0.5)
            hits = [block.tier.value for block in got.blocks if block.tier is not None]
        log["asked"] += len(keys)
        log.update(hits)
    for client in clients:
        client.close()
    until(lambda: pages(watched)["asked_tokens_total"][()] == log["asked"] * LAYOUT.block_tokens, 2, "clients told")
    page = pages(watched)
    by_tier = Counter()
    for (tier, _), tokens in page["hit_tokens_total"].items():
        by_tier[tier] += tokens
    assert by_tier == {tier: log[tier] * LAYOUT.block_tokens for tier in ("dram", "file") if log[tier]}
    missed = sum(page["missed_tokens_total"].values())
    assert missed == (log["asked"] - log["dram"] - log["file"]) * LAYOUT.block_tokens > 0
    assert page["read_bytes_total"].keys() == page["hit_tokens_total"].keys()


@pytest.mark.real
def test_after_a_hundred_reconnects_gauges_equal_the_truth(watched):
    for _ in range(100):
        client = PoolClient(watched.state_file, LAYOUT)
        client.match(KEYS[:4])
        client.close()
    client = PoolClient(watched.state_file, LAYOUT)
    with client.read(KEYS[:8]) as read:
        assert len(read.blocks) == 8
        page = pages(watched)
        assert page["leases"][()] == 2 and page["clients"][()] == 2
    client.close()
    until(lambda: (pages(watched)["leases"][()], pages(watched)["clients"][()]) == (0, 0), 2, "nothing is left of them")
    status = pool_status(watched.run_dir)
    used = sum(rank.answer["slots_used"] for rank in status.ranks)
    assert pages(watched)["used_slots"][("dram",)] == used > 0
    assert pages(watched)["block_events_total"][("stored",)] == sum(r.answer["counts"]["stored"] for r in status.ranks)


@pytest.mark.real
def test_whoever_dawdles_or_asks_for_something_else_is_told_or_hung_up_on(watched):
    host, _, port = read_state(watched.state_file).ranks[0].metrics.rpartition(":")
    for path, code in (("/", 404), ("/metrics2", 404)):
        with pytest.raises(urllib.error.HTTPError, match=str(code)):
            urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=5)
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"PUT /metrics HTTP/1.1\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 405")
    sock = socket.create_connection((host, int(port)), timeout=5)
    with sock, pytest.raises(OSError):  # reset, or a broken pipe
        for _ in range(1000):
            sock.sendall(b"x" * 1000)
            time.sleep(0.001)
    idle = [socket.create_connection((host, int(port)), timeout=5) for _ in range(40)]
    assert any(sock.recv(1) == b"" for sock in idle[16:]), "more than it takes"
    for sock in idle:
        sock.close()
    assert pages(watched)["incarnation"][()] == 2


@pytest.mark.real
def test_a_put_is_counted_once_and_in_bytes(watched):
    before = pages(watched)["put_bytes_total"][()]
    client = PoolClient(watched.state_file, LAYOUT)
    results = client.write(puts(KEYS[390:400]) + puts(KEYS[390:395]))
    client.close()
    stored = sum(result.outcome is Outcome.STORED for result in results)
    assert stored == 10 and pages(watched)["put_bytes_total"][()] - before == 10 * LAYOUT.block_size
