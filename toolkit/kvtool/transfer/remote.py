"""Stores below the file tier: a directory on a shared file system, or an object store.

Both hold whole records (header page, payload) under names that follow from layout, rank and block key. A name appears
with the whole record or not at all: a directory gets a draft that is renamed, an object store one PUT. Readers check
header, key and checksum as everywhere, so that a store may lose, mix up or damage what it likes.

Object stores are reached through obstore (S3, Google Cloud Storage, Azure, all configured by their usual environment
variables): pip install 'kvtool[remote]'.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, cast

from kvtool.errors import Missing, Refused, Unavailable
from kvtool.kv.block import KEY_SIZE, BlockKey

CONNECT_S, REQUEST_S = 2, 10
_DRAFT = ".draft-"


class ObjectStore(Protocol):
    """Blocks by key. Calls may come from several threads; each raises Unavailable when the store fails."""

    @property
    def name(self) -> str: ...

    def put(self, key: BlockKey, record: bytes) -> None: ...

    def get(self, key: BlockKey) -> bytes:
        """
        Raises:
            FileNotFoundError: the store has no such object.
        """
        ...

    def delete(self, key: BlockKey) -> None:
        """None there is fine."""
        ...

    def list(self) -> Iterator[tuple[BlockKey, int]]:
        """(key, bytes) of all that is there."""
        ...


def open_store(url: str, place: str) -> ObjectStore:
    """The store at `url`, or its part `place`: "LAYOUT/RANK".

    Raises:
        Refused: no such directory, or a scheme that is not known.
        Missing: obstore is not installed.
    """
    scheme, colon, rest = url.partition("://")
    if not colon or scheme == "file":
        return DirectoryStore(Path(rest if colon else url), place)
    return CloudStore(url, place)


def _name(key: BlockKey) -> str:
    return f"{key[:1].hex()}/{key.hex()}"


def _key(name: str) -> BlockKey | None:
    """The key of an object's name; None for anything else that lies there."""
    try:
        key = bytes.fromhex(name.rpartition("/")[2])
    except ValueError:
        return None
    return key if len(key) == KEY_SIZE else None


class DirectoryStore:
    """Files in a directory. Not synced: what a crash takes is found damaged, or not at all, and is a miss."""

    def __init__(self, root: Path, place: str) -> None:
        self._root = root / place
        self.name = str(root)
        if not root.is_dir():
            raise Refused(f"pool.remote: wanted a directory at {root}, found none; make it, or mount it")
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(f"pool.remote: wanted to write to {root}, found: {error.strerror}") from None

    def put(self, key: BlockKey, record: bytes) -> None:
        path = self._root / _name(key)
        draft = path.parent / f"{_DRAFT}{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(record)
                draft.replace(path)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from error

    def get(self, key: BlockKey) -> bytes:
        try:
            return (self._root / _name(key)).read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unavailable(f"{self._root / _name(key)}: {error.strerror}") from error

    def delete(self, key: BlockKey) -> None:
        try:
            (self._root / _name(key)).unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(f"{self._root / _name(key)}: {error.strerror}") from error

    def list(self) -> Iterator[tuple[BlockKey, int]]:
        """Oldest first. Drafts that a crash left are removed."""
        found: list[tuple[int, BlockKey, int]] = []
        try:
            for path in self._root.glob("??/*"):
                key = _key(path.name)
                with contextlib.suppress(FileNotFoundError):
                    if key is not None:
                        stat = path.stat()
                        found.append((stat.st_mtime_ns, key, stat.st_size))
                    elif path.name.startswith(_DRAFT):
                        path.unlink()
        except OSError as error:
            raise Unavailable(f"{self._root}: {error.strerror}") from error
        for _, key, size in sorted(found):
            yield key, size


class CloudStore:
    """An object store, by obstore. Every request has a time limit, and is tried again twice."""

    def __init__(self, url: str, place: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise Missing("pool.remote needs the package obstore; install it: pip install 'kvtool[remote]'") from None
        self.name, self._obstore, open_url = url, obstore, cast(Any, from_url)
        limits: dict[str, Any] = {"timeout": f"{REQUEST_S}s", "connect_timeout": f"{CONNECT_S}s"}
        if url.startswith("http://") or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
            limits["allow_http"] = True
        try:
            self._store: Any = open_url(
                url, client_options=limits, retry_config={"max_retries": 2, "retry_timeout": _span(REQUEST_S)}
            )
        except Exception as error:  # of obstore: an unknown scheme, wrong settings
            raise Refused(f"pool.remote: cannot use {url}: {str(error).splitlines()[0]}") from None
        self._place = place

    def put(self, key: BlockKey, record: bytes) -> None:
        with _failing(self.name):
            self._obstore.put(self._store, f"{self._place}/{_name(key)}", record)

    def get(self, key: BlockKey) -> bytes:
        with _failing(self.name):
            return bytes(self._obstore.get(self._store, f"{self._place}/{_name(key)}").bytes())

    def delete(self, key: BlockKey) -> None:
        with _failing(self.name), contextlib.suppress(FileNotFoundError):
            self._obstore.delete(self._store, f"{self._place}/{_name(key)}")

    def list(self) -> Iterator[tuple[BlockKey, int]]:
        with _failing(self.name):
            objects = [found for chunk in self._obstore.list(self._store, self._place) for found in chunk]
        for found in sorted(objects, key=lambda found: found["last_modified"]):
            key = _key(found["path"])
            if key is not None:
                yield key, int(found["size"])


def _span(seconds: int) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


@contextlib.contextmanager
def _failing(name: str) -> Iterator[None]:
    """Whatever obstore raises but "not found" is a store that does not answer."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:
        raise Unavailable(f"{name}: {str(error).splitlines()[0][:200]}") from error
