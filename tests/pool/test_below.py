"""Blocks that left the files come back from a directory or an object store, whole or not at all, and within its cap."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field, replace

import pytest
from blocks import KEYS as REAL_KEYS
from blocks import LAYOUT, puts
from diskrank import FILE_SLOTS, KEYS, SIZE, SLOTS, AtOnce, Rank, Remembering, payload
from test_bad_disks import Hanging
from watching import CONFIG, found, until

from kvtool.errors import Refused, SpecRefused, Unavailable
from kvtool.kv.remote import AWAY_S, HEADER_SIZE
from kvtool.pool.client import PoolClient
from kvtool.pool.filetier import files_of
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.transfer.crypt import FileSealer
from kvtool.transfer.remote import CloudStore, DirectoryStore, open_store

OBJECT = HEADER_SIZE + SIZE


@dataclass
class Shelf:
    """A store in memory that can be away."""

    objects: dict[bytes, bytes] = field(default_factory=dict)
    away: bool = False
    calls: int = 0
    name = "shelf"

    def put(self, key: bytes, record: bytes) -> None:
        self._call()
        self.objects[key] = record

    def get(self, key: bytes) -> bytes:
        self._call()
        if key not in self.objects:
            raise FileNotFoundError(key.hex())
        return self.objects[key]

    def delete(self, key: bytes) -> None:
        self._call()
        self.objects.pop(key, None)

    def list(self):
        self._call()
        return iter([(key, len(record)) for key, record in self.objects.items()])

    def _call(self) -> None:
        self.calls += 1
        if self.away:
            raise Unavailable("shelf: connection refused")


def over(store, size: int = 100 * OBJECT, disk: Remembering | None = None, sealer=None) -> Rank:
    rank = Rank(disk or Remembering(), through=False, sealer=sealer)
    rank.tiers.open_below(store, size, AtOnce())
    rank.settle()
    return rank


def fill(rank: Rank, keys=KEYS) -> None:
    for number, key in enumerate(keys):
        rank.put(key, keys[number - 1] if number % 4 else None)


@pytest.mark.parametrize("sealed", [False, True])
def test_what_left_memory_and_file_is_fetched_from_the_store_and_kept_over_a_restart(tmp_path, sealed):
    sealer = FileSealer(bytes(32)) if sealed else None
    rank = over(DirectoryStore(tmp_path, "place"), sealer=sealer)
    fill(rank)
    assert len(rank.store.resident()) <= SLOTS + FILE_SLOTS < len(KEYS)
    gone = [key for key in KEYS if key not in rank.store.resident()]
    below = [key for key in gone if rank.store.match([key])]
    assert len(below) >= 4 and rank.store.counts.archived >= len(below)
    for number, key in enumerate(below):
        assert rank.get(number, key) == payload(key)
    assert rank.store.counts.fetched == len(below) and rank.store.lost_slots() == 0
    at = KEYS.index(below[-1])
    assert rank.store._index[below[-1]].parent == (KEYS[at - 1] if at % 4 else None), "its record says so"
    raw = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert (payload(below[0])[:64] in raw) == (not sealed)
    again = over(DirectoryStore(tmp_path, "place"), sealer=sealer)  # another disk: only the store is left
    kept = [key for key in KEYS if again.store.match([key])]
    assert set(below) <= set(kept)
    for number, key in enumerate(kept):
        assert again.get(number, key) == payload(key)
    elsewhere = over(DirectoryStore(tmp_path, "another rank's place"), sealer=sealer)
    assert not any(elsewhere.store.match([key]) for key in KEYS)


def test_the_cap_of_a_directory_holds_and_the_oldest_go(tmp_path):
    rank = over(DirectoryStore(tmp_path, "p"), size=3 * OBJECT + 100)
    for _ in range(3):
        fill(rank)
        used = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert used == rank.store.below_used <= 3 * OBJECT + 100
    assert rank.store.counts.archived > 3 == rank.store.below_count
    smaller = over(DirectoryStore(tmp_path, "p"), size=OBJECT)
    smaller.settle()
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 1 == smaller.store.below_count
    assert smaller.store.delete([next(iter(smaller.store.below))], 0.0).there == [True]
    smaller.settle()
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("damage", ["flipped", "cut", "swapped", "gone"])
def test_a_damaged_object_is_a_miss_and_never_served(damage):
    shelf = Shelf()
    rank = over(shelf)
    fill(rank)
    one, two = [key for key in KEYS if key not in rank.store.resident() and rank.store.match([key])][:2]
    if damage == "flipped":
        raw = bytearray(shelf.objects[one])
        raw[HEADER_SIZE + 77] ^= 1
        shelf.objects[one] = bytes(raw)
    elif damage == "cut":
        shelf.objects[one] = shelf.objects[one][:-1]
    elif damage == "swapped":
        shelf.objects[one] = shelf.objects[two]
    else:
        del shelf.objects[one]
    assert rank.get(1, one) is None and rank.store.match([one]) == 0 and one not in shelf.objects
    assert rank.get(2, two) == payload(two), "the store itself is not given up for that"
    assert rank.store.lost_slots() == 0 and rank.store.counts.fetch_failed == 1


def test_a_store_that_is_away_is_left_alone_and_what_it_has_is_a_miss_at_once():
    shelf = Shelf()
    rank = over(shelf)
    fill(rank)
    below = [key for key in KEYS if key not in rank.store.resident() and rank.store.match([key])]
    shelf.away, before = True, shelf.calls
    for number in range(60):
        rank.now_s += 0.05
        assert rank.get(number, below[0]) is None
        fill(rank, KEYS[-4:])
    assert rank.store.match(below[:1]) == 0 and shelf.calls - before <= 4, "3 s: tries after 1 and 2 s"
    assert rank.tiers.report()["below"]["why"] == "shelf: connection refused"
    shelf.away = False
    rank.now_s += 60.0
    assert rank.get(100, below[0]) == payload(below[0]) and rank.store.match(below[1:2]) == 1


def test_a_store_that_hangs_takes_no_further_reads(tmp_path):
    class Never(AtOnce):
        hangs = False

        def submit(self, fn, /, *args, **kwargs):
            from concurrent.futures import Future

            return Future() if self.hangs else super().submit(fn, *args, **kwargs)

    threads = Never()
    rank = Rank(Remembering(), through=False)
    rank.tiers.open_below(Shelf(), 100 * OBJECT, threads)
    rank.settle()
    fill(rank)
    one, two = [key for key in KEYS if key not in rank.store.resident() and rank.store.match([key])][:2]
    threads.hangs = True
    assert rank.get(1, one) is None and rank.store.fetching == 1
    rank.now_s += AWAY_S + 1
    assert rank.get(2, two) is None and rank.store.fetching == 1
    here = next(key for key in rank.store.resident() if key != one)
    assert rank.get(3, here) == payload(here) and rank.store.lost_slots() == 0


def test_a_block_that_is_deleted_while_it_is_archived_does_not_stay_in_the_store():
    shelf, rank = Shelf(), Rank(Remembering(), through=False)
    hanging = Hanging()
    rank.tiers.open_below(shelf, 100 * OBJECT, hanging)
    rank.settle()
    hanging.hangs = True
    fill(rank)
    ((_, (archive, _)), *_) = rank.store._archives.items()
    rank.store.delete([archive.key], rank.now_s)
    hanging.hangs = False
    hanging.let_go()
    rank.settle()
    hanging.let_go()
    assert shelf.objects and archive.key not in shelf.objects and not rank.store.match([archive.key])


def test_stores_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(Refused, match=r"wanted a directory at .*nowhere, found none; make it, or mount it"):
        open_store(str(tmp_path / "nowhere"), "p")
    with pytest.raises(Refused, match=r"pool.remote: cannot use nonsense://x"):
        open_store("nonsense://x", "p")
    with pytest.raises(SpecRefused, match=r"wanted sizes for /x .* found pool.remote_size 0"):
        replace(CONFIG, remote="/x")
    assert isinstance(open_store(f"file://{tmp_path}", "p"), DirectoryStore)


def test_drafts_that_a_crash_left_are_removed(tmp_path):
    store = DirectoryStore(tmp_path, "p")
    store.put(KEYS[0], b"x" * 5000)
    draft = tmp_path / "p" / "01" / ".draft-1234"
    draft.write_bytes(b"half")
    assert list(DirectoryStore(tmp_path, "p").list()) == [(KEYS[0], 5000)] and not draft.exists()


@pytest.fixture
def s3(monkeypatch):
    """A real server that speaks S3 over HTTP, with an empty bucket; its URL for kvtool."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"

    def bucket() -> bool:
        try:
            request = urllib.request.Request(
                f"{endpoint}/kvtool-blocks", method="PUT", headers={"Authorization": "AWS x:y"}
            )
            return urllib.request.urlopen(request, timeout=2).status == 200
        except OSError:
            return False

    try:
        until(bucket, 30, "the S3 server answers")
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        yield server
    finally:
        server.kill()
        server.wait(10)


