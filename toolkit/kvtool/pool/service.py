"""What a rank answers: each message of a client, on the rules and tiers of this rank.

A lookup that waits for promotions, or a put that waits for room, is kept here with its deadline and answered as soon
as a move ends, or cut short when its time is up. Nothing else waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvtool.errors import ProtocolError
from kvtool.kv.block import BlockKey
from kvtool.kv.copying import CopyOf, Why
from kvtool.kv.erasing import Deleting
from kvtool.kv.record import Commit, Committing, Grant, Granted, Hit, Holding, Reading, Want
from kvtool.pool import wire
from kvtool.pool.auditlog import AuditLog
from kvtool.pool.copier import OWNER, Copier
from kvtool.pool.data import Lanes
from kvtool.pool.gate import Gate
from kvtool.pool.loop import Connection
from kvtool.pool.scrub import OWNER as SCRUB_OWNER
from kvtool.pool.scrub import Scrub
from kvtool.pool.tenants import ALLOWED
from kvtool.pool.tiers import Event, Tiers
from kvtool.pool.told import ReadsTold
from kvtool.pool.wire import Cut, Message, Op

log = logging.getLogger("kvtool.pool")

WAIT_MAX_S = 30.0
SETTLE_MAX_S = 60.0
NAMES_MAX = 4096
DURABLE_WAIT_S = 1.0
"""How long a commit may wait for the disk; then it is answered as stored, and not as durable."""
_AUDITED = frozenset({Op.DELETE, Op.VERIFY, Op.DRAIN, Op.JOIN})
UCX_SETTLE_S = 2.0
"""After a UCX client left, bytes that it sent before may still be in this rank's sockets for so long."""


@dataclass(eq=False)
class _Waiting:
    connection: Connection
    request: int
    since_s: float
    until_s: float


@dataclass(eq=False)
class _WaitingRead(_Waiting):
    reading: Reading
    positions: list[int] | None = None
    """Of a gather: where its keys were in what was asked."""
    send: tuple[int, int] | None = None
    """(data connection, transfer) on which its blocks are wanted as soon as it is answered."""


@dataclass(eq=False)
class _WaitingCommit(_Waiting):
    committing: Committing | Deleting
    op: Op = Op.COMMIT


@dataclass(eq=False)
class _WaitingPut(_Waiting):
    wants: list[Want]


def _own(connection: Connection, keys: list[BlockKey]) -> list[BlockKey]:
    """The keys by which the rules know what this client named."""
    return keys if connection.tenant is None else connection.tenant.own_all(keys)


