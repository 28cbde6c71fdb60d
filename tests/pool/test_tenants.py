"""Tenants of one pool: each hits its own blocks, and none ever another's, whatever it sends."""

from __future__ import annotations

import json
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from blocks import KEYS, LAYOUT, payload, puts
from lone import KEY, lone_rank
from test_by_socket import Raw
from watching import CONFIG, until

from kvtool.errors import Refused, SpecRefused
from kvtool.kv.quota import Quota
from kvtool.kv.record import Want
from kvtool.kv.retention import PRIORITY_DEFAULT, Pin, Retention
from kvtool.pool import wire
from kvtool.pool.auditlog import AuditLog
from kvtool.pool.base import Outcome
from kvtool.pool.base import Path as By
from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.handshake import Knock, shake
from kvtool.pool.launch import pool_status, start_pool
from kvtool.pool.state import read_state
from kvtool.pool.tenants import ALLOWED, CLEAR, Tenant, pad_of, read_tenants, tenant_state_file
from kvtool.pool.wire import Op, Status


def a_tenant(name: str, **quota: int) -> Tenant:
    return Tenant(name, (name * 32)[:32].encode(), pad_of(KEY, "lone", name), Quota(**quota))


A, B = a_tenant("alpha", dram=6), a_tenant("beta", dram=6)


@pytest.fixture
def lone(tmp_path):
    with lone_rank(tmp_path, tenants=[A, B]) as lone:
        yield lone


@pytest.fixture
def clients(lone):
    """Of the operator, alpha and beta."""
    found = [
        PoolClient(lone.state_file(tenant=t), LAYOUT, client_name=f"of {t.name if t else 'us'}") for t in (None, A, B)
    ]
    yield found
    for client in found:
        client.close()


def test_each_hits_its_own_blocks_and_nobody_elses(lone, clients):
    for position, writer in enumerate(clients):
        keys = KEYS[4 * position :][:4]
        assert {r.outcome for r in writer.write(puts(keys))} == {Outcome.STORED}
        for reader in clients:
            with reader.read(keys) as read:
                mine = reader is writer
                assert len(read.blocks) == (4 if mine else 0)
                assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in keys][
                    : len(read.blocks)
                ]
                assert {block.path for block in read.blocks} <= {By.SOCKET}
            assert reader.match(keys) == (4 if mine else 0)
            assert reader.exists(keys) == [mine] * 4


def test_the_same_key_is_another_block_for_every_tenant(lone, clients):
    def filled(value: int):
        return [
            replace(put, fill=lambda room: room.__setitem__(slice(None), bytes([value]) * len(room)))
            for put in puts(KEYS[:2])
        ]

    for value, client in enumerate(clients):
        found = client.write(filled(value))
        assert [r.outcome for r in found] == [Outcome.STORED] * 2, found
    for value, client in enumerate(clients):
        with client.read(KEYS[:2]) as read:
            assert [set(bytes(block.data)) for block in read.blocks] == [{value}] * 2
    assert clients[1].delete(KEYS[:2]) == 2
    assert [client.match(KEYS[:2]) for client in clients] == [2, 0, 2]


def test_no_key_that_a_tenant_can_make_names_anothers_block(lone, clients):
    """It knows the other's keys, its own pad's clear bytes, and every pad but its own; none of them help."""
    clients[0].write(puts(KEYS[:2]))
    clients[2].write(puts(KEYS[2:4]))
    theirs = [lone.do(lambda: list(lone.service.store.resident()))][0]
    salts = [bytes(32), b"alpha".ljust(32, b"\0"), b"\xff" * 32, B.pad, KEY]
    tries = {bytes(x ^ y for x, y in zip(key, salt, strict=True)) for key in [*KEYS[:4], *theirs] for salt in salts}
    assert clients[1].exists(list(tries)) == [False] * len(tries)
    assert clients[1].delete(list(tries)) == clients[1].drop(list(tries)) == 0
    assert (clients[0].match(KEYS[:2]), clients[2].match(KEYS[2:4])) == (2, 2)
    assert A.own(B.own(KEYS[0])) != KEYS[0] and A.own(A.own(KEYS[0])) == KEYS[0]
    assert A.own(KEYS[0])[:CLEAR] == KEYS[0][:CLEAR] and A.own(KEYS[0])[CLEAR:] != KEYS[0][CLEAR:]


