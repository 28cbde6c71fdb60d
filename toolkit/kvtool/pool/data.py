"""Data connections: blocks by socket, for clients that cannot map a rank's memory, or may not.

A client asks on its ordinary connection and the bytes move on another one, a *lane*, one transfer after the other.
The loop decides and validates, a thread of the lane moves bytes straight between slots and socket: one system call for
a whole batch, without the interpreter's lock. So nobody else waits for a slow client.

**Nothing under a transfer is reused.** What is being sent is pinned until the send is over, whatever becomes of the
lease (a slow send keeps its slot out of use; it ends when it makes no progress, or is slower than any network in use).
What is being received stays reserved or quarantined: a commit of it waits for the last byte, and so do an abort and the
end of the client itself.

    on a lane, either way: number of the transfer u64, bytes in all u64; then the blocks, one after the other

Between hosts each block is followed by 16 bytes that only the two ends can make (keyed BLAKE3 over the transfer, the
block's place in it and its bytes): nobody on the way can change a block, put one in or show an old one. He can read it.

`Lanes` runs on the loop. Of a `Lane`, `_serve` and what it calls run in its thread.
"""

from __future__ import annotations

import hmac
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from blake3 import blake3

from kvtool.errors import ProtocolError
from kvtool.kv.record import Holding
from kvtool.kv.store import Store
from kvtool.pool.handshake import Session
from kvtool.pool.memory import SlotMemory

log = logging.getLogger("kvtool.pool")

PREFACE = struct.Struct("<QQ")
TAG_SIZE = 16
_PLACE = struct.Struct("<I")
LANES_MAX, CLIENT_LANES_MAX = 256, 8
TRANSFERS_MAX = 4
"""Begun on a lane and not over as far as the loop knows: a client has the last byte before the loop hears of it."""
STALL_S = 5.0
"""A transfer that moves nothing for so long is given up."""
RATE_MIN = 4 * 2**20
"""Bytes a second below which a transfer is given up, after `STALL_S`."""
DIRECT_MAX = 2**20
"""A transfer of so little is begun by the loop itself, as far as the socket takes it without waiting: a thread would
not be awake yet."""
LOOPBACK_SEND, LOOPBACK_RECEIVE = 128 * 1024, 256 * 1024
"""Socket buffers between two processes of one host. 64 blocks of 1 MiB with their checksums, beside a plain socket with
the system's own sizes (which grow to 4 MiB and more, and out of the caches): 1.25x, with them 0.87x."""
_PIECES_MAX = 512
"""Of one system call; Linux takes 1024."""


class Tag:
    """Of one block of a transfer, made while its bytes are at hand. `key`: of the direction."""

    def __init__(self, key: bytes, preface: bytes, at: int) -> None:
        self._hash = blake3(preface + _PLACE.pack(at), key=key)

    def add(self, data: memoryview) -> None:
        self._hash.update(data)

    def value(self) -> memoryview:
        return memoryview(bytearray(self._hash.digest(length=TAG_SIZE)))


def tag_of(key: bytes, preface: bytes, at: int, block: memoryview) -> memoryview:
    tag = Tag(key, preface, at)
    tag.add(block)
    return tag.value()


