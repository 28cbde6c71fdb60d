"""One-sided transfers between processes and nodes: UCX, through NIXL.

The owner registers its memory once and hands out `metadata`; readers connect with it, then read and write the owner's
memory without a message to it. UCX picks the path: InfiniBand, shared memory (CMA) or TCP. The owner still has to call
`progress` from its loop, about every millisecond while transfers are expected: first contact needs it on every path,
and over TCP it is the owner's own hands that move the bytes.

What happens when a peer fails, as seen with NIXL 1.5.1 (tests/transfer/test_ucx.py repeats it):

* **killed**: `PeerDead`, in milliseconds; at once for whoever comes later.
* **hung** (SIGSTOP): over CMA its memory is still read. Over TCP nothing comes and nothing fails, so the deadline
  raises `PeerHung` and the transfer is abandoned.
* **an abandoned transfer may still write.** Releasing the handle and removing the peer both succeed and stop nothing:
  the bytes arrive when the peer goes on. So the handle is kept and polled, the slots it may write to are held, and the
  peer is not removed, until the transfer is over: done, because the peer went on, or failed, because it died. Meanwhile
  new transfers with that peer fail at once, so one hung peer costs what was in flight to it and no more. Writes are
  alike: an owner must not reuse a slot that a client may still write to before that client is known to be done or dead.

A peer that comes back is a new incarnation with its own NIXL name; nothing of the old one is reused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from threading import RLock
from typing import Any

import numpy as np

from kvtool.errors import ProtocolError, Unavailable
from kvtool.transfer import nixl
from kvtool.transfer.checksum import as_bytes
from kvtool.transfer.landing import Landing
from kvtool.transfer.peer import Peer, PeerDead, PeerHung, Posted, address_of, poll
from kvtool.transfer.staging import Staged, Staging

__all__ = ["PeerDead", "PeerHung", "UcxOwner", "UcxReader"]

_HELLO_SIZE = 8


class UcxOwner:
    """Memory that others may read and write. `view` must stay mapped until `close`. Thread-safe."""

    def __init__(self, name: str, view: memoryview) -> None:
        """
        Raises:
            Missing: NIXL is not installed.
            Refused: UCX_TLS leaves out tcp.
            ValueError: `view` is smaller than 8 bytes.
        """
        if view.nbytes < _HELLO_SIZE:
            raise ValueError(f"wanted at least {_HELLO_SIZE} bytes to share, got {view.nbytes}")
        self._lock = RLock()
        agent_name = f"{name}#{uuid.uuid4().hex[:16]}"
        self._agent: Any = nixl.make_agent(agent_name)
        self._view = view
        address = address_of(view)
        self._registered = self._agent.register_memory([(address, view.nbytes, 0, "")], "DRAM")
        self._handles = [self._agent.backends["UCX"]]
        self._metadata = nixl.pack(agent_name, address, view.nbytes, self._agent.get_agent_metadata())

    def metadata(self) -> bytes:
        """What a reader needs to connect, some 500 bytes; it holds addresses, so keep it between trusted processes."""
        return self._metadata

    def progress(self) -> None:
        """Serve what is due; 1-2 us when nothing is. Call from the rank's loop, or nobody can connect."""
        with self._lock:
            if self._agent is not None:
                self._agent.agent.getNotifs({}, self._handles)

    def close(self) -> None:
        """Deregister and leave; peers see `PeerDead`. The caller may unmap the memory afterwards. Again is a no-op."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.deregister_memory(self._registered)
                self._view = memoryview(b"")


class UcxReader:
    """Reads and writes other processes' memory. Thread-safe; a lock round the agent, not held while waiting.

    `staging_size` bytes in slots of `slot_size` (the largest block) are registered once. Deadlines are points on
    time.monotonic().
    """

    def __init__(self, name: str, staging_size: int, slot_size: int) -> None:
        """
        Raises:
            Missing: NIXL is not installed.
            Refused: UCX_TLS leaves out tcp.
            ValueError: staging has no room for one slot.
        """
        self.staging = Staging(staging_size, slot_size)
        self._agent: Any = nixl.make_agent(f"{name}#{uuid.uuid4().hex[:16]}")
        self._bind = nixl.load().nixlBind
        region = (self.staging.address, self.staging.slots * self.staging.slot_size, 0, "")
        self._registered = self._agent.register_memory([region], "DRAM")
        self._closed = False
        self._lock = RLock()
        self._peers: dict[str, Peer] = {}
        self._abandoned: list[Posted] = []
        self._leaving: dict[str, Peer] = {}  # by NIXL name: disconnected, but transfers are not over

    def connect(self, peer_id: str, metadata: bytes, deadline_s: float) -> None:
        """Make `peer_id` known by the owner's `metadata` and touch its memory once. A newer incarnation replaces.

        Raises:
            ProtocolError: not metadata of ours, or of another version of kvtool or NIXL.
            ValueError: the same owner is connected under another id.
            PeerDead, PeerHung: it did not answer by the deadline.
        """
        peer = self._introduce(peer_id, metadata)
        if peer is None:
            return
        try:
            poll(lambda: "PROC" if self.progress() and peer.abandoned and not peer.dead else "DONE", deadline_s)
            with self.staging.take([_HELLO_SIZE], deadline_s) as hello:
                self._run("READ", peer_id, peer, [(0, _HELLO_SIZE)], hello.slots, deadline_s)
        except Unavailable:
            self.disconnect(peer_id)
            raise

    def connected(self, peer_id: str) -> bool:
        """Whether transfers with `peer_id` are worth a try: known, not dead, nothing abandoned on it."""
        with self._lock:
            self._reap()
            peer = self._peers.get(peer_id)
            return peer is not None and not peer.dead and not peer.abandoned

    def read(self, peer_id: str, ranges: Sequence[tuple[int, int]], deadline_s: float) -> Staged:
        """Copy (offset, size) ranges of the peer's memory into staging; one transfer. The caller releases the result.

        Raises:
            ValueError: a range outside the peer's memory or larger than a slot.
            PeerDead, PeerHung, Unavailable: dead, not done by the deadline, or not connected.
            StagingExhausted: no free slots by the deadline.
        """
        peer = self._peer(peer_id, ranges)
        staged = self.staging.take([size for _, size in ranges], deadline_s)
        try:
            self._run("READ", peer_id, peer, ranges, staged.slots, deadline_s)
        except BaseException:
            staged.release()
            raise
        return staged

    def read_into(
        self,
        peer_id: str,
        ranges: Sequence[tuple[int, int]],
        addresses: Sequence[int],
        landings: Sequence[Landing],
        deadline_s: float,
    ) -> None:
        """Copy (offset, size) ranges of the peer's memory to `addresses`, which lie in `landings`; one transfer.

        Raises:
            ValueError, PeerDead, PeerHung, Unavailable: as `read`. After PeerHung the landings are not `free`.
        """
        peer = self._peer(peer_id, ranges)
        with self._lock:
            self._require_open()
            for landing in landings:
                landing.prepare(self._agent, self.progress)
        self._run("READ", peer_id, peer, ranges, (), deadline_s, addresses, landings)

    def write(self, peer_id: str, pieces: Sequence[tuple[int, memoryview]], deadline_s: float) -> None:
        """Copy each view to its offset in the peer's memory; one transfer, whole at the peer when this returns.

        Views of `staging.take` go as they are; others are copied into staging first. After an error any part of the
        bytes may have arrived, or may yet arrive (PeerHung).

        Raises:
            ValueError, PeerDead, PeerHung, StagingExhausted, Unavailable: as `read`.
        """
        ranges = [(offset, view.nbytes) for offset, view in pieces]
        peer = self._peer(peer_id, ranges)
        slots = [self._own_slot(view) for _, view in pieces]
        own = [slot for slot in slots if slot is not None]
        if len(own) == len(slots):
            self._run("WRITE", peer_id, peer, ranges, own, deadline_s)
            return
        with self.staging.take([size for _, size in ranges], deadline_s) as staged:
            for target, (_, view) in zip(staged, pieces, strict=True):
                np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(as_bytes(view), np.uint8))
            self._run("WRITE", peer_id, peer, ranges, staged.slots, deadline_s)

    def disconnect(self, peer_id: str) -> None:
        """Forget a peer. Again is a no-op. What was abandoned on it stays held until it is over."""
        with self._lock:
            peer = self._peers.pop(peer_id, None)
            if peer is not None:
                peer.removed = True
                self._leaving[peer.agent] = peer
                self._reap()
                self._remove_if_over(peer)

    def progress(self) -> int:
        """Look after abandoned transfers (each call of the others does too); returns how many there still are."""
        with self._lock:
            self._reap()
            return len(self._abandoned)

    def close(self) -> None:
        """Leave. Staging that a transfer may still write to stays mapped until the process ends. Again is a no-op."""
        with self._lock:
            if self._closed:
                return
            for peer_id in list(self._peers):
                self.disconnect(peer_id)
            self._closed = True
            if self._leaving:
                _kept_mapped.append(self)
            else:
                self._agent.deregister_memory(self._registered)
                self._agent = None

    def _introduce(self, peer_id: str, metadata: bytes) -> Peer | None:
        """Load the metadata; None when this very incarnation is connected already."""
        found = nixl.unpack(metadata)
        with self._lock:
            self._require_open()
            known = self._peers.get(peer_id)
            if known is not None and known.agent == found.agent and not known.dead:
                return None
            if any(peer.agent == found.agent for other, peer in self._peers.items() if other != peer_id):
                raise ValueError(f"peer {peer_id} is connected under another name already; give each owner one name")
            self.disconnect(peer_id)
            peer = self._leaving.pop(found.agent, None)
            if peer is None or peer.dead:
                peer = Peer(found.agent, found.address, found.size)
                try:
                    self._agent.add_remote_agent(found.ucx)
                except Exception as error:
                    raise ProtocolError(f"peer {peer_id}: NIXL does not take its metadata ({error})") from None
            peer.removed = False
            self._peers[peer_id] = peer
            return peer

    def _peer(self, peer_id: str, ranges: Sequence[tuple[int, int]]) -> Peer:
        with self._lock:
            self._require_open()
            peer = self._peers.get(peer_id)
        if peer is None:
            raise Unavailable(f"peer {peer_id} is not connected; connect with its metadata first")
        for offset, size in ranges:
            if offset < 0 or size <= 0 or offset + size > peer.size:
                raise ValueError(f"peer {peer_id}: wanted [{offset}, {offset + size}), its memory is [0, {peer.size})")
        return peer

    def _own_slot(self, view: memoryview) -> int | None:
        """The slot that `view` starts, when it is staging memory."""
        address = address_of(view)
        slot = self.staging.slot_of(address)
        return slot if slot is not None and address == self.staging.address + slot * self.staging.slot_size else None

    def _run(
        self,
        operation: str,
        peer_id: str,
        peer: Peer,
        ranges: Sequence[tuple[int, int]],
        slots: Sequence[int],
        deadline_s: float,
        addresses: Sequence[int] = (),
        landings: Sequence[Landing] = (),
    ) -> None:
        """Post one transfer, between the peer's `ranges` and `slots` of staging or `addresses`, and wait for it."""
        if not ranges:
            return
        base, step = self.staging.address, self.staging.slot_size
        places = addresses or [base + slot * step for slot in slots]
        local = [(address, size, 0) for address, (_, size) in zip(places, ranges, strict=True)]
        remote = [(peer.address + offset, size, 0) for offset, size in ranges]
        handle, began_s = None, time.monotonic()
        if began_s >= deadline_s:
            raise PeerHung(f"peer {peer_id}: no time was left for a {operation}; nothing was sent")
        try:
            with self._lock:
                self._require_usable(peer_id, peer)
                bind = self._bind
                handle = self._agent.initialize_xfer(
                    operation,
                    bind.nixlXferDList(bind.DRAM_SEG, local),
                    bind.nixlXferDList(bind.DRAM_SEG, remote),
                    peer.agent,
                )
                peer.running += 1
                state = self._agent.transfer(handle)
            if state == "PROC":
                state = poll(lambda: self._state(handle), deadline_s)
        except (self._bind.nixlRemoteDisconnectError, self._bind.nixlNotFoundError):
            peer.dead = True
            if handle is not None:
                self._over(peer, handle)
            raise PeerDead(
                f"peer {peer_id} died or closed its link; {len(ranges)} blocks were not "
                f"{'read' if operation == 'READ' else 'written for sure'}"
            ) from None
        except BaseException as error:
            if handle is not None:  # not known to be over: a Ctrl-C in the wait, an error of the backend
                self._abandon(peer, handle, slots, landings)
            if isinstance(error, Exception) and type(error).__name__.startswith("nixl"):
                raise Unavailable(f"peer {peer_id}: UCX {operation} failed ({error})") from None
            raise
        if state == "DONE":
            self._over(peer, handle)
            return
        self._abandon(peer, handle, slots, landings)
        raise PeerHung(
            f"peer {peer_id} did not serve a {operation} of {len(ranges)} blocks in "
            f"{time.monotonic() - began_s:.3f} s; its process or link hangs, or it does not call progress"
        )

    def _state(self, handle: Any) -> str:
        with self._lock:
            state: str = self._agent.check_xfer_state(handle)
            return state

    def _abandon(self, peer: Peer, handle: Any, slots: Sequence[int], landings: Sequence[Landing]) -> None:
        with self._lock:
            self.staging.hold(slots)
            for landing in landings:
                landing.hold()
            peer.abandoned += 1
            self._abandoned.append(Posted(peer, handle, list(slots), list(landings)))

    def _reap(self) -> None:
        """Poll what was abandoned; whatever is over gives its slots back. Under the lock."""
        still: list[Posted] = []
        for transfer in self._abandoned:
            try:
                over = self._agent.check_xfer_state(transfer.handle) != "PROC"
            except self._bind.nixlRemoteDisconnectError:
                over = transfer.peer.dead = True
            if not over:
                still.append(transfer)
                continue
            transfer.peer.abandoned -= 1
            self.staging.unhold(transfer.slots)
            for landing in transfer.landings:
                landing.unhold()
            self._over(transfer.peer, transfer.handle)
        self._abandoned = still

    def _over(self, peer: Peer, handle: Any) -> None:
        with self._lock:
            handle.release()
            peer.running -= 1
            self._remove_if_over(peer)

    def _remove_if_over(self, peer: Peer) -> None:
        if peer.removed and not peer.running and peer.agent in self._leaving:
            del self._leaving[peer.agent]
            try:
                self._agent.remove_remote_agent(peer.agent)
            except self._bind.nixlNotFoundError:
                pass  # NIXL removed it when the link broke

    def _require_open(self) -> None:
        if self._closed:
            raise Unavailable("this reader is closed")

    def _require_usable(self, peer_id: str, peer: Peer) -> None:
        self._require_open()
        self._reap()
        if peer.dead:
            raise PeerDead(f"peer {peer_id} is dead; connect with the metadata of its replacement")
        if peer.abandoned:
            raise PeerHung(
                f"peer {peer_id} has {peer.abandoned} transfers that were given up and are not over; nothing new is "
                "sent to it before it answers or dies"
            )
        if peer.removed:
            raise Unavailable(f"peer {peer_id} was disconnected")


_kept_mapped: list[UcxReader] = []
"""Closed readers whose staging a hung peer might still write to: memory lost, but never memory overwritten."""