def test_a_tenants_state_file_shows_no_memory_and_has_its_key_alone(lone):
    path = lone.state_file(tenant=A)
    text = path.read_text()
    assert KEY.hex() not in text and B.key.hex() not in text and A.pad.hex() not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    state = read_state(path)
    assert (state.tenant, state.key) == ("alpha", A.key.hex())
    assert [(r.segment, r.ucx_name, r.ucx_metadata, r.metrics) for r in state.ranks] == [("", "", "", "")]


@pytest.mark.parametrize(
    ("tenant", "key"), [("alpha", B.key), ("alpha", KEY), ("beta", A.key), ("gamma", A.key), ("", A.key)]
)
def test_who_claims_to_be_another_is_refused_in_the_same_words(lone, tenant, key):
    with lone.connect() as sock, pytest.raises(Refused, match="does not know the pool's key, or its tenant's"):
        shake(sock, Knock(key, {"tenant": tenant}), time.monotonic() + 5)


class RawTenant(Raw):
    def __init__(self, lone, tenant: Tenant) -> None:
        knock, lone.knock = lone.knock, lambda: lone_knock(lone, tenant)
        try:
            super().__init__(lone)
        finally:
            lone.knock = knock


def lone_knock(lone, tenant: Tenant) -> Knock:
    claims = {
        "fingerprint": LAYOUT.fingerprint,
        "name": "raw",
        "tenant": tenant.name,
        "ucx": True,
        "host": "here",
        "peer": b"x",
    }
    return Knock(tenant.key, claims, "lone/0")


def test_what_is_the_operators_is_refused_to_tenants_and_they_stay_connected(lone):
    raw = RawTenant(lone, A)
    for op in set(Op) - ALLOWED - {Op.HELLO}:
        raw.send(op, b"")
        answer = raw.answer()
        assert answer.status is Status.REFUSED and b"for the pool's operator alone" in answer.body, op.name
    assert raw.ask(Op.PING, b"") == b""
    connection = lone.do(lambda: lone.loop.connections[raw.owner])
    assert not connection.ucx and connection.host == "" and connection.peer_rank is None
    raw.sock.close()


def test_a_tenant_reads_and_writes_only_slots_that_it_was_given(lone, clients):
    """The slot numbers of others are small integers: guessing them must be of no use."""
    clients[0].write(puts(KEYS[:4]))
    raw = RawTenant(lone, A)
    for slot in range(16):
        for op, body in (
            (Op.READ, wire.pack_read(0, 1, 1, [slot])), (Op.WRITE, wire.pack_write(0, 1, [(slot, 1)])),
        ):  # fmt: skip
            probe = RawTenant(lone, A)
            probe.send(op, body)
            answer = probe.answer()
            assert answer.status is Status.REFUSED and b"is not this client's" in answer.body
            probe.sock.close()
        generation = lone.do(lambda slot=slot: lone.service.store.dram.generation(slot))
        assert raw.ask(Op.COMMIT, wire.pack_commits([(slot, generation, 0)])) == b"\1"
        raw.send(Op.ABORT, wire.pack_aborts(0.0, [(slot, generation)]))
        raw.send(Op.CORRUPT, wire.pack_corrupt(KEYS[0], slot, generation))
    raw.ask(Op.PING, b"")
    with clients[0].read(KEYS[:4]) as read:
        assert [bytes(block.data) for block in read.blocks] == [payload(key) for key in KEYS[:4]]
    raw.sock.close()


