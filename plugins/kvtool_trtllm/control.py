"""How the scheduler has its workers stage blocks before it claims their tokens.

TensorRT-LLM carries metadata from rank 0 to the workers once an iteration and nothing back, and a version without a
failure channel cannot be told that a load failed. So the scheduler asks first: STAGE, and each worker copies its part
of the blocks from the pool into its own memory, checks it, and answers how many leading blocks it holds. What every
rank holds can be claimed; after that nothing of the pool can fail any more.

The scheduler listens, workers connect: a Unix socket, or TCP with a key that both sides prove to know
(multiprocessing.connection's HMAC). Messages are msgpack maps, never pickles. Every wait is bounded; a worker that is
late, hung or gone counts as one that holds nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any, Protocol

import msgpack

from kvtool.errors import EngineRefused, KvtoolError, ProtocolError
from kvtool.kv.block import KEY_SIZE, BlockKey

log = logging.getLogger(__name__)

CONNECT_S = 120.0
"""Ranks of one engine start at their own pace."""
MESSAGE_SIZE_MAX = 64 << 20
_POLL_S, _LOOK_S = 0.05, 0.2
_MEET_S = 10.0
_BLOCK_S = 0.25
"""Longest that one write to a worker, or the rest of an answer, is waited for: one that is stopped reads nothing, and
what is sent to it fills the socket."""
_LIVE_MAX = 4096
_UNIX_KEY = b"kvtool connector control: the socket's permissions are the secret"


class Stager(Protocol):
    """A worker's side: memory for blocks that were copied from the pool and checked."""

    def stage(self, load_id: int, keys: Sequence[BlockKey], budget_s: float) -> int:
        """Copy and check the leading blocks of `keys`; how many are held under `load_id`, 0 to all."""
        ...

    def keep(self, load_id: int, blocks: int) -> None:
        """Give back what lies behind the first `blocks`; all of it when 0. Again, or after a load has taken its blocks,
        is a no-op."""
        ...

    def only(self, load_ids: Sequence[int]) -> None:
        """Give back every load but these: the scheduler's word after a time in which it could not be heard."""
        ...