def tune(sock: socket.socket) -> None:
    """For bulk between two processes; before connecting, or when accepted. A real network needs its own sizes."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_SEND)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_RECEIVE)


def bound(sock: socket.socket, stall_s: float) -> None:
    """Blocking calls on `sock` give up after `stall_s` without progress."""
    sock.setblocking(True)
    wait = struct.pack("@ll", int(stall_s), int(stall_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)


def move(
    call: Callable[[list[memoryview]], int], pieces: Sequence[memoryview], until_s: float, now_s: Callable[[], float]
) -> None:
    """Have `call` send or receive all of `pieces`, in order.

    Raises:
        TimeoutError: no progress, or too slow. ConnectionError: the peer is gone.
    """
    left = [piece for piece in pieces if len(piece)][::-1]
    while left:
        try:
            moved = call(left[: -_PIECES_MAX - 1 : -1])
        except (BlockingIOError, InterruptedError):
            raise TimeoutError("no progress") from None
        if moved == 0:
            raise ConnectionResetError("the peer is gone")
        while left and moved >= len(left[-1]):
            moved -= len(left.pop())
        if moved:
            left[-1] = left[-1][moved:]
        if left and now_s() >= until_s:
            raise TimeoutError("too slow")


def send_all(sock: socket.socket, pieces: Sequence[memoryview], until_s: float) -> None:
    move(lambda some: sock.sendmsg(some), pieces, until_s, time.monotonic)


def receive_all(sock: socket.socket, pieces: Sequence[memoryview], until_s: float) -> None:
    move(lambda some: sock.recvmsg_into(some, 0, socket.MSG_WAITALL)[0], pieces, until_s, time.monotonic)


@dataclass(eq=False)
class Transfer:
    """Blocks on their way by one lane. `slots`: (slot, generation), received ones under a reservation."""

    number: int
    sending: bool
    views: list[memoryview]
    slots: list[tuple[int, int]]
    since_s: float
    rest: list[memoryview] | None = None
    """What is still to be sent, when a part is on its way already."""
    aborted: list[tuple[int, int]] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    """What waits for its end."""

    @property
    def size(self) -> int:
        return sum(map(len, self.views))

    @property
    def allowed_s(self) -> float:
        return STALL_S + self.size / RATE_MIN


class Lane:
    """One data connection of the client `owner`."""

    def __init__(
        self,
        number: int,
        owner: int,
        sock: socket.socket,
        ended: Callable[[Lane, Transfer, bool], None],
        seal: Session | None = None,
    ) -> None:
        """`seal`: blocks carry tags under its keys."""
        self.number, self.owner = number, owner
        self.transfers: list[Transfer] = []
        self.closed = False
        self._sock, self._ended, self._seal = sock, ended, seal
        self._work: SimpleQueue[Transfer | None] = SimpleQueue()
        bound(sock, STALL_S)
        if sock.family != socket.AF_UNIX and sock.getpeername()[0] == sock.getsockname()[0]:
            tune(sock)
        threading.Thread(target=self._serve, name=f"kvtool-lane-{number}", daemon=True).start()

    def start(self, transfer: Transfer) -> None:
        self.transfers.append(transfer)
        self._work.put(transfer)

    def begin(self, transfer: Transfer) -> bool:
        """Send what the socket takes now; whether that is all."""
        assert not self.transfers
        pieces = [memoryview(PREFACE.pack(transfer.number, transfer.size)), *transfer.views]
        if len(pieces) > _PIECES_MAX or transfer.size > DIRECT_MAX or self._seal is not None:
            return False
        try:
            sent = self._sock.sendmsg(pieces, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        while pieces and sent >= len(pieces[0]):
            sent -= len(pieces.pop(0))
        transfer.rest = [pieces[0][sent:], *pieces[1:]] if pieces else []
        return not pieces

    def left(self) -> bool:
        """Whether the client has hung up."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def hang_up(self) -> None:
        """A transfer that is under way ends at once, and is reported."""
        if not self.closed:
            self.closed = True
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            self._work.put(None)

    def _serve(self) -> None:
        broken = False
        while (transfer := self._work.get()) is not None:
            try:
                if broken:
                    raise ConnectionResetError("the transfer before it broke")
                self._move(transfer)
                whole = True
            except (OSError, ProtocolError) as error:
                log.info("transfer broken off lane=%d owner=%d why=%r", self.number, self.owner, str(error))
                whole, broken = False, True
            self._ended(self, transfer, whole)
        self._sock.close()

    def _move(self, transfer: Transfer) -> None:
        until_s = time.monotonic() + transfer.allowed_s
        preface = PREFACE.pack(transfer.number, transfer.size)
        if self._seal is not None:
            self._move_sealed(transfer, self._seal, preface, until_s)
        elif transfer.sending:
            pieces = transfer.rest if transfer.rest is not None else [memoryview(preface), *transfer.views]
            send_all(self._sock, pieces, until_s)
        else:
            self._expect(preface, until_s)
            receive_all(self._sock, transfer.views, until_s)

    def _expect(self, preface: bytes, until_s: float) -> None:
        found = memoryview(bytearray(PREFACE.size))
        receive_all(self._sock, [found], until_s)
        if found != preface:
            raise ProtocolError("the client sends something else than it announced")

    def _move_sealed(self, transfer: Transfer, seal: Session, preface: bytes, until_s: float) -> None:
        if not transfer.sending:
            self._expect(preface, until_s)
            for at, view in enumerate(transfer.views):
                tag = memoryview(bytearray(TAG_SIZE))
                receive_all(self._sock, [view, tag], until_s)
                if not hmac.compare_digest(tag, tag_of(seal.up, preface, at, view)):
                    raise ProtocolError("a block was changed on its way")
            return
        head = [memoryview(preface)]
        for at, view in enumerate(transfer.views):
            send_all(self._sock, [*head, view, tag_of(seal.down, preface, at, view)], until_s)
            head = []


