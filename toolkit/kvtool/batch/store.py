"""The index of a job: which requests there are, where each lies in the file, and in which order they run.

A SQLite file, since a job may have more requests than memory has room for, and sorting paths on disk is what a database
does well. It is made by intake, never changed afterwards, and can be made again from the input.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtool.batch.order import Leaf, Plan, placed
from kvtool.errors import Refused, Unavailable

_TABLES = """
CREATE TABLE requests (number INTEGER PRIMARY KEY, custom_id TEXT NOT NULL UNIQUE, line INTEGER NOT NULL,
    at INTEGER NOT NULL, size INTEGER NOT NULL, mark INTEGER NOT NULL, chat INTEGER NOT NULL,
    tokens_in INTEGER NOT NULL, tokens_out INTEGER NOT NULL, path BLOB NOT NULL,
    tree INTEGER, shared INTEGER, place INTEGER);
CREATE TABLE trees (tree INTEGER PRIMARY KEY, longest INTEGER NOT NULL, tokens INTEGER NOT NULL);
"""
_BATCH = 256
_CACHE_SIZE = 32 << 20
"""Bytes of the index in memory while it is made."""


@dataclass(frozen=True)
class Entry:
    """One request. `number`: its place in the input, from 0. `at`, `size`: its line's bytes in the file, `mark`: by
    which they are known again (`intake.mark_of`)."""

    number: int
    custom_id: str
    line: int
    at: int
    size: int
    mark: int
    chat: bool
    tokens_in: int
    tokens_out: int
    path: bytes


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    @classmethod
    def make(cls, path: Path) -> Store:
        """
        Raises:
            Unavailable: the disk is full.
        """
        path.unlink(missing_ok=True)
        store = cls(path)
        folder = str(path.parent.absolute()).replace("'", "''")
        try:
            store._db.executescript(f"""
                PRAGMA journal_mode=OFF;  -- a half-made index is thrown away, not mended
                PRAGMA synchronous=OFF;   -- whoever makes a job syncs it
                PRAGMA secure_delete=OFF;
                PRAGMA cache_size=-{_CACHE_SIZE >> 10};
                PRAGMA temp_store=FILE;
                PRAGMA temp_store_directory='{folder}';  -- /tmp may be memory, or small
                {_TABLES}
                BEGIN;
            """)
        except sqlite3.OperationalError as error:
            store.close()
            raise store._full(error) from None
        return store

    def add(self, entry: Entry) -> int | None:
        """None: taken in. Else the line of the request that has this custom_id already."""
        values = (entry.number, entry.custom_id, entry.line, entry.at, entry.size, entry.mark, entry.chat)
        try:
            self._db.execute(
                "INSERT INTO requests (number, custom_id, line, at, size, mark, chat, tokens_in, tokens_out, path) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, entry.tokens_in, entry.tokens_out, entry.path),
            )
        except sqlite3.IntegrityError:
            row = self._db.execute("SELECT line FROM requests WHERE custom_id = ?", (entry.custom_id,)).fetchone()
            return int(row[0])
        except sqlite3.OperationalError as error:
            raise self._full(error) from None
        return None

    def arrange(self, block_tokens: int, pool_blocks: int, in_order: bool = True) -> Plan:
        """Give every request its place, and say what that comes to. `in_order` False: as they came, for comparison."""
        plan, writer = Plan(), self._db.cursor()
        try:
            self._db.execute("CREATE TABLE sorted (number INTEGER PRIMARY KEY, rank INTEGER, tree INTEGER, shared INT)")
            order = "path, tokens_out DESC, number" if in_order else "number"
            reader = self._db.cursor()
            reader.execute(f"SELECT number, path, tokens_in, tokens_out FROM requests ORDER BY {order}")
            leaves = (Leaf(*row) for row in _rows(reader))
            for rank, one in enumerate(placed(leaves)):
                plan.add(one, block_tokens, pool_blocks)
                writer.execute("INSERT INTO sorted VALUES (?, ?, ?, ?)", (one.leaf.number, rank, one.tree, one.shared))
            longest = "t.longest DESC, t.tokens DESC, t.tree," if in_order else ""
            self._db.executescript(f"""
                INSERT INTO trees SELECT s.tree, max(r.tokens_out), sum(r.tokens_in + r.tokens_out)
                    FROM sorted s JOIN requests r USING (number) GROUP BY s.tree;
                CREATE TABLE places AS SELECT s.number AS number, s.tree AS tree, s.shared AS shared,
                    row_number() OVER (ORDER BY {longest} s.rank) - 1 AS place
                    FROM sorted s JOIN trees t ON t.tree = s.tree;
                UPDATE requests SET tree = p.tree, shared = p.shared, place = p.place
                    FROM places p WHERE p.number = requests.number;
                DROP TABLE sorted; DROP TABLE places;
                CREATE UNIQUE INDEX by_place ON requests (place);
            """)
            self._db.execute("COMMIT") if self._db.in_transaction else None
        except sqlite3.OperationalError as error:
            raise self._full(error) from None
        return plan

    def __len__(self) -> int:
        return int(self._asked("SELECT count(*) FROM requests")[0][0])

    def longest_tokens(self) -> int:
        """Prompt and answer of the request that takes most."""
        return int(self._asked("SELECT max(tokens_in + tokens_out) FROM requests")[0][0] or 0)

    def by_place(self, start: int = 0) -> Iterator[Entry]:
        """In the order in which they run. Reads ahead a little; nothing is kept."""
        while found := self._page("place", start):
            yield from found
            start += len(found)

    def by_number(self) -> Iterator[Entry]:
        """As they came."""
        start = 0
        while found := self._page("number", start):
            yield from found
            start = found[-1].number + 1

    def _page(self, column: str, start: int) -> list[Entry]:
        rows = self._asked(
            "SELECT number, custom_id, line, at, size, mark, chat, tokens_in, tokens_out, path FROM requests "
            f"WHERE {column} >= ? ORDER BY {column} LIMIT {_BATCH}",
            start,
        )
        return [Entry(*row) for row in rows]

    def _asked(self, question: str, *values: int) -> list[tuple[Any, ...]]:
        """
        Raises:
            Refused: the file is no index, or a damaged one.
        """
        try:
            return self._db.execute(question, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise Refused(
                f"{self.path}: the job's index cannot be read ({error}); restore the file, or submit the job again "
                "with another --output"
            ) from None

    def close(self) -> None:
        self._db.close()

    def _full(self, error: sqlite3.OperationalError) -> Unavailable:
        return Unavailable(f"{self.path}: {error}; make room on that disk, then submit the job again")


def _rows(cursor: sqlite3.Cursor) -> Iterator[tuple[int, bytes, int, int]]:
    while found := cursor.fetchmany(_BATCH):
        yield from found
