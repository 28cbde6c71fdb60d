"""A rank's block file: where it is, what keeps it apart from others', how it is opened, and how it ends.

FILE_DIR/NAME-RANK.blocks     of pool NAME; outlives the pool, and is found by the next rank of that name and number
RUN_DIR/files.json            which files belong to the pool of this run directory, for a purge and a check offline
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from kvtool.errors import KvtoolError, SpecRefused
from kvtool.kv.block import BlockKey
from kvtool.kv.layout import KVLayout
from kvtool.kv.store import Store
from kvtool.pool.state import write_private

if TYPE_CHECKING:
    from kvtool.pool.config import RankConfig
    from kvtool.transfer.files import BlockFile, Sealer
    from kvtool.transfer.remote import ObjectStore

log = logging.getLogger("kvtool.pool")

NOTE = "files.json"
WRITE = ("back", "through")
LOCK_WAIT_S = 5.0
FLUSH_AHEAD = 32
SYNC_S = 2.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def check_name(name: str) -> None:
    """
    Raises:
        SpecRefused: it cannot be part of a file's name.
    """
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise SpecRefused(f"pool.name: wanted 1 to 64 letters, digits, dots, dashes or underscores, found {name!r}")


def file_path(file_dir: Path, name: str, rank: int) -> Path:
    return file_dir / f"{name}-{rank}.blocks"


def open_file(config: RankConfig, rank: int, layout: KVLayout, slots: int) -> BlockFile:
    """This rank's file, with what an earlier process of this rank left in it.

    Raises:
        Refused: as `BlockFile`; among others, it holds blocks of another layout or under another key.
    """
    from kvtool.transfer.disk import FileDisk
    from kvtool.transfer.files import BlockFile

    sealer = sealer_for(config.file_key)
    path = file_path(Path(config.file_dir), config.name, rank)
    disk = FileDisk(path, lock_wait_s=LOCK_WAIT_S)
    return BlockFile(
        None, layout.block_size, slots, disk=disk, fingerprint=layout.fingerprint, layout=str(layout), sealer=sealer
    )


def sealer_for(file_key: Path | str | None) -> Sealer | None:
    """What encrypts with the key in `file_key`; None without one.

    Raises:
        Refused: no key is there, or others may read it.
        Missing: `cryptography` is not installed.
    """
    if not file_key:
        return None
    from kvtool.transfer.crypt import FileSealer, read_key

    return FileSealer(read_key(Path(file_key)))


def store_for(remote: str, fingerprint: str, name: str, rank: int) -> ObjectStore | None:
    """The store below this rank's file; None without one.

    Raises:
        Refused: no such directory, or a URL that cannot be used.
        Missing: what it needs is not installed.
    """
    if not remote:
        return None
    from kvtool.transfer.remote import open_store

    place = blake3(f"{name}/{rank}".encode()).hexdigest()[:32]  # apart from other pools and ranks
    return open_store(remote, f"{fingerprint}/{place}")


def note_files(run_dir: Path, name: str, file_dir: Path, layout: dict[str, Any]) -> None:
    """Write down which files the pool of this run directory has."""
    write_private(run_dir / NOTE, json.dumps({"name": name, "file_dir": str(file_dir), "layout": layout}))


def read_note(run_dir: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((run_dir / NOTE).read_text())
    except (OSError, ValueError):
        return None
    return found


def files_of(run_dir: Path) -> list[Path]:
    """Block files of the pool that is or was in this run directory, by rank."""
    note = read_note(run_dir)
    if note is None:
        return []
    mine = re.compile(re.escape(note["name"]) + r"-(\d+)\.blocks")
    found = [
        (int(match[1]), path)
        for path in Path(note["file_dir"]).glob("*.blocks")
        if (match := mine.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def purge(run_dir: Path) -> list[Path]:
    """Remove the block files of the pool that was here; which."""
    found = files_of(run_dir)
    for path in found:
        path.unlink(missing_ok=True)
    (run_dir / NOTE).unlink(missing_ok=True)
    return found


class Flush:
    """At the end of a rank: what only its DRAM holds goes to its file, the most recently used first."""

    def __init__(self, store: Store) -> None:
        self._store, self._left = store, deque(store.unfiled() if store.files.count else ())
        self.wanted = len(self._left)

    def step(self, now_s: float) -> bool:
        """Begin what may begin now; True when nothing is left. To be called until then, after each move too."""
        store = self._store
        while self._left and store.filing + store.demoting < FLUSH_AHEAD:
            key: BlockKey = self._left[0]
            if not store.file(key, now_s):
                break
            self._left.popleft()
        return not self._left and not store.filing + store.demoting


def close_file(file: BlockFile) -> None:
    """Make durable what was written, as far as the disk answers in time, and close."""
    try:
        file.sync().result(SYNC_S)
    except (KvtoolError, FutureTimeout) as error:
        log.warning("block file not synced why=%r", str(error) or "the disk does not answer")
    file.close()
