"""Block files: what was written comes back or is an error, a cap is a cap, and a full disk is a sentence."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from concurrent.futures import wait
from random import Random

import numpy as np
import pytest

from kvtool.errors import BlockCorrupt, Refused, Unavailable
from kvtool.transfer.checksum import checksum
from kvtool.transfer.disk import FileDisk
from kvtool.transfer.filehead import HEAD_SIZE, PAGE, FileHead, Kept, SlotHeader
from kvtool.transfer.files import BlockFile

SLOT = 100_000
STRIDE = PAGE + 102_400
MIB = 2**20


def key_of(n: int) -> bytes:
    return n.to_bytes(32, "big")[::-1]


def block_of(n: int, size: int = SLOT) -> bytes:
    return Random(n).randbytes(size)


def aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def test_blocks_come_back_past_the_page_cache_and_from_aligned_memory_without_a_copy(tmp_path):
    with BlockFile(tmp_path / "blocks", 2 * PAGE, 4) as file:
        if file.how != "direct":
            pytest.skip(f"this file system: {file.how}")
        data, out = aligned(2 * PAGE), aligned(2 * PAGE)
        data[:] = block_of(1, 2 * PAGE)
        kept = Kept(priority=80, until_s=1.7e9, pin=1, copies=2)
        file.write(2, data, key_of(1), generation=7, parent=key_of(9), kept=kept).result(10)
        found = file.read(2, out, key_of(1), generation=7).result(10)
        assert bytes(out) == bytes(data)
        sum_ = checksum(data, key_of(1))
        assert found == SlotHeader(key_of(1), 2 * PAGE, sum_, 7, key_of(9), kept, stored=sum_)
        assert list(file.headers()) == [(2, found)]


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, SLOT - 1, SLOT])
@pytest.mark.parametrize("durable", [False, True])
def test_every_size_comes_back(tmp_path, size, durable):
    with BlockFile(tmp_path / "blocks", SLOT, 3) as file:
        file.write(1, block_of(9), key_of(9), durable=durable).result(10)  # longer before
        sum_ = checksum(block_of(1, size), key_of(1))
        file.write(1, block_of(1, size), key_of(1), sum=sum_, durable=durable).result(10)
        out = bytearray(size)
        assert file.read(1, out, key_of(1)).result(10).size == size
        assert out == block_of(1, size)


def test_a_file_system_that_refuses_o_direct_is_buffered_and_says_so(tmp_path, monkeypatch, caplog):
    """Newer kernels take O_DIRECT on tmpfs, so the refusal is the one that older ones give."""
    real = os.pwritev

    def refuse(fd, views, at):
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(fd, views, at)

    monkeypatch.setattr(os, "pwritev", refuse)
    with caplog.at_level("INFO"), BlockFile(tmp_path / "blocks", SLOT, 3) as file:
        assert file.how == "buffered: no O_DIRECT here ([Errno 22] Invalid argument)"
        assert "how=buffered" in caplog.text
        file.write(0, block_of(1), key_of(1)).result(10)
        out = bytearray(SLOT)
        file.read(0, out, key_of(1)).result(10)
        assert out == block_of(1)


def test_blocks_come_back_from_tmpfs_too(small_tmpfs):
    with BlockFile(small_tmpfs("8m") / "blocks", SLOT, 30) as file:
        for n in range(30):
            file.write(n, block_of(n), key_of(n)).result(10)
        for n in range(30):
            out = bytearray(SLOT)
            file.read(n, out, key_of(n)).result(10)
            assert out == block_of(n)


def test_many_at_once_from_few_buffers(tmp_path):
    with BlockFile(tmp_path / "blocks", SLOT, 40, threads=3) as file:
        assert not wait([file.write(n, block_of(n), key_of(n)) for n in range(40)], 30).not_done
        outs = [bytearray(SLOT) for _ in range(40)]
        reads = [file.read(n, outs[n], key_of(n)) for n in range(40)]
        wrong = [file.read(n, bytearray(SLOT), key_of(n + 1)) for n in range(40)]
        assert not wait(reads + wrong, 30).not_done
        assert all(read.exception() is None for read in reads)
        assert all(isinstance(read.exception(), BlockCorrupt) for read in wrong)
        assert outs == [block_of(n) for n in range(40)]


def test_a_torn_slot_is_corrupt_and_never_served(tmp_path):
    path = tmp_path / "blocks"
    with BlockFile(path, SLOT, 3) as file:
        for n in range(3):
            file.write(n, block_of(n), key_of(n)).result(10)
        with path.open("r+b") as raw:  # slot 1 dies half way through its next block, whose header is written last
            raw.seek(2 * STRIDE + PAGE)
            raw.write(block_of(99)[: SLOT // 2])
        for wanted in (key_of(1), key_of(99)):
            with pytest.raises(BlockCorrupt, match=r"slot 1: (block .* torn or damaged|wanted block .*, found block)"):
                file.read(1, bytearray(SLOT), wanted).result(10)
        for n in (0, 2):
            file.read(n, bytearray(SLOT), key_of(n)).result(10)
        with path.open("r+b") as raw:  # a header that is half there
            raw.seek(1 * STRIDE + 20)
            raw.write(b"xx")
        with pytest.raises(BlockCorrupt, match="wanted block 00000000, found no whole header"):
            file.read(0, bytearray(SLOT), key_of(0)).result(10)
        assert [slot for slot, _ in file.headers()] == [1, 2]


def test_another_length_generation_or_an_erased_slot_is_not_the_block(tmp_path):
    with BlockFile(tmp_path / "blocks", SLOT, 3) as file:
        file.write(0, block_of(1), key_of(1), generation=4).result(10)
        with pytest.raises(BlockCorrupt, match="found 100000 bytes where 99999 were asked for"):
            file.read(0, bytearray(SLOT - 1), key_of(1)).result(10)
        with pytest.raises(BlockCorrupt, match="found generation 4 where 5 was asked for"):
            file.read(0, bytearray(SLOT), key_of(1), generation=5).result(10)
        file.erase(0).result(10)
        with pytest.raises(BlockCorrupt, match="found no whole header"):
            file.read(0, bytearray(SLOT), key_of(1)).result(10)


def test_blocks_are_there_after_a_reopen_unless_fresh(tmp_path):
    path = tmp_path / "blocks"
    for fresh, wanted in [(False, []), (False, [1]), (True, []), (False, [1])]:
        with BlockFile(path, SLOT, 3, fresh=fresh) as file:
            assert [slot for slot, _ in file.headers()] == wanted
            file.write(1, block_of(5), key_of(5)).result(10)
            file.sync().result(10)


def test_the_cap_holds_and_is_allocated(tmp_path):
    path = tmp_path / "blocks"
    slots = BlockFile.slots_under(MIB, SLOT)
    assert slots == MIB // STRIDE - 1
    with BlockFile(path, SLOT, slots) as file:
        assert path.stat().st_size == file.size <= MIB
        assert path.stat().st_blocks * 512 >= file.size
        assert path.stat().st_mode & 0o777 == 0o600
        for n in range(slots):
            file.write(n, block_of(n), key_of(n)).result(10)
        with pytest.raises(ValueError, match=f"has slots 0 to {slots - 1}, got {slots}"):
            file.write(slots, b"", key_of(0))
        assert path.stat().st_size == file.size
    assert BlockFile.slots_under(STRIDE, SLOT) == 0 == BlockFile.slots_under(0, SLOT)


def test_a_full_disk_is_a_sentence_and_leaves_nothing(small_tmpfs, monkeypatch):
    directory = small_tmpfs("4m")
    with pytest.raises(Refused, match=r"wanted 5.0 MiB, the file system of .* has 4.0 MiB left; lower pool.file_size"):
        BlockFile(directory / "blocks", MIB - PAGE, 4)
    assert list(directory.iterdir()) == []
    monkeypatch.setattr("kvtool.transfer.disk.demand", lambda *_: None)
    with pytest.raises(Refused, match=r"wanted 5\.0 MiB, the disk ran full .*lower pool.file_size"):
        BlockFile(directory / "blocks", MIB - PAGE, 4)
    assert list(directory.iterdir()) == []


def test_a_file_of_another_shape_or_owner_or_in_use_is_refused(tmp_path):
    path = tmp_path / "blocks"
    with BlockFile(path, SLOT, 3), pytest.raises(Refused, match="in use by another process"):
        BlockFile(path, SLOT, 3)
    with pytest.raises(Refused, match=r"wanted blocks of up to 99999 bytes, found blocks of up to 100000 bytes; give"):
        BlockFile(path, SLOT - 1, 3)
    with pytest.raises(
        Refused, match=r"wanted blocks of .* of b \(fingerprint B\), found blocks of up to 100000 bytes;"
    ):
        BlockFile(path, SLOT, 3, fingerprint="B", layout="b")
    path.chmod(0o640)
    with pytest.raises(Refused, match=r"mode 0600, found -rw-r-----"):
        BlockFile(path, SLOT, 3)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(Refused, match="symbolic links"):
        BlockFile(tmp_path / "link", SLOT, 3)
    with pytest.raises(Refused, match="No such file or directory"):
        BlockFile(tmp_path / "nowhere" / "blocks", SLOT, 3)


def test_a_file_of_somebody_else_is_refused_and_one_with_a_damaged_head_begins_afresh(tmp_path):
    path = tmp_path / "blocks"
    path.write_text("not blocks at all" * 1000)
    path.chmod(0o600)
    with pytest.raises(Refused, match="wanted a block file, found something else; move it away or remove it"):
        BlockFile(path, SLOT, 3)
    assert path.read_text().startswith("not blocks")
    path.unlink()
    with BlockFile(path, SLOT, 3) as file:
        file.write(1, block_of(1), key_of(1)).result(10)
    with path.open("r+b") as raw:
        raw.seek(20)
        raw.write(b"xx")
    with BlockFile(path, SLOT, 3) as file:
        assert list(file.headers()) == []
    assert FileHead.unpack(path.read_bytes()[:HEAD_SIZE]) == FileHead(SLOT, 3)


def test_a_file_may_shrink_or_grow_and_keeps_what_fits(tmp_path):
    path = tmp_path / "blocks"
    with BlockFile(path, SLOT, 6) as file:
        for n in range(6):
            file.write(n, block_of(n), key_of(n)).result(10)
    for slots, left in [(3, [0, 1, 2]), (8, [0, 1, 2])]:
        with BlockFile(path, SLOT, slots) as file:
            assert path.stat().st_size == file.size == (slots + 1) * STRIDE <= path.stat().st_blocks * 512
            assert [slot for slot, _ in file.headers()] == left
            file.check(2, key_of(2), SLOT).result(10)


def test_durable_writes_share_syncs_and_fail_with_them(tmp_path):
    """A disk whose sync waits until it is let go: what was written meanwhile rides on the next one."""

    class Slow(FileDisk):
        syncs, go, error = 0, threading.Event(), None

        def sync(self):
            self.syncs += 1
            assert self.go.wait(10)
            if self.error:
                raise self.error

    disk = Slow(tmp_path / "blocks")
    disk.go.set()
    with BlockFile(None, SLOT, 20, disk=disk, threads=3) as file:
        disk.go.clear()
        disk.syncs = 0
        writes = [file.write(n, block_of(n), key_of(n), durable=True) for n in range(20)]
        file.write(0, block_of(0), key_of(0)).result(10)  # not durable: waits for nobody
        assert not any(write.done() for write in writes)
        disk.go.set()
        assert not wait(writes, 10).not_done and all(write.exception() is None for write in writes)
        assert disk.syncs <= 3
        disk.error = OSError(5, "Input/output error")
        with pytest.raises(Unavailable, match="Input/output error in fdatasync; the disk may be failing"):
            file.write(1, block_of(1), key_of(1), durable=True).result(10)


def test_a_disk_that_gives_back_other_bytes_is_refused_at_start(tmp_path, monkeypatch):
    real = os.preadv

    def lie(fd, views, at):
        moved = real(fd, views, at)
        views[0][5] ^= 1
        return moved

    monkeypatch.setattr(os, "preadv", lie)
    with pytest.raises(Refused, match="did not come back the same; do not trust this disk"):
        BlockFile(tmp_path / "blocks", SLOT, 3)


def test_short_reads_and_writes_go_on_where_they_stopped(tmp_path, monkeypatch):
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][: 2 * PAGE]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][: 3 * PAGE]], at))
    with BlockFile(tmp_path / "blocks", SLOT, 3) as file:
        file.write(1, block_of(1), key_of(1)).result(10)
        out = bytearray(SLOT)
        file.read(1, out, key_of(1)).result(10)
        assert out == block_of(1)


def test_io_errors_and_a_file_cut_short_are_sentences(tmp_path, monkeypatch):
    path = tmp_path / "blocks"
    with BlockFile(path, SLOT, 3) as file:
        file.write(2, block_of(1), key_of(1)).result(10)
        os.truncate(path, 2 * STRIDE)
        with pytest.raises(Unavailable, match=r"no progress at byte .*cut short"):
            file.read(2, bytearray(SLOT), key_of(1)).result(10)
        monkeypatch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(Unavailable, match="Input/output error; the disk may be failing"):
            file.write(1, block_of(1), key_of(1)).result(10)


def test_a_closed_file_is_closed(tmp_path):
    file = BlockFile(tmp_path / "blocks", SLOT, 3)
    done = file.write(0, block_of(1), key_of(1))
    assert file.close() and file.close()
    assert done.done()
    with pytest.raises(Unavailable, match="is closed"):
        file.read(0, bytearray(SLOT), key_of(1))


def test_a_killed_writer_leaves_old_blocks_new_blocks_or_corrupt_ones_and_frees_the_lock(tmp_path):
    code = (
        "import sys; from pathlib import Path; from random import Random; from kvtool.transfer.files import BlockFile\n"
        f"f = BlockFile(Path(sys.argv[1]), {SLOT}, 3)\nprint('up', flush=True)\n"
        f"while True: [f.write(n, Random(n).randbytes({SLOT}), n.to_bytes(32, 'big')[::-1]).result() for n in range(3)]"
    )
    path = tmp_path / "blocks"
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
    writer.kill()
    writer.communicate(timeout=5)
    with BlockFile(path, SLOT, 3) as file:
        for slot, header in file.headers():
            out = np.zeros(SLOT, np.uint8)
            file.read(slot, out, header.key).result(10)
            assert out.tobytes() == block_of(slot)