class Service:
    """`welcome` gives what a client must know of this rank; `report` adds to the answer of STATUS. `post` has a call
    run where the rules live, from any thread; without one there are no data connections."""

    def __init__(
        self,
        tiers: Tiers,
        key: bytes,
        fingerprint: str,
        layout: str,
        welcome: Callable[[], dict[str, Any]],
        report: Callable[[], dict[str, Any]],
        post: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self.tiers, self.store = tiers, tiers.store
        self.gate = Gate(key, fingerprint, layout, welcome)
        self.lanes = Lanes(self.store, tiers.memory, post, self._moved)
        self._report = report
        self._reads: list[_WaitingRead] = []
        self._puts: list[_WaitingPut] = []
        self._names: dict[int, str] = {OWNER: "this rank"}
        self._commits: list[_WaitingCommit] = []
        self.on_peer: Callable[[Connection, bytes], None] = lambda connection, introduction: None
        self.ucx_wanted_until_s = 0.0
        self.copier: Copier | None = None
        self.scrub: Scrub | None = None
        self.reads = ReadsTold()
        self.reads_of: dict[str, ReadsTold] = {}
        """By tenant; in `reads` too."""
        self.audit_log = AuditLog(None)
        self.bytes_in = self.bytes_out = 0
        """Payload that was stored here, and that readers were given leases on."""
        self.touched = 0
        """Blocks of this rank that clients found in its directory, without a message, and read."""
        self._handlers: dict[Op, Callable[[Connection, Message, float], None]] = {
            Op.LOOKUP: self._lookup,
            Op.RELEASE: self._release,
            Op.RESERVE: self._reserve,
            Op.COMMIT: self._commit,
            Op.ABORT: self._abort,
            Op.DROP: self._drop,
            Op.MATCH: self._match,
            Op.HAS: self._has,
            Op.GATHER: self._gather,
            Op.DELETE: self._delete,
            Op.CORRUPT: self._corrupt,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.FETCH: self._fetch,
            Op.TOUCH: self._touch,
            Op.COUNTED: self._counted,
            Op.STORE: self._store,
            Op.LEASE: self._lease,
            Op.STATUS: self._status,
            Op.AUDIT: self._audit,
            Op.PING: lambda connection, message, _: connection.send(Op.PING, message.request),
        }

    def serve(self, op: Op, handler: Callable[[Connection, Message, float], None]) -> None:
        """Have `handler` answer messages of that kind: what ranks and operators say about who is in the pool. Clients
        of a tenant must never get there."""
        self._handlers[op] = handler

    # Connections

    def opened(self, connection: Connection) -> None:
        self.gate.greet(connection)

    def message(self, connection: Connection, message: Message) -> None:
        """
        Raises:
            ProtocolError: nonsense; the connection is to be closed.
        """
        if not connection.admitted:
            try:
                self._hello(connection, message)
            except ProtocolError as error:
                self.audit_log.write("refused", connection.peer, why=str(error))
                raise
            return
        if connection.tenant is not None and message.op not in ALLOWED:
            connection.refuse(message.request, message.op, f"{message.op.name} is for the pool's operator alone")
            self.audit_log.write("not allowed", connection.party, op=message.op.name)
            return
        if message.op in _AUDITED:
            self.audit_log.write(message.op.name.lower(), connection.party, bytes=len(message.body))
        handler = self._handlers.get(message.op)
        if handler is None:
            raise ProtocolError(f"{message.op.name} is not for an open connection")
        now_s = time.monotonic()
        if connection.ucx:
            transfers = message.op in (Op.LOOKUP, Op.GATHER, Op.RESERVE)
            term_s = max(self.store.leases.term_s, self.store.reserve_term_s) if transfers else UCX_SETTLE_S
            self.want_ucx(now_s + term_s)
        handler(connection, message, now_s)

    def _hello(self, connection: Connection, message: Message) -> None:
        hello = self.gate.let_in(connection, message, lambda client: self.lanes.may_open(client.owner))
        if hello is None:
            return
        client = self.gate.owner_of(hello)
        if client is not None:
            seal = connection.session if hello.get("seal") else None
            self.lanes.open(connection.owner, client.owner, connection.loop.detach(connection), seal)
            return
        connection.name = str(hello.get("name", connection.name))[:200]
        self._names[connection.owner] = connection.name
        self.audit_log.write("connected", connection.party, owner=connection.owner, peer=connection.peer)
        if connection.tenant is not None:
            return
        connection.ucx = bool(hello.get("ucx"))
        connection.host = str(hello.get("host", ""))[:200]
        if connection.ucx:
            self.want_ucx(time.monotonic() + UCX_SETTLE_S)
        peer = hello.get("peer")
        if isinstance(peer, bytes):
            self.on_peer(connection, peer)

    def closed(self, connection: Connection) -> None:
        """Nothing of a client outlives it, except what it may still be writing."""
        self.gate.gone(connection)
        self.lanes.leave(connection.owner, lambda: self._gone(connection))

    def _gone(self, connection: Connection) -> None:
        now_s = time.monotonic()
        self._reads = [waiting for waiting in self._reads if waiting.connection is not connection]
        self._puts = [waiting for waiting in self._puts if waiting.connection is not connection]
        self._commits = [waiting for waiting in self._commits if waiting.connection is not connection]
        settle_s = UCX_SETTLE_S if connection.ucx else 0.0
        if connection.ucx:
            self.want_ucx(now_s + 2 * settle_s)
        self.store.owner_gone(connection.owner, now_s, settle_s)
        self._moved(now_s)
        while len(self._names) > NAMES_MAX:  # the audit may still name those who left lately
            del self._names[next(iter(self._names))]

    def want_ucx(self, until_s: float) -> None:
        """Transfers may be under way until then; one client's end is not the end of another's."""
        self.ucx_wanted_until_s = max(self.ucx_wanted_until_s, until_s)

    # Time and moves

    def event(self, event: Event) -> None:
        """A move between the tiers ended."""
        now_s = time.monotonic()
        event(now_s)
        self._moved(now_s)

    def tick(self, now_s: float) -> float | None:
        """End what is due; when to come again."""
        due_s = self.store.next_due_s()
        if due_s is not None and due_s <= now_s:
            self.store.tick(now_s)
            self._moved(now_s)
        if any(waiting.until_s <= now_s for waiting in self._waiting()):
            self._moved(now_s)
        deadlines = [waiting.until_s for waiting in self._waiting()]
        due_s = self.store.next_due_s()
        return min([*deadlines, *([] if due_s is None else [due_s])], default=None)

    def _waiting(self) -> list[_Waiting]:
        return [*self._reads, *self._puts, *self._commits]

    def _moved(self, now_s: float) -> None:
        """Something changed: carry out what the rules want, and answer who waited for it."""
        self.tiers.carry_out()
        self._answer_commits(now_s)
        for read in list(self._reads):
            if read.connection.closed or read not in self._reads:  # an answer that cannot be sent comes back here
                continue
            self.store.advance(read.reading, now_s)
            self.tiers.carry_out()
            if read.reading.done or now_s >= read.until_s:
                self._reads = [waiting for waiting in self._reads if waiting is not read]
                self._answer_read(read)
        for put in list(self._puts):
            if put.connection.closed or put not in self._puts:
                continue
            answers = self._reserved(put.connection, put.wants, now_s)
            self.tiers.carry_out()
            if now_s >= put.until_s or any(answer.grant is not Grant.WAIT for answer in answers):
                self._puts = [waiting for waiting in self._puts if waiting is not put]
                self._answer_put(put.connection, put.request, answers)

    # Messages

    def _lookup(self, connection: Connection, message: Message, now_s: float) -> None:
        self._begin_read(connection, message.request, message.body, False, None, now_s)

    def _gather(self, connection: Connection, message: Message, now_s: float) -> None:
        self._begin_read(connection, message.request, message.body, True, None, now_s)

    def _fetch(self, connection: Connection, message: Message, now_s: float) -> None:
        lane, transfer, gather, lookup = wire.unpack_fetch(message.body)
        self.lanes.check(connection.owner, lane)
        self._begin_read(connection, message.request, lookup, gather, (lane, transfer), now_s)

    def _begin_read(
        self,
        connection: Connection,
        request: int,
        lookup: wire.Body,
        gather: bool,
        send: tuple[int, int] | None,
        now_s: float,
    ) -> None:
        number, wait_s, keys = wire.unpack_lookup(lookup)
        keys = _own(connection, keys)
        positions: list[int] | None = None
        if gather:  # those in DRAM first: they should not wait for a file, nor end with a bad one
            there = [position for position, is_there in enumerate(self.store.has(keys)) if is_there]
            positions = sorted(there, key=lambda position: self.store.filed(keys[position]))
            keys = [keys[position] for position in positions]
        wait_s = min(wait_s, WAIT_MAX_S)
        if self.store.leases.has((connection.owner, number)):
            raise ProtocolError(f"read {number} is under way already; every read needs a new number")
        reading = self.store.begin_read((connection.owner, number), keys, now_s, wait_s)
        self.tiers.carry_out()
        read = _WaitingRead(connection, request, now_s, now_s + wait_s, reading, positions, send)
        if reading.done:
            self._answer_read(read)
        else:
            self._reads.append(read)

    def _answer_read(self, read: _WaitingRead) -> None:
        reading, connection, now_s = read.reading, read.connection, time.monotonic()
        late = not reading.done
        hits = self.store.finish_read(reading, now_s)
        self.bytes_out += sum(hit.length for hit in hits)
        if connection.tenant is not None:
            self.store.quotas.adopt([hit.entry for hit in hits], connection.tenant.name)
        cut = Cut.LATE if late else Cut.FULL if reading.full else Cut.ABSENT
        term_s, near = self.store.leases.term_s, self._near(connection, hits)
        op = Op.FETCH if read.send is not None else Op.LOOKUP if read.positions is None else Op.GATHER
        if read.positions is None:
            connection.send(op, read.request, wire.pack_found(term_s, cut, hits) + near)
        else:
            connection.send(op, read.request, wire.pack_gathered(term_s, cut, hits, read.positions) + near)
        if read.send is not None:
            self.lanes.send(connection.owner, *read.send, [(hit.slot, hit.length) for hit in hits], now_s)
            self.store.release(reading.lease.read, now_s)

    def _near(self, connection: Connection, hits: list[Hit]) -> bytes:
        """What the reader is told of copies on his own host."""
        if self.copier is None or not self.copier.elsewhere(connection.host):
            return b""
        blocks = [CopyOf(hit.key, hit.length) for hit in hits]
        return wire.pack_near(self.copier.read(connection.host, blocks, time.monotonic()))

    def _read(self, connection: Connection, message: Message, now_s: float) -> None:
        lane, transfer, number, slots = wire.unpack_read(message.body)
        told = self.store.leases.told((connection.owner, number))
        if all(slot in told for slot in slots):
            self.lanes.send(connection.owner, lane, transfer, [(slot, told[slot]) for slot in slots], now_s)
        else:  # the lease is over, or does not cover them
            self.lanes.hang_up(connection.owner, lane)

    def _write(self, connection: Connection, message: Message, now_s: float) -> None:
        lane, transfer, slots = wire.unpack_write(message.body)
        self.lanes.receive(connection.owner, lane, transfer, slots, now_s)

    def _release(self, connection: Connection, message: Message, now_s: float) -> None:
        for number in wire.unpack_numbers(message.body):
            self.store.release((connection.owner, number), now_s)
        self._moved(now_s)

    def _reserve(self, connection: Connection, message: Message, now_s: float) -> None:
        wait_s, wants = wire.unpack_wants(message.body)
        if connection.tenant is not None:
            wants = connection.tenant.own_wants(wants)
        answers = self._reserved(connection, wants, now_s)
        self.tiers.carry_out()
        if wait_s > 0 and answers and all(answer.grant is Grant.WAIT for answer in answers):
            until_s = now_s + min(wait_s, WAIT_MAX_S)
            self._puts.append(_WaitingPut(connection, message.request, now_s, until_s, wants))
        else:
            self._answer_put(connection, message.request, answers)

    def _reserved(self, connection: Connection, wants: list[Want], now_s: float) -> list[Granted]:
        if connection.copies_for is None:
            return self.store.reserve(connection.owner, wants, now_s)
        evict = connection.copies_for[1] is Why.PUT
        return self.store.reserve_copies(connection.owner, wants, now_s, evict)

    def _answer_put(self, connection: Connection, request: int, answers: list[Granted]) -> None:
        why = self._why_full(connection) if any(answer.grant is Grant.FULL for answer in answers) else ""
        connection.send(Op.RESERVE, request, wire.pack_grants(answers, why))

    def _why_full(self, connection: Connection) -> str:
        account = self.store.quotas.of(connection.tenant.name) if connection.tenant is not None else None
        if account is None:
            return self.store.why_full()
        if account.room(1):
            return "no slot of this rank could be freed"  # by whom they are held is not for tenants
        self.audit_log.write("quota", connection.party, why=account.why())
        return account.why()

    def _commit(self, connection: Connection, message: Message, now_s: float) -> None:
        commits = wire.unpack_commits(message.body)
        slots = self.store.dram.count
        if any(slot >= slots for slot, _, _ in commits):
            raise ProtocolError(f"commit of a slot that does not exist; this rank has {slots}")
        written = [(slot, generation) for slot, generation, _ in commits]
        if self.lanes.after(connection.owner, written, lambda: self._commit_later(connection, message)):
            return
        committing = self.store.commit_all(connection.owner, commits, now_s)
        self.bytes_in += self.store.bytes_at(written)
        self.tiers.carry_out()
        waiting = _WaitingCommit(connection, message.request, now_s, now_s + DURABLE_WAIT_S, committing)
        self._commits.append(waiting)
        self._answer_commits(now_s)
        self._moved(now_s)

    def _answer_commits(self, now_s: float) -> None:
        """Those that are on the disk, or have waited for it long enough: their blocks are stored all the same."""
        for commit in list(self._commits):
            due = commit.committing.done or now_s >= commit.until_s
            if due and commit in self._commits:  # an answer that cannot be sent ends others of that client
                self._commits.remove(commit)
                commit.connection.send(commit.op, commit.request, bytes(commit.committing.results))

    def _commit_later(self, connection: Connection, message: Message) -> None:
        """What it commits has come in, whole or not."""
        if not connection.closed:
            self._commit(connection, message, time.monotonic())

    def _abort(self, connection: Connection, message: Message, now_s: float) -> None:
        settle_s, aborts = wire.unpack_aborts(message.body)
        for slot, generation in aborts:
            if self.lanes.aborting(connection.owner, slot, generation):
                continue
            self.store.abort(connection.owner, slot, generation, now_s, min(max(0.0, settle_s), SETTLE_MAX_S))
        self._moved(now_s)

    def _drop(self, connection: Connection, message: Message, now_s: float) -> None:
        count = self.store.drop(_own(connection, wire.split_keys(message.body)), now_s)
        self._moved(now_s)
        connection.send(Op.DROP, message.request, wire.pack_count(count))

    def _match(self, connection: Connection, message: Message, now_s: float) -> None:
        keys = _own(connection, wire.split_keys(message.body))
        connection.send(Op.MATCH, message.request, wire.pack_count(self.store.match(keys)))

    def _has(self, connection: Connection, message: Message, now_s: float) -> None:
        connection.send(Op.HAS, message.request, self.store.has(_own(connection, wire.split_keys(message.body))))

    def _delete(self, connection: Connection, message: Message, now_s: float) -> None:
        deleting = self.store.delete(_own(connection, wire.split_keys(message.body)), now_s)
        self.tiers.carry_out()
        waiting = _WaitingCommit(connection, message.request, now_s, now_s + DURABLE_WAIT_S, deleting, Op.DELETE)
        self._commits.append(waiting)
        self._answer_commits(now_s)
        self._moved(now_s)

    def _corrupt(self, connection: Connection, message: Message, now_s: float) -> None:
        key, slot, generation = wire.unpack_corrupt(message.body)
        (key,) = _own(connection, [key])
        if slot < self.store.dram.count and self.store.corrupt(key, slot, generation, now_s):
            log.warning("corrupt block quarantined key=%s slot=%d reader=%r", key.hex()[:16], slot, connection.name)
        self._moved(now_s)

    def _store(self, connection: Connection, message: Message, now_s: float) -> None:
        """A commit of one block into a slot that was reserved for it; and another slot for the next."""
        what = wire.unpack_store(message.body)
        if what.slot >= self.store.dram.count:
            raise ProtocolError(f"commit of a slot that does not exist; this rank has {self.store.dram.count}")
        owner, slot, generation = connection.owner, what.slot, what.generation
        spare: Granted | None = None
        grant, commit = self.store.name(owner, slot, generation, what.want, now_s), Commit.LAPSED
        if grant is not Grant.DUPLICATE:
            commit = self.store.commit(owner, slot, generation, what.checksum, now_s)
            if what.next_key is not None:
                spare = self.store.reserve_unnamed(owner, what.next_key, now_s)
        else:
            spare = Granted(Grant.GRANTED, slot, generation)
        self.tiers.carry_out()
        connection.send(Op.STORE, message.request, wire.pack_stored(grant, commit, spare))
        self._moved(now_s)

    def _touch(self, connection: Connection, message: Message, now_s: float) -> None:
        uses = wire.unpack_touches(message.body)
        self._check_uses(uses)
        self.touched += self.store.touch(uses, now_s)

    def _lease(self, connection: Connection, message: Message, now_s: float) -> None:
        """Blocks that a client found in the directory and reads in place."""
        number, uses = wire.unpack_lease(message.body)
        self._check_uses(uses)
        if self.store.leases.has((connection.owner, number)):
            raise ProtocolError(f"read {number} is under way already; every read needs a new number")
        self.store.lease_found((connection.owner, number), uses, now_s)

    def _check_uses(self, uses: list[tuple[int, int]]) -> None:
        if any(slot >= self.store.dram.count for slot, _ in uses):
            raise ProtocolError(f"use of a slot that does not exist; this rank has {self.store.dram.count}")
        self.bytes_out += self.store.bytes_at(uses)

    def scrub_with(self, scrub: Scrub) -> None:
        """Answer those who want everything checked."""

        def verify(connection: Connection, message: Message, now_s: float) -> None:
            start = bool(wire.unpack_map(message.body).get("start"))
            body = wire.pack_map(scrub.verify(start, now_s))
            self.tiers.carry_out()
            connection.send(Op.VERIFY, message.request, body)

        self.scrub = scrub
        self._names[SCRUB_OWNER] = "this rank, scrubbing"
        self.serve(Op.VERIFY, verify)

    @property
    def busy(self) -> bool:
        """Clients wait here for room or files. Copies of other ranks do not count: two that wait for each other would
        never go on."""
        if self._reads or not self._puts:
            return bool(self._reads)
        return any(waiting.connection.copies_for is None for waiting in self._puts)

    def _counted(self, connection: Connection, message: Message, now_s: float) -> None:
        more = wire.unpack_map(message.body)
        self.reads.add(more)
        if connection.tenant is not None:
            self.reads_of.setdefault(connection.tenant.name, ReadsTold()).add(more)

    def _status(self, connection: Connection, message: Message, now_s: float) -> None:
        connection.send(Op.STATUS, message.request, wire.pack_map(self.status()))

    def status(self) -> dict[str, Any]:
        """What this rank says of itself."""
        store = self.store
        return {
            "reads": asdict(self.reads),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "held_share": store.held_share,
            "slots": store.dram.count,
            "slots_used": store.dram.used,
            "file_slots": store.files.count,
            "file_slots_used": store.files.used,
            "slot_size": store.slot_size,
            "leases": len(store.leases),
            "waiting_reads": len(self._reads),
            "waiting_puts": len(self._puts),
            "counts": asdict(store.counts),
            "bytes_moved": dict(self.tiers.bytes_moved),
            "files": self.tiers.report(),
            "eviction": store.eviction(),
            "touched": self.touched,
            "unlisted": 0 if self.tiers.directory is None else self.tiers.directory.unlisted,
            "scrub": {} if self.scrub is None else self.scrub.report(),
            **({} if self.copier is None else {"copying": self.copier.status()}),
            "tenants": store.quotas.usage(),
            "reads_of": {tenant: asdict(reads) for tenant, reads in self.reads_of.items()},
            "lanes": len(self.lanes),
            "transfers": {**self.lanes.counts, "bytes": dict(self.lanes.bytes)},
            **self._report(),
        }

    def _audit(self, connection: Connection, message: Message, now_s: float) -> None:
        held = [*self.store.audit(now_s), *self.lanes.audit(now_s)]
        held += [] if self.copier is None else self.copier.audit(now_s)
        lines = [{**asdict(line), "name": self._names.get(line.owner, "")} for line in held]
        waits: list[tuple[str, list[_Waiting]]] = [
            ("waiting read", [*self._reads]),
            ("waiting put", [*self._puts]),
            ("waiting commit", [*self._commits]),
        ]
        for kind, waiting in waits:
            if waiting:
                first = min(waiting, key=lambda item: item.since_s)
                owner = first.connection.owner
                first_held = Holding(kind, len(waiting), owner, now_s - first.since_s, first.until_s - now_s)
                lines.append({**asdict(first_held), "name": first.connection.name})
        connection.send(Op.AUDIT, message.request, wire.pack_map({"lines": lines}))
