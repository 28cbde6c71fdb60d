"""The journal: whatever stops the process at whatever call, what was acknowledged is there, and nothing is twice."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from kvtool.batch.journal import Journal, RealFiles, decode, encode
from kvtool.errors import Refused, Unavailable

COUNT, SECTOR = 8, 16
WHERE = Path("/job/journal")


class Stopped(BaseException):
    """The machine stops here."""


class Disk:
    """One file on a disk that loses what was not synced: of each such write any `SECTOR` may be there or not, in
    whatever order. It stops before, or within, its `stop_at`-th changing call."""

    def __init__(self, data: bytes = b"", stop_at: int = -1) -> None:
        self.durable, self.seen = bytearray(data), bytearray(data)
        self.pending: list[tuple[int, bytes]] = []
        self.calls, self.stop_at = 0, stop_at
        self.fails_with: int | None = None

    def _step(self) -> bool:
        """Whether the machine stops within this call."""
        self.calls += 1
        return self.calls - 1 == self.stop_at

    def open(self, path: Path, *, change: bool) -> int:
        return 3

    def size(self, handle: int) -> int:
        return len(self.seen)

    def read(self, handle: int, size: int, at: int) -> bytes:
        return bytes(self.seen[at : at + size])

    def append(self, handle: int, data: bytes, at: int) -> int:
        if self.fails_with is not None:
            raise OSError(self.fails_with, "no space left")
        self.pending.append((at, data))
        self.seen[at : at + len(data)] = data
        if self._step():
            raise Stopped
        return len(data)

    def truncate(self, handle: int, size: int) -> None:
        if self._step():
            raise Stopped
        del self.seen[size:], self.durable[size:]

    def sync(self, handle: int) -> None:
        if self._step():
            raise Stopped
        self.durable, self.pending = bytearray(self.seen), []

    def close(self, handle: int) -> None:
        pass

    def after_power_cut(self, rng: Random) -> bytes:
        """One of the states that the disk may be found in. Where only a later sector came, there are zeros before."""
        found, share = bytearray(self.durable), rng.choice([0.0, 0.5, 0.9, 1.0])
        for at, data in self.pending:
            for start in range(0, len(data), SECTOR):
                piece = data[start : start + SECTOR]
                if rng.random() < share:
                    found.extend(bytes(max(0, at + start + len(piece) - len(found))))
                    found[at + start : at + start + len(piece)] = piece
        return bytes(found)


def work(disk: Disk, acknowledged: set[int], rng: Random) -> None:
    """Do what is left, a few results to a sync."""
    journal = Journal(WHERE, COUNT, disk)
    assert acknowledged <= {number for number in range(COUNT) if number in journal}, "an answer was lost"
    left = [number for number in range(COUNT) if number not in journal]
    while left:
        some = [left.pop(0) for _ in range(min(len(left), rng.randint(1, 3)))]
        journal.append([(number, {"text": f"answer {number}"}) for number in some])
        acknowledged.update(some)


def numbers(disk: Disk) -> list[int]:
    return [int(record["number"]) for record in Journal(WHERE, COUNT, disk).records()]


@pytest.mark.parametrize("seed", range(20))
def test_stopped_at_every_call_each_answer_is_there_once(seed: int) -> None:
    """Every stopping point of a job, and of what resumes it: two stops, then an end."""
    stop_at = 0
    while True:
        rng, acknowledged = Random(seed), set[int]()
        disk = Disk(stop_at=stop_at)
        try:
            work(disk, acknowledged, rng)
        except Stopped:
            again = Disk(disk.after_power_cut(rng), stop_at=rng.randrange(6))
            try:
                work(again, acknowledged, rng)
            except Stopped:
                again = Disk(again.after_power_cut(rng))
                work(again, acknowledged, rng)
            assert sorted(numbers(again)) == list(range(COUNT)), f"seed {seed}, stopped at call {stop_at}"
            stop_at += 1
        else:
            assert sorted(numbers(disk)) == list(range(COUNT))
            assert stop_at > 5, "no call was stopped at"
            return


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    record = {"text": 'ü\ud800\n"x"', "usage": {"hit_tokens": {"dram": 3}}}
    Journal.make(tmp_path / "journal")
    journal = Journal(tmp_path / "journal", COUNT)
    journal.append([(5, record), (1, {})])
    assert len(journal) == 2 and 5 in journal and 0 not in journal
    journal.close()
    again = Journal(tmp_path / "journal", COUNT)
    assert again.record(5) == {"number": 5, **record} and again.record(0) is None
    assert [one["number"] for one in again.records()] == [5, 1] and again.torn == 0
    again.close()


def test_a_torn_end_is_cut_off_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = encode({"number": 0, "text": "a"}, 0)
    path.write_bytes(whole + encode({"number": 1, "text": "b"}, len(whole))[:-3])
    journal = Journal(path, COUNT)
    assert journal.torn > 0 and len(journal) == 1
    journal.append([(1, {"text": "c"})])
    journal.close()
    assert path.read_bytes() == whole + encode({"number": 1, "text": "c"}, len(whole))


def test_who_only_reads_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(encode({"number": 0}, 0) + b"half a reco")
    journal = Journal.reading(path, COUNT)
    assert len(journal) == 1
    journal.close()
    assert path.read_bytes().endswith(b"half a reco")


def test_damage_in_the_middle_is_refused_by_place(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = encode({"number": 0, "text": "aaaa"}, 0)
    second = encode({"number": 1}, len(first))
    path.write_bytes(first.replace(b"aaaa", b"aaba") + second)
    with pytest.raises(Refused, match="the record at byte 0 is damaged, and records follow it"):
        Journal(path, COUNT)
    assert path.read_bytes().endswith(second), "nothing may be thrown away"


def test_a_write_that_came_to_the_disk_in_part_is_cut_off_where_its_middle_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = encode({"number": 0}, 0)
    lost, last = encode({"number": 1, "text": "aaaa"}, len(first)), encode({"number": 2}, len(first))
    path.write_bytes(first + lost[:20] + bytes(len(lost) - 21) + b"\n" + last)
    journal = Journal(path, COUNT)
    assert 0 in journal and 1 not in journal and 2 not in journal and journal.torn == len(lost) + len(last)
    journal.close()
    assert path.read_bytes() == first


def test_a_journal_that_is_gone_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    for opened in (Journal, Journal.reading):
        with pytest.raises(Refused, match=r"the job's journal cannot be opened.*nobody knows what is answered"):
            opened(tmp_path / "journal", COUNT)
    assert not (tmp_path / "journal").exists()


def test_what_a_failed_write_left_behind_harms_nothing() -> None:
    """The sync fails, and the part that was written cannot be taken back either."""

    class Sick(Disk):
        sick = False

        def sync(self, handle: int) -> None:
            if self.sick:
                raise OSError(errno.EIO, "input/output error")
            super().sync(handle)

        def truncate(self, handle: int, size: int) -> None:
            if self.sick:
                raise OSError(errno.EIO, "input/output error")
            super().truncate(handle, size)

    disk = Sick()
    journal = Journal(WHERE, COUNT, disk)
    disk.sick = True
    with pytest.raises(Unavailable):
        journal.append([(number, {"text": "long" * 9}) for number in range(3)])
    disk.sick = False
    journal.append([(4, {})])
    again = Journal(WHERE, COUNT, Disk(bytes(disk.seen)))
    assert [number for number in range(COUNT) if number in again] == [4]


def test_a_journal_of_another_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(encode({"number": COUNT}, 0))
    with pytest.raises(Refused, match="speaks of request 8, this job has 8"):
        Journal(tmp_path / "journal", COUNT)


def test_a_full_disk_loses_nothing_and_says_what_to_do() -> None:
    disk = Disk()
    journal = Journal(WHERE, COUNT, disk)
    journal.append([(0, {})])
    disk.fails_with = errno.ENOSPC
    with pytest.raises(Unavailable, match=r"1 results could not be written \(no space left\); make room, then: kvtool"):
        journal.append([(1, {})])
    assert 1 not in journal
    disk.fails_with = None
    journal.append([(1, {"text": "now"})])
    assert numbers(disk) == [0, 1]


def test_short_writes_are_finished(tmp_path: Path) -> None:
    class Short(RealFiles):
        def append(self, handle: int, data: bytes, at: int) -> int:
            return super().append(handle, data[:5], at)

    Journal.make(tmp_path / "journal")
    journal = Journal(tmp_path / "journal", COUNT, Short())
    journal.append([(2, {"text": "a longer answer"})])
    assert journal.record(2) == {"number": 2, "text": "a longer answer"}
    journal.close()


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"0" * 16 + b" {}\n", encode({"number": 1}, 0)[:-1], encode({"text": "x"}, 0)]
)
def test_what_is_no_record_is_none(line: bytes) -> None:
    assert decode(line) is None