def address_of(control: str | None, key_file: str | None) -> tuple[Any, bytes]:
    """What to listen on or connect to, and the key.

    Raises:
        EngineRefused: TCP without a key file, or a key that others can read.
    """
    if control is None:
        return f"{tempfile.gettempdir()}/kvtool-connector-{os.getuid()}-{os.getpid()}.sock", _UNIX_KEY
    if not control.startswith("tcp://"):
        return control, _UNIX_KEY
    host, _, port = control.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdigit():
        raise EngineRefused(f"control: wanted tcp://HOST:PORT or a socket's path, found {control!r}")
    if key_file is None:
        raise EngineRefused(f"control {control}: TCP needs key_file, a file of mode 0600 that every rank can read")
    path = Path(key_file)
    try:
        mode, key = path.stat().st_mode, path.read_bytes().strip()
    except OSError as error:
        raise EngineRefused(f"key_file {path}: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077 or len(key) < 16:
        raise EngineRefused(f"key_file {path}: wanted mode 0600 and 16 bytes or more, found {stat.S_IMODE(mode):04o}")
    return (host, int(port)), key


class Control:
    """The scheduler's end, for an engine of `world` ranks. `hello`: what every worker must say of itself."""

    def __init__(self, address: Any, key: bytes, world: int, hello: dict[str, Any]) -> None:
        self._world, self._hello, self._key = world, hello, key
        self._workers: dict[int, Connection[Any, Any]] = {}
        self._refusal: EngineRefused | None = None
        self._live: OrderedDict[int, None] = OrderedDict()
        """Loads that were staged and not given back since, the newest of them; a worker that comes again is told."""
        self._lock, self._all_there = threading.Lock(), threading.Event()
        self._closed = False
        self._path = Path(address) if isinstance(address, str) else None
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._listener = Listener(address)
        except OSError as error:
            raise EngineRefused(f"control {address}: cannot listen there: {error.strerror}; choose another") from None
        finally:
            os.umask(before)
        self._thread = threading.Thread(target=self._accept, name="kvtool-control", daemon=True)
        self._thread.start()

    def wait_for_workers(self, timeout_s: float = CONNECT_S) -> None:
        """
        Raises:
            EngineRefused: a worker does not fit, or not all came.
        """
        there = self._all_there.wait(timeout_s)
        if self._refusal is not None:
            raise self._refusal
        if not there:
            raise EngineRefused(
                f"{len(self._workers)} of {self._world} workers came to the scheduler within {timeout_s:g} s"
            )

    @property
    def ready(self) -> bool:
        """Whether every worker is there. Raises EngineRefused: one that does not fit."""
        if self._refusal is not None:
            raise self._refusal
        return self._all_there.is_set()

    def stage(self, load_id: int, keys: Sequence[BlockKey], budget_s: float) -> int:
        """How many leading blocks every rank holds now under `load_id`. Takes `budget_s` at most; what some hold beyond
        that is given back."""
        if not self.ready or not keys:
            return 0
        until_s = time.monotonic() + budget_s
        with self._lock:
            self._live[load_id] = None
            while len(self._live) > _LIVE_MAX:
                self._live.popitem(last=False)
        message = {"op": "stage", "load": load_id, "keys": b"".join(keys), "budget_s": budget_s}
        asked = [rank for rank in range(self._world) if self._send(rank, message)]
        held = self._answers(load_id, asked, until_s) if len(asked) == self._world else {}
        blocks = min(held.values()) if len(held) == self._world else 0
        if len(held) < self._world or any(found != blocks for found in held.values()):
            self.keep(load_id, blocks)
        return blocks

    def keep(self, load_id: int, blocks: int) -> None:
        if not blocks:
            with self._lock:
                self._live.pop(load_id, None)
        for rank in range(self._world):
            self._send(rank, {"op": "keep", "load": load_id, "blocks": blocks})

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            Client(self._listener.address).close()  # a close from another thread does not wake an accept
        self._thread.join(5)
        self._listener.close()
        with self._lock:
            for connection in self._workers.values():
                connection.close()
            self._workers.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _send(self, rank: int, message: dict[str, Any]) -> bool:
        with self._lock:
            connection = self._workers.get(rank)
        if connection is None:
            return False
        try:
            connection.send_bytes(msgpack.packb(message))
            return True
        except (OSError, ValueError) as error:
            self._lost(rank, error)
            return False

    def _answers(self, load_id: int, asked: list[int], until_s: float) -> dict[int, int]:
        held: dict[int, int] = {}
        with self._lock:
            open_ = {self._workers[rank]: rank for rank in asked if rank in self._workers}
        while len(held) < len(asked) and (left_s := until_s - time.monotonic()) > 0:
            for ready in wait([c for c, rank in open_.items() if rank not in held], left_s):
                rank = open_[ready]  # type: ignore[index]
                try:
                    answer = unpacked(ready.recv_bytes(MESSAGE_SIZE_MAX))  # type: ignore[union-attr]
                    if answer.get("load") == load_id:  # else one that came too late for its own question
                        held[rank] = int(answer["blocks"])
                except (OSError, EOFError, ProtocolError, KeyError, ValueError) as error:
                    self._lost(rank, error)
                    return {}
        return held

    def _lost(self, rank: int, error: BaseException) -> None:
        log.warning("worker lost rank=%d error=%r", rank, error)
        with self._lock:
            connection = self._workers.pop(rank, None)
            self._all_there.clear()
        if connection is not None:
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError as error:
                log.warning("nobody accepted error=%r", error)
                time.sleep(_POLL_S)
                continue
            threading.Thread(target=self._meet, args=(connection,), name="kvtool-meet", daemon=True).start()

    def _meet(self, connection: Connection[Any, Any]) -> None:
        """In a thread of its own, so that one who says nothing keeps nobody waiting; cut off after a while."""
        cut = threading.Timer(_MEET_S, lambda: shut(connection))
        cut.daemon = True
        cut.start()
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            self._welcome(connection, unpacked(connection.recv_bytes(1 << 16)))
        except Exception as error:  # a stranger, or one who went away
            if not self._closed:
                log.warning("no worker error=%r", error)
            connection.close()
        finally:
            cut.cancel()

    def _welcome(self, connection: Connection[Any, Any], hello: dict[str, Any]) -> None:
        rank = hello.pop("rank", None)
        wrong = {name: (hello.get(name), wanted) for name, wanted in self._hello.items() if hello.get(name) != wanted}
        if wrong or not isinstance(rank, int) or not 0 <= rank < self._world:
            said = "; ".join(f"{name}: found {found!r}, wanted {wanted!r}" for name, (found, wanted) in wrong.items())
            self._refusal = EngineRefused(f"the connector's worker of rank {rank} does not fit its scheduler: {said}")
            connection.send_bytes(msgpack.packb({"refused": str(self._refusal)}))
            connection.close()
            self._all_there.set()
            return
        bound(connection, _BLOCK_S)
        with self._lock:
            live = list(self._live)
        connection.send_bytes(msgpack.packb({"live": live}))
        with self._lock:
            self._workers[rank] = connection
            if len(self._workers) == self._world:
                self._all_there.set()


class ControlWorker:
    """A worker's end: connects in a thread of its own, and does there what the scheduler asks."""

    def __init__(self, address: Any, key: bytes, hello: dict[str, Any], stager: Stager) -> None:
        self._address, self._key, self._hello, self._stager = address, key, hello, stager
        self._closed = False
        self.refusal: EngineRefused | None = None
        self._thread = threading.Thread(target=self._run, name="kvtool-stage", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join(5)

    def _run(self) -> None:
        until_s = time.monotonic() + CONNECT_S
        while not self._closed and self.refusal is None:
            try:
                with Client(self._address, authkey=self._key) as connection:
                    until_s = time.monotonic() + CONNECT_S
                    self._serve(connection)
            except Exception as error:  # the scheduler is not there yet, or not any more
                if self._stopped():
                    return
                if time.monotonic() >= until_s:
                    log.error("no scheduler address=%s error=%r", self._address, error)
                    return
                time.sleep(_POLL_S)

    def _stopped(self) -> bool:
        return self._closed

    def _serve(self, connection: Connection[Any, Any]) -> None:
        connection.send_bytes(msgpack.packb(self._hello))
        answer = unpacked(connection.recv_bytes(1 << 16))
        if "refused" in answer:
            self.refusal = EngineRefused(str(answer["refused"]))
            log.error("%s", self.refusal)
            return
        self._stager.only([int(load_id) for load_id in answer.get("live", ())])
        while not self._closed:
            if not connection.poll(_LOOK_S):
                continue  # a close from another thread does not wake a read
            message = unpacked(connection.recv_bytes(MESSAGE_SIZE_MAX))
            if message.get("op") == "keep":
                self._stager.keep(int(message["load"]), int(message["blocks"]))
            elif message.get("op") == "stage":
                load_id, raw = int(message["load"]), bytes(message["keys"])
                keys = [raw[at : at + KEY_SIZE] for at in range(0, len(raw), KEY_SIZE)]
                blocks = self._staged(load_id, keys, float(message["budget_s"]))
                connection.send_bytes(msgpack.packb({"load": load_id, "blocks": blocks}))
            else:
                raise ProtocolError(f"control: unknown message {message!r:.80}")

    def _staged(self, load_id: int, keys: list[BlockKey], budget_s: float) -> int:
        try:
            return self._stager.stage(load_id, keys, budget_s)
        except KvtoolError as error:
            log.warning("nothing staged load=%d error=%s", load_id, error)
        except Exception:
            log.exception("staging failed load=%d", load_id)
        self._stager.keep(load_id, 0)
        return 0


def shut(connection: Connection[Any, Any]) -> None:
    """End it for whoever reads from it too; `close` alone does not wake a read."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.shutdown(socket.SHUT_RDWR)


def bound(connection: Connection[Any, Any], seconds: float) -> None:
    """Have reads and writes that get no further raise BlockingIOError after `seconds`."""
    span = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        for side in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            own.setsockopt(socket.SOL_SOCKET, side, span)


def unpacked(raw: bytes) -> dict[str, Any]:
    """Raises ProtocolError: no map."""
    try:
        found = msgpack.unpackb(raw)
    except Exception as error:  # msgpack raises many kinds
        raise ProtocolError(f"control: no message ({error})") from None
    if not isinstance(found, dict):
        raise ProtocolError(f"control: wanted a map, found {found!r:.60}")
    return found