@pytest.mark.real
def test_blocks_in_an_object_store_over_http(s3):
    rank = over(CloudStore("s3://kvtool-blocks", "layout/rank"))
    fill(rank)
    below = [key for key in KEYS if key not in rank.store.resident() and rank.store.match([key])]
    assert len(below) >= 4
    for number, key in enumerate(below):
        assert rank.get(number, key) == payload(key)
    again = over(CloudStore("s3://kvtool-blocks", "layout/rank"))
    assert again.store.below_count == rank.store.below_count
    assert again.get(1, below[0]) == payload(below[0])
    store = CloudStore("s3://kvtool-blocks", "layout/rank")
    store.delete(below[0])
    store.delete(below[0])
    with pytest.raises(FileNotFoundError):
        store.get(below[0])
    s3.kill()
    s3.wait(10)
    with pytest.raises(Unavailable, match=r"^s3://kvtool-blocks: "):
        store.get(below[1])
    assert again.get(2, below[1]) is None and again.store.below_backoff.failures == 1


@pytest.mark.real
def test_a_real_pool_that_lost_its_disks_finds_its_blocks_in_the_directory_below(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    config = replace(
        CONFIG, ranks=1, file_size=81 * (LAYOUT.block_size + 4096), ucx=False, remote=str(shared), remote_size=2**23
    )
    handle = start_pool(config, tmp_path / "run")
    client = PoolClient(handle.state_file, LAYOUT)
    try:
        for at in range(0, 96, 8):
            client.write(puts(REAL_KEYS[at : at + 8]), 10)
        until(lambda: pool_status(tmp_path / "run").ranks[0].answer["counts"]["archived"] >= 40, 10, "archived")
        stop_pool(tmp_path / "run")
        for path in files_of(tmp_path / "run"):
            path.unlink()
        start_pool(config, tmp_path / "run")
        until(lambda: found(client, REAL_KEYS[:20]) == 20, 5, "they come from the directory")
        counts = pool_status(tmp_path / "run").ranks[0].answer["counts"]
        assert counts["fetched"] >= 20 and counts["recovered"] == 0
        assert {path.stat().st_mode & 0o777 for path in shared.rglob("*") if path.is_file()} == {0o600}
    finally:
        client.close()
        stop_pool(tmp_path / "run", purge=True)