class Lanes:
    """Data connections of one rank. `post` has a call run on the loop (None: there are no such connections here);
    `moved` is called there when slots came free."""

    def __init__(
        self,
        store: Store,
        memory: SlotMemory,
        post: Callable[[Callable[[], None]], None] | None,
        moved: Callable[[float], None],
    ) -> None:
        self._store, self._memory, self._post, self._moved = store, memory, post, moved
        self._lanes: dict[int, Lane] = {}
        self._leaving: dict[int, Callable[[], None]] = {}
        self.counts = {"sent": 0, "received": 0, "broken": 0}
        self.bytes = {"sent": 0, "received": 0}

    def __len__(self) -> int:
        return len(self._lanes)

    def _of(self, owner: int) -> list[Lane]:
        return [lane for lane in self._lanes.values() if lane.owner == owner]

    def may_open(self, owner: int) -> str:
        """Why the client may not have another lane; empty when it may."""
        if self._post is None:
            return "this rank has no data connections"
        for lane in self._of(owner):
            if not lane.transfers and lane.left():
                self._close(lane)
        if len(self._of(owner)) >= CLIENT_LANES_MAX:
            return f"a client may have {CLIENT_LANES_MAX} data connections, this one has them all"
        if len(self._lanes) >= LANES_MAX:
            return f"this rank serves {LANES_MAX} data connections already; try again later"
        return ""

    def open(self, number: int, owner: int, sock: socket.socket, seal: Session | None) -> None:
        self._lanes[number] = Lane(number, owner, sock, self._report, seal)

    def _free(self, owner: int, number: int) -> Lane:
        lane = self._lanes.get(number)
        if lane is None or lane.owner != owner:
            raise ProtocolError(f"data connection {number} is not this client's")
        if len(lane.transfers) >= TRANSFERS_MAX:
            raise ProtocolError(f"data connection {number} has {TRANSFERS_MAX} transfers to do already")
        return lane

    def check(self, owner: int, number: int) -> None:
        """
        Raises:
            ProtocolError: not a lane that this client may use.
        """
        self._free(owner, number)

    def send(self, owner: int, number: int, transfer: int, slots: Sequence[tuple[int, int]], now_s: float) -> None:
        """Send what is in `slots` (slot, length), which the client may see: they are pinned from here on."""
        lane = self._lanes.get(number)
        if lane is not None and not lane.closed and slots:
            views = [self._memory.slot(*slot) for slot in slots]
            self._send(lane, Transfer(transfer, True, views, [(slot, 0) for slot, _ in slots], now_s))

    def hang_up(self, owner: int, number: int) -> None:
        """The client asked for what it may not have."""
        self._close(self._free(owner, number))

    def _send(self, lane: Lane, transfer: Transfer) -> None:
        try:
            if not lane.transfers and lane.begin(transfer):
                self._count(transfer, True)
                return
        except OSError:
            self._close(lane)
            return
        self._store.pin([slot for slot, _ in transfer.slots])
        lane.start(transfer)

    def _count(self, transfer: Transfer, whole: bool) -> None:
        way = "sent" if transfer.sending else "received"
        self.counts[way if whole else "broken"] += 1
        self.bytes[way] += transfer.size if whole else 0

    def receive(self, owner: int, number: int, transfer: int, slots: Sequence[tuple[int, int]], now_s: float) -> None:
        """Receive into `slots` (slot, generation) which the client has reserved; else it loses the lane."""
        lane = self._free(owner, number)
        lengths = [self._store.reserved(owner, *slot, now_s) for slot in slots]
        busy = self._receiving(owner, slots) is not None
        if None in lengths or busy or lane.closed or len(set(slots)) < len(slots):
            self._close(lane)
            return
        views = [self._memory.slot(slot, length or 0) for (slot, _), length in zip(slots, lengths, strict=True)]
        lane.start(Transfer(transfer, False, views, list(slots), now_s))

    # What must wait for a transfer

    def _receiving(self, owner: int, slots: Sequence[tuple[int, int]]) -> Transfer | None:
        wanted = set(slots)
        for lane in self._of(owner):
            for transfer in lane.transfers:
                if not transfer.sending and wanted.intersection(transfer.slots):
                    return transfer
        return None

    def after(self, owner: int, slots: Sequence[tuple[int, int]], then: Callable[[], None]) -> bool:
        """Whether some of `slots` are being received; if so, `then` is called when that is over."""
        transfer = self._receiving(owner, slots) if self._lanes else None
        if transfer is not None:
            transfer.then.append(then)
        return transfer is not None

    def aborting(self, owner: int, slot: int, generation: int) -> bool:
        """Whether an abort of this slot waits for the end of its transfer, which it then is part of."""
        transfer = self._receiving(owner, [(slot, generation)]) if self._lanes else None
        if transfer is not None:
            transfer.aborted.append((slot, generation))
        return transfer is not None

    def leave(self, owner: int, then: Callable[[], None]) -> None:
        """The client is gone: hang up, and call `then` when no byte moves for it any more."""
        self._leaving[owner] = then
        for lane in self._of(owner):
            self._close(lane)
        self._left(owner)

    def _left(self, owner: int) -> None:
        if owner in self._leaving and not self._of(owner):
            self._leaving.pop(owner)()

    def _close(self, lane: Lane) -> None:
        lane.hang_up()
        if not lane.transfers:
            self._lanes.pop(lane.number, None)

    # In the lane's thread, and back on the loop

    def _report(self, lane: Lane, transfer: Transfer, whole: bool) -> None:
        assert self._post is not None
        self._post(lambda: self._over(lane, transfer, whole))

    def _over(self, lane: Lane, transfer: Transfer, whole: bool) -> None:
        now_s = time.monotonic()
        lane.transfers.remove(transfer)
        if transfer.sending:
            self._store.unpin([slot for slot, _ in transfer.slots])
        for slot, generation in transfer.aborted if whole or transfer.sending else transfer.slots:
            self._store.abort(lane.owner, slot, generation, now_s)
        self._count(transfer, whole)
        transfer.views.clear()
        if not whole or lane.closed:
            self._close(lane)
        for then in transfer.then:
            then()
        self._moved(now_s)
        self._left(lane.owner)

    def audit(self, now_s: float) -> list[Holding]:
        """Transfers under way, a line for each kind."""
        found = []
        for kind, sending in (("send", True), ("receive", False)):
            held = [(t, lane.owner) for lane in self._lanes.values() for t in lane.transfers if t.sending is sending]
            if held:
                first, owner = min(held, key=lambda item: item[0].since_s)
                left_s = first.since_s + first.allowed_s + STALL_S - now_s
                found.append(Holding(kind, len(held), owner, now_s - first.since_s, left_s))
        return found
