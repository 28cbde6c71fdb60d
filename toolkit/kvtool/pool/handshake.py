"""The handshake: both sides prove that they know the same key, over every byte that was said.

    server  greeting   {nonce, identity, incarnation}
    client  HELLO      proof 32, {nonce, tenant, to, fingerprint, name, ...}
    server  HELLO      proof 32, {what a client must know of this rank}

A proof is an HMAC-SHA256 under the key, over a label for its direction and the transcript: the protocol's version and
the messages so far, byte for byte and length-prefixed. So whatever a message says (both nonces, the rank's identity and
incarnation, the tenant, the layout's fingerprint) is bound by it; neither side's proof is of use as the other's, in
another connection, or at another rank. The key never travels.

Further keys come out of the same transcript, other ones for every connection: one for each direction, which `Seal`
authenticates frames with where somebody on the way could put in his own (TCP; see `pool.secure`), and one that lets the
same client open data connections (`pool.data`) without showing its key again.

Who does not know the key learns the rank's name and its answer to nonsense: a sentence.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from kvtool.errors import ProtocolError, Refused
from kvtool.pool.wire import HEAD, VERSION, Body, Message, Op, Splitter, Status, frame, pack_map, unpack_map

NONCE_SIZE = PROOF_SIZE = 32
MAC_SIZE = 16
HELLO_MAX_S = 5.0
"""The whole of a handshake, however it is dripped."""
HELLO_SIZE_MAX = 8192
ANSWER_SIZE_MAX = 2**20
_CLIENT, _SERVER, _UP, _DOWN, _DATA = b"client", b"server", b"up", b"down", b"data"
_LENGTH, _COUNT = struct.Struct("<Q"), struct.Struct("<Q")


def _derive(key: bytes, label: bytes, *parts: bytes) -> bytes:
    """32 bytes that only somebody with `key` can make for this purpose and these parts."""
    h = hmac.new(key, b"kvtool pool %d %b\0" % (VERSION, label), "sha256")
    for part in parts:
        h.update(_LENGTH.pack(len(part)))
        h.update(part)
    return h.digest()


class Seal:
    """Authenticates the frames of one direction of a connection, each with its place in the order: none can be put in,
    left out, changed or sent again. The two ends count on their own."""

    size = MAC_SIZE

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def mac(self, data: Body) -> bytes:
        """Of the next frame."""
        h = blake3(_COUNT.pack(self._count), key=self._key)
        h.update(data)
        self._count += 1
        return h.digest(length=MAC_SIZE)

    def unsent(self) -> None:
        """The frame of the last `mac` did not go out at all."""
        self._count -= 1

    def check(self, data: Body, mac: Body) -> None:
        """
        Raises:
            ProtocolError: not the frame that the peer sent next.
        """
        if not hmac.compare_digest(self.mac(data), bytes(mac)):
            raise ProtocolError("a message was changed on its way, or put in by somebody else")


@dataclass(frozen=True)
class Session:
    """What both sides of a connection share once they have shaken hands. Never written anywhere."""

    up: bytes
    """Key of the frames from client to server."""
    down: bytes
    data: bytes
    """Proves that a data connection is the same client's."""


def _session(key: bytes, greeting: bytes, hello: bytes) -> Session:
    return Session(*(_derive(key, label, greeting, hello) for label in (_UP, _DOWN, _DATA)))


class Door:
    """The server's half, for one connection: `greeting` goes out, `read` takes HELLO, `check` its proof."""

    def __init__(self, identity: str, incarnation: int = 1) -> None:
        said = {"nonce": secrets.token_bytes(NONCE_SIZE), "identity": identity, "incarnation": incarnation}
        self.greeting = pack_map(said)
        self._proof = self._hello = b""

    def read(self, body: Body) -> dict[str, Any]:
        """What the client says of itself, none of it proven yet.

        Raises:
            ProtocolError: no HELLO, or one too long.
        """
        if not PROOF_SIZE < len(body) <= HELLO_SIZE_MAX:
            raise ProtocolError(f"HELLO: wanted {PROOF_SIZE + 1} to {HELLO_SIZE_MAX} bytes, found {len(body)}")
        self._proof, self._hello = bytes(body[:PROOF_SIZE]), bytes(body[PROOF_SIZE:])
        hello = unpack_map(self._hello)
        nonce = hello.get("nonce")
        if not isinstance(nonce, bytes) or len(nonce) != NONCE_SIZE:
            raise ProtocolError(f"HELLO: wanted a nonce of {NONCE_SIZE} bytes, found none")
        return hello

    def proves(self, key: bytes) -> bool:
        """Whether whoever sent HELLO knows `key`."""
        return hmac.compare_digest(self._proof, _derive(key, _CLIENT, self.greeting, self._hello))

    def answer(self, key: bytes, welcome: dict[str, Any]) -> tuple[bytes, Session]:
        """The server's own proof with what it says, and what both share from here on."""
        said = pack_map(welcome)
        proof = _derive(key, _SERVER, self.greeting, self._hello, said)
        return proof + said, _session(key, self.greeting, self._hello)


