"""A rank (`Store`, `Tiers`, `BlockFile`) in one thread, on a disk in memory that remembers what it was told."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from random import Random

from kvtool.kv.record import Commit, Grant, Want
from kvtool.kv.store import Store
from kvtool.pool.memory import SlotMemory
from kvtool.pool.tiers import Tiers
from kvtool.transfer.checksum import checksum
from kvtool.transfer.filehead import PAGE
from kvtool.transfer.files import BlockFile

SIZE, SLOTS, FILE_SLOTS = PAGE + 100, 4, 6
KEYS = [bytes([n + 1]) * 32 for n in range(16)]


def payload(key: bytes) -> bytes:
    return Random(key).randbytes(SIZE)


class AtOnce(Executor):
    """Runs everything where it is handed in."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@dataclass
class Remembering:
    """A disk in memory. `log`: (first byte, bytes) of each write, None for a sync."""

    image: bytearray = field(default_factory=bytearray)
    log: list[tuple[int, bytes] | None] = field(default_factory=list)
    name = "remembering disk"

    def size(self) -> int:
        return len(self.image)

    def allocate(self, size: int) -> None:
        self.image[size:] = b""
        self.image.extend(bytes(size - len(self.image)))

    def preadv(self, views, at: int) -> int:
        moved = 0
        for view in views:
            part = self.image[at + moved : at + moved + view.nbytes]
            view[: len(part)] = part
            moved += len(part)
        return moved

    def pwritev(self, views, at: int) -> int:
        raw = b"".join(views)
        self.log.append((at, raw))
        self.image[at : at + len(raw)] = raw
        return len(raw)

    def sync(self) -> None:
        self.log.append(None)

    def direct(self, on: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def remove(self) -> None:
        pass


class Rank:
    def __init__(self, disk: Remembering, through: bool, sealer=None) -> None:
        self.disk, self.now_s = disk, 0.0
        about = {"fingerprint": "f", "layout": "l", "sealer": sealer}
        self.file = BlockFile(None, SIZE, FILE_SLOTS, disk=disk, executor=AtOnce(), **about)
        self.store = Store(SLOTS, SIZE, FILE_SLOTS, through=through)
        self.memory = SlotMemory(memoryview(bytearray(SlotMemory.size(SLOTS, SIZE))), SLOTS, SIZE)
        self.events: list = []
        self.tiers = Tiers(self.store, self.memory, self.file, self.events.append)
        self.tiers.recover(0.0)

    def settle(self) -> None:
        self.tiers.carry_out()
        while self.events:
            self.events.pop(0)(self.now_s)
            self.tiers.carry_out()

    def begin(self, key: bytes) -> Commit | None:
        """A put that is not waited for until it is durable."""
        return self.put(key, None, wait=False)

    def put(self, key: bytes, parent: bytes | None, wait: bool = True) -> Commit | None:
        for _ in range(4):
            (answer,) = self.store.reserve(1, [Want(key, SIZE, parent)], self.now_s)
            self.settle()
            if answer.grant is Grant.GRANTED:
                room = self.memory.slot(answer.slot, SIZE)
                room[:] = payload(key)
                commit = (answer.slot, answer.generation, checksum(room, key))
                committing = self.store.commit_all(1, [commit], self.now_s)
                self.settle()
                assert committing.done or not wait
                return committing.results[0]
            if answer.grant is not Grant.WAIT:
                return None
        return None

    def get(self, number: int, key: bytes) -> bytes | None:
        reading = self.store.begin_read((1, number), [key], self.now_s, 1.0)
        self.settle()
        for _ in range(4):
            self.store.advance(reading, self.now_s)
            self.settle()
        hits = self.store.finish_read(reading, self.now_s)
        found = bytes(self.memory.slot(hits[0].slot, SIZE)) if hits else None
        self.store.release((1, number), self.now_s)
        self.settle()
        return found

    def durable(self) -> set[bytes]:
        return {entry.key for entry in self.store._index.values() if entry.durable}