def test_a_tenant_at_its_quota_pays_with_its_own_blocks_and_is_told_when_it_cannot(lone, clients):
    clients[0].write(puts(KEYS[:4]))
    clients[2].write(puts(KEYS[:6]))
    assert {r.outcome for r in clients[1].write(puts(KEYS[20:40]))} == {Outcome.STORED}
    assert (clients[0].match(KEYS[:4]), clients[2].match(KEYS[:6])) == (4, 6)
    usage = lone.do(lambda: lone.service.status()["tenants"])
    assert usage["alpha"]["dram"] == 6 and usage["alpha"]["evicted"] == 14 and usage["beta"]["dram"] == 6
    raw = RawTenant(lone, A)
    there = [key for key in KEYS[20:40] if clients[1].exists([key]) == [True]]
    found = wire.unpack_found(raw.ask(Op.LOOKUP, wire.pack_lookup(1, 0, there[:1])))
    assert len(found.hits) == 1
    for number, key in enumerate(there[1:], 2):
        raw.ask(Op.LOOKUP, wire.pack_lookup(number, 0, [key]))
    _, why = wire.unpack_grants(raw.ask(Op.RESERVE, wire.pack_wants(0, [Want(KEYS[90], LAYOUT.block_size)])))
    assert "tenant alpha is at its quota on this rank (6 blocks of 6 in memory" in why
    raw.sock.close()


def test_the_audit_log_says_who_came_and_who_was_refused_and_no_secret(lone, clients, tmp_path):
    clients[1].write(puts(KEYS[:1]))
    clients[1].delete(KEYS[:1])
    with lone.connect() as sock, pytest.raises(Refused):
        shake(sock, Knock(B.key, {"tenant": "alpha"}), time.monotonic() + 5)
    path = tmp_path / "audit.jsonl"
    until(lambda: path.exists() and "refused" in path.read_text(), 3, "it is written")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["event"], line["party"]) for line in lines if line["party"].startswith("tenant")] == [
        ("connected", "tenant alpha"), ("delete", "tenant alpha"),
    ]  # fmt: skip
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for secret in (KEY, A.key, B.key, A.pad[CLEAR:], KEYS[0]):
        assert secret.hex() not in path.read_text() and secret.decode("latin1") not in path.read_text()


def test_the_audit_log_is_bounded_and_does_not_repeat_itself(tmp_path):
    now = [1000.0]
    log = AuditLog(tmp_path / "a", size_max=2000, wall_s=lambda: now[0])
    for n in range(100):
        log.write("refused", f"peer {n}", why="x" * 50)
    assert (tmp_path / "a").stat().st_size <= 2000 and (tmp_path / "a.1").stat().st_size <= 2000
    before = (tmp_path / "a").stat().st_size
    for _ in range(1000):
        log.write("quota", "tenant a")
    now[0] += 2
    log.write("quota", "tenant a")
    assert json.loads((tmp_path / "a").read_text().splitlines()[-1])["left_out"] == 999
    assert (tmp_path / "a").stat().st_size < before + 300
    log.close()
    AuditLog(tmp_path).write("event", "to a directory: counted as a failure, no more")


def test_a_tenant_cannot_hold_on_to_memory_more_firmly_than_others_do():
    greedy = Want(KEYS[1], 5, KEYS[0], 2.0, Retention(100, 60.0, Pin.HARD, 8))
    (want,) = A.own_wants([greedy])
    assert want.retention == Retention(PRIORITY_DEFAULT, 60.0) and want.tenant == "alpha"
    assert (want.key, want.parent, want.size, want.transient_s) == (A.own(KEYS[1]), A.own(KEYS[0]), 5, 2.0)
    assert A.own_wants([Want(KEYS[1], 5, None, None, Retention(3))])[0].retention == Retention(3)