class Knock:
    """The client's half, for one connection: `hello` answers the greeting, `welcomed` takes the server's proof.

    `claims`: what the client says of itself. `to`: whom it means to talk to, and in which incarnation; None: whoever
    answers there.
    """

    def __init__(self, key: bytes, claims: dict[str, Any], to: str | None = None, incarnation: int | None = None):
        self._key, self._claims, self._to, self._incarnation = key, claims, to, incarnation
        self._greeting = self._hello = b""

    def hello(self, greeting: Body) -> bytes:
        """
        Raises:
            ProtocolError: no greeting, or that of somebody else.
        """
        said = unpack_map(greeting)
        if not isinstance(said.get("nonce"), bytes) or len(said["nonce"]) != NONCE_SIZE:
            raise ProtocolError(f"wanted a greeting with a nonce of {NONCE_SIZE} bytes, found none")
        for name, wanted in (("identity", self._to), ("incarnation", self._incarnation)):
            if wanted is not None and said.get(name) != wanted:
                raise ProtocolError(f"wanted to reach {self._to}, {name} {wanted}, found {said.get(name)!r} there")
        self._greeting = bytes(greeting)
        claims = {**self._claims, "nonce": secrets.token_bytes(NONCE_SIZE)}
        if self._to is not None:
            claims["to"] = self._to
        if self._incarnation is not None:
            claims["incarnation"] = self._incarnation
        self._hello = pack_map(claims)
        return _derive(self._key, _CLIENT, self._greeting, self._hello) + self._hello

    def welcomed(self, answer: Body) -> tuple[dict[str, Any], Session]:
        """
        Raises:
            ProtocolError: the server does not know the key.
        """
        proof, said = bytes(answer[:PROOF_SIZE]), bytes(answer[PROOF_SIZE:])
        if not hmac.compare_digest(proof, _derive(self._key, _SERVER, self._greeting, self._hello, said)):
            raise ProtocolError("what answers there does not know the pool's key: it is not a rank of this pool")
        return unpack_map(said), _session(self._key, self._greeting, self._hello)


def shake(sock: socket.socket, knock: Knock, deadline_s: float) -> tuple[dict[str, Any], Session, int]:
    """The client's half on a connected socket, in blocking mode: (what the server says, session, the pool's epoch).

    Not a byte more is read than belongs to the handshake. Leaves the socket with a timeout.

    Raises:
        TimeoutError: not through by `deadline_s`.
        Refused: the server's own sentence. ConnectionError: it hung up.
        ProtocolError: it is not a rank of this pool, or not the one that was meant.
    """
    greeting = _message(sock, deadline_s)
    if greeting.status is not Status.OK:
        raise Refused(greeting.body.decode(errors="replace"))
    sock.sendall(frame(Op.HELLO, 1, 0, knock.hello(greeting.body)))
    answer = _message(sock, deadline_s)
    if answer.status is not Status.OK:
        raise Refused(answer.body.decode(errors="replace"))
    welcome, session = knock.welcomed(answer.body)
    return welcome, session, answer.epoch


def _message(sock: socket.socket, deadline_s: float) -> Message:
    splitter = Splitter(ANSWER_SIZE_MAX)
    head = _exactly(sock, HEAD.size, deadline_s)
    messages = splitter.feed(head)
    if not messages:
        messages = splitter.feed(_exactly(sock, HEAD.unpack(head)[0], deadline_s))
    if messages[0].op is not Op.HELLO:
        raise ProtocolError(f"wanted the handshake, found {messages[0].op.name}")
    return messages[0]


def _exactly(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("it closed the connection during the handshake")
        data += more
        if time.monotonic() >= deadline_s:
            raise TimeoutError("the handshake took too long")
    return data
