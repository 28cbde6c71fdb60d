"""Segments: shared between processes, capped before they are used, and never another user's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtool.errors import ProtocolError, Refused, Unavailable
from kvtool.transfer.room import Room, demand, rooms
from kvtool.transfer.segment import SHM, Segment, unlink_prefix

MIB = 2**20

OTHER_PROCESS = """
import sys
from kvtool.transfer.segment import Segment
segment = Segment.attach(sys.argv[1], writable=True)
print(bytes(segment.view[:5]).decode(), flush=True)
segment.view[-5:] = b"world"
"""


def test_two_processes_see_each_others_bytes_and_the_name_outlives_the_second(prefix):
    with Segment.create(prefix + "a", 3 * MIB + 1) as segment:
        segment.view[:5] = b"hello"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", OTHER_PROCESS, segment.name],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == ("hello\n", "")
        assert bytes(segment.view[-5:]) == b"world"
        assert (SHM / segment.name).exists(), "ending an attached process must not unlink"
        segment.unlink()
        segment.unlink()


def test_a_new_segment_is_zeroed_private_and_wholly_allocated(prefix):
    with Segment.create(prefix + "a", 2 * MIB + 4096) as segment:
        found = (SHM / segment.name).stat()
        assert found.st_mode & 0o777 == 0o600
        assert found.st_blocks * 512 >= segment.size == found.st_size == len(segment.view)
        assert not np.frombuffer(segment.view, np.uint8).any()
        segment.unlink()


def test_an_attached_view_is_read_only_unless_asked_for(prefix):
    with Segment.create(prefix + "a", MIB) as owner:
        with Segment.attach(owner.name, size=MIB, prefault=True) as reader:
            with pytest.raises(TypeError):
                reader.view[0] = 1
            owner.view[7] = 9
            assert reader.view[7] == 9 and reader.address != owner.address
        with Segment.attach(owner.name, writable=True, prefault=True) as writer:
            writer.view[0] = 1
        assert owner.view[0] == 1
        owner.unlink()


def test_close_says_when_views_are_alive_and_they_stay_good(prefix):
    segment = Segment.create(prefix + "a", MIB)
    segment.unlink()
    array = np.frombuffer(segment.view, np.uint8)
    piece = segment.view[10:20]
    array[:] = 7
    assert segment.close() is False
    assert bytes(piece) == bytes([7] * 10) and array[-1] == 7
    assert segment.close() is True, "again is a no-op"
    with pytest.raises(ValueError, match="is closed"):
        _ = segment.view


def test_a_mapping_stays_good_after_unlink_and_after_the_owner_closed(prefix):
    owner = Segment.create(prefix + "a", MIB)
    owner.view[0] = 5
    reader = Segment.attach(owner.name)
    owner.unlink()
    assert owner.close()
    assert reader.view[0] == 5
    with pytest.raises(Unavailable, match="its owner is gone"):
        Segment.attach(owner.name)
    assert reader.close()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "a/b", ".hidden", "-x", "a\0b", "a b", "x" * 201])
def test_names_that_are_paths_or_worse_are_refused(name):
    with pytest.raises(Refused, match="segment name"):
        Segment.create(name, MIB)
    with pytest.raises(Refused, match="segment name"):
        Segment.attach(name)


def test_a_taken_name_and_a_bad_size_are_refused(prefix):
    with Segment.create(prefix + "a", MIB) as segment:
        segment.view[0] = 3
        with pytest.raises(Refused, match="is there already"):
            Segment.create(segment.name, MIB)
        with pytest.raises(ProtocolError, match=r"wanted 7 bytes as its owner announced, found 1048576"):
            Segment.attach(segment.name, size=7)
        assert segment.view[0] == 3
        segment.unlink()
    with pytest.raises(Refused, match="positive size, got 0"):
        Segment.create(prefix + "b", 0)


def test_planted_files_are_refused(prefix):
    target = SHM / (prefix + "real")
    target.write_bytes(b"x" * 4096)
    link = SHM / (prefix + "link")
    link.symlink_to(target)
    with pytest.raises(Refused, match="symbolic links"):
        Segment.attach(link.name)
    target.chmod(0o644)
    with pytest.raises(Refused, match=r"not a segment of ours.*-rw-r--r--"):
        Segment.attach(target.name)
    target.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(target, 65534, 65534)
        with pytest.raises(Refused, match="of user 65534"):
            Segment.attach(target.name)
        assert unlink_prefix(prefix) == [], "another user's file and a link are not ours to remove"
        os.chown(target, 0, 0)
    assert unlink_prefix(prefix) == [target.name]
    link.unlink()


def test_unlink_prefix_removes_what_a_killed_pool_left_and_nothing_else(prefix):
    segments = [Segment.create(prefix + name, 4096) for name in ("pool1-0", "pool1-1", "pool2-0")]
    assert unlink_prefix(prefix + "pool1-") == [prefix + "pool1-0", prefix + "pool1-1"]
    assert unlink_prefix(prefix) == [prefix + "pool2-0"]
    assert all(segment.close() for segment in segments)
    for bad in ("", "abc", "*", "kv*ol"):
        with pytest.raises(Refused, match="will not remove segments"):
            unlink_prefix(bad)


def test_a_segment_larger_than_its_file_system_is_a_sentence_and_leaves_nothing(small_tmpfs):
    directory = small_tmpfs("8m")
    with pytest.raises(Refused, match=r"wanted 9.0 MiB, the file system of .* has 8.0 MiB left; lower pool.dram_size"):
        Segment.create("much", 9 * MIB, directory=directory)
    with Segment.create("some", 5 * MIB, directory=directory) as segment:
        with pytest.raises(Refused, match=r"has 3\.0 MiB left"):
            Segment.create("more", 4 * MIB, directory=directory)
        segment.view[-1] = 1
    assert [path.name for path in directory.iterdir()] == ["some"]


@pytest.mark.parametrize("prefault", [True, False])
def test_room_that_goes_while_allocating_is_a_sentence_too_and_no_sigbus(small_tmpfs, monkeypatch, prefault):
    directory = small_tmpfs("8m")
    monkeypatch.setattr("kvtool.transfer.segment.rooms", lambda directory: [])
    with pytest.raises(Refused, match="ran out of room while it was allocated; lower the thing"):
        Segment.create("much", 9 * MIB, directory=directory, prefault=prefault, setting="the thing")
    assert list(directory.iterdir()) == []


def test_more_than_dev_shm_has_is_refused(prefix):
    with pytest.raises(Refused, match=r"wanted 1024.0 TiB"):
        Segment.create(prefix + "a", 2**50)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_the_tightest_group_of_version_2_counts_less_what_it_could_reclaim(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8192 kB",
            "proc/self/cgroup": "0::/outer/inner",
            "sys/fs/cgroup/outer/memory.max": "1000",
            "sys/fs/cgroup/outer/memory.current": "700",
            "sys/fs/cgroup/outer/memory.stat": "anon 5\ninactive_file 200",
            "sys/fs/cgroup/outer/inner/memory.max": "max",
            "sys/fs/cgroup/outer/inner/memory.current": "700",
        },
    )
    found = [room for room in rooms(tmp_path, root) if "file system" not in room.where]
    outer = root / "sys/fs/cgroup/outer/memory.max"
    assert found == [Room("the host's available memory", 8 * MIB), Room(f"control group {outer}", 500)]
    with pytest.raises(Refused, match=r"segment x: wanted 501 B, control group .*memory.max has 500 B left; lower y"):
        demand("segment x", 501, found, "y")
    demand("segment x", 500, found, "y")


def test_groups_of_version_1_are_read_and_no_limit_is_no_limit(tmp_path):
    group = "sys/fs/cgroup/memory/docker"
    files = {
        "proc/self/cgroup": "5:cpu,memory:/docker\n0::/",
        f"{group}/memory.limit_in_bytes": "1000",
        f"{group}/memory.usage_in_bytes": "100",
    }
    found = [room.free for room in rooms(tmp_path, tree(tmp_path, files)) if "control group" in room.where]
    assert found == [900]
    tree(tmp_path, {f"{group}/memory.limit_in_bytes": "9223372036854771712"})
    assert not [room for room in rooms(tmp_path, tmp_path) if "control group" in room.where]