def files(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    for name, key in (("a.key", A.key), ("b.key", B.key)):
        (tmp_path / name).write_text(key.hex())
        (tmp_path / name).chmod(mode)
    (tmp_path / "tenants.yaml").write_text(text)
    return tmp_path / "tenants.yaml"


def test_the_tenants_file_is_read_with_quotas_shared_out_over_ranks(tmp_path):
    path = files(
        tmp_path,
        "- {name: a, key_file: a.key, quota_dram: 8KiB, quota_files: 0, quota_blocks: 9}\n"
        "- {name: b, key_file: b.key}\n",
    )
    tenants = read_tenants(path, KEY, "pool", 2, 1024)
    assert tenants["a"].quota == Quota(4, 0, 4) and tenants["b"].quota == Quota()
    assert tenants["a"].pad != tenants["b"].pad and tenants["a"].pad == pad_of(KEY, "pool", "a")
    assert pad_of(KEY, "pool", "a") != pad_of(KEY, "poo", "la") != pad_of(b"x" * 32, "pool", "a")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "wanted a list of tenants"),
        ("{a: 1}", "wanted a list of tenants"),
        ("- [", "cannot be read as YAML"),
        ("- {name: a}", r"tenants\[0\].key_file: wanted the path"),
        ("- {name: 'a b', key_file: a.key}", r"tenants\[0\].name: wanted 1 to 64 letters"),
        ("- {name: ../x, key_file: a.key}", r"tenants\[0\].name: wanted 1 to 64 letters"),
        ("- {name: a, key_file: a.key, quota: 3}", "found quota"),
        ("- {name: a, key_file: none.key}", "wanted a key in .*none.key"),
        ("- {name: a, key_file: a.key, quota_dram: much}", r"quota_dram: wanted a size such as 10GiB, found 'much'"),
        ("- {name: a, key_file: a.key, quota_dram: 100}", "less than one block"),
        ("- {name: a, key_file: a.key, quota_blocks: 1}", "quota_blocks: wanted a number, 2"),
        ("- {name: a, key_file: a.key}\n- {name: a, key_file: b.key}", "a is there twice"),
        ("- {name: a, key_file: a.key}\n- {name: b, key_file: a.key}", "found that of tenant a"),
    ],
)
def test_a_tenants_file_that_is_wrong_is_refused_with_the_place(tmp_path, text, words):
    with pytest.raises(Refused, match=words):
        read_tenants(files(tmp_path, text), KEY, "pool", 2, 1024)


def test_keys_that_others_can_read_are_refused_and_so_are_tenants_without_a_lasting_key(tmp_path):
    with pytest.raises(Refused, match=r"tenants\[0\].key_file: wanted .* mode 0600"):
        read_tenants(files(tmp_path, "- {name: a, key_file: a.key}", 0o640), KEY, "pool", 2, 1024)
    with pytest.raises(SpecRefused, match=r"wanted pool\.key_file beside it"):
        PoolConfig(LAYOUT, tenants=tmp_path / "tenants.yaml")
    assert tenant_state_file(tmp_path, "a").name == "tenant-a.json"


@pytest.mark.real
def test_a_real_pool_serves_its_tenants_apart_and_its_files_know_them_after_a_restart(tmp_path):
    path = files(tmp_path, "- {name: a, key_file: a.key, quota_dram: 1MiB}\n- {name: b, key_file: b.key}\n")
    (tmp_path / "pool.key").write_text(KEY.hex())
    (tmp_path / "pool.key").chmod(0o600)
    run_dir = tmp_path / "run"
    config = replace(CONFIG, key_file=tmp_path / "pool.key", tenants=path, heal=False)
    for turn in range(2):
        handle = start_pool(config, run_dir)
        clients = [PoolClient(file, LAYOUT) for file in (handle.state_file, *sorted(run_dir.glob("tenant-*.json")))]
        assert len(clients) == 3
        if turn == 0:
            for position, client in enumerate(clients):
                assert {r.outcome for r in client.write(puts(KEYS[10 * position :][:8]), 20)} == {Outcome.STORED}
        for position, client in enumerate(clients):
            found = [client.match(KEYS[10 * other :][:8], 20) for other in range(3)]
            assert found == [8 if other == position else 0 for other in range(3)], f"start {turn}"
            with client.read(KEYS[10 * position :][:8], 20) as read:
                assert [bytes(block.data) for block in read.blocks] == [payload(k) for k in KEYS[10 * position :][:8]]
        usage = [rank.answer["tenants"] for rank in pool_status(run_dir).ranks]
        assert sum(rank["a"]["dram"] for rank in usage) == sum(rank["b"]["dram"] for rank in usage) == 8
        for client in clients:
            client.close()
        handle.stop()
    assert "tenant a" in (run_dir / "audit-0.jsonl").read_text() and not list(run_dir.glob("tenant-*"))
