"""One rank of the pool: `python -m kvtool.pool.rank --config FILE`, started under mpiexec.

MPI is used to exchange where everybody is, once, and to hear of deaths; data and requests never travel by it. The rank
owns one shared-memory segment and one file, serves local clients on a Unix socket and others on TCP, and runs one
event loop until SIGTERM. Whatever it made it removes, and `kvtool pool down` removes what a killed one could not.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.errors import KvtoolError, Refused
from kvtool.kv.copying import CopyLimits
from kvtool.kv.layout import KVLayout
from kvtool.kv.replicate import Replicator
from kvtool.kv.store import Store
from kvtool.pool.auditlog import AuditLog
from kvtool.pool.config import RankConfig
from kvtool.pool.copier import Copier
from kvtool.pool.directory import Directory, segment_size, slots_under
from kvtool.pool.embedded import file_slots_in
from kvtool.pool.filetier import Flush, close_file, open_file, store_for
from kvtool.pool.loop import Connection, Loop
from kvtool.pool.meeting import Joining, Meeting, MpiMeeting
from kvtool.pool.membership import Membership
from kvtool.pool.memory import SlotMemory
from kvtool.pool.metrics import text
from kvtool.pool.mover import Mover
from kvtool.pool.names import CONFIG, LOG
from kvtool.pool.scrape import Scrape
from kvtool.pool.scrub import Scrub
from kvtool.pool.service import Service
from kvtool.pool.state import PoolState, RankState, started_at
from kvtool.pool.tenants import read_tenants
from kvtool.pool.tiers import Event, Tiers
from kvtool.pool.wire import Message, Op
from kvtool.transfer.segment import Segment, unlink_prefix

if TYPE_CHECKING:
    from kvtool.transfer.files import BlockFile
    from kvtool.transfer.remote import ObjectStore
    from kvtool.transfer.ucx import UcxOwner

log = logging.getLogger("kvtool.pool")

TICK_S = 0.2
SWEEP_S = 1.0
UCX_PROGRESS_S = 0.001


class Rank:
    """All parts of one rank, wired up."""

    def __init__(self, config: RankConfig, meeting: Meeting) -> None:
        self.config, self._meeting = config, meeting
        self.rank, self.incarnation = meeting.rank, meeting.incarnation
        self._lock = _only_one(Path(config.run_dir) / f"{config.prefix}-{self.rank}.lock", self.rank)
        self.layout = KVLayout(**config.layout)
        size = self.layout.block_size
        file_slots = file_slots_in(config.file_size, size)
        slots = slots_under(config.dram_size, size, file_slots)
        name = f"{config.prefix}-{self.rank}.{self.incarnation}"
        unlink_prefix(f"{config.prefix}-{self.rank}.")  # a killed predecessor's
        self.segment = Segment.create(name, segment_size(slots, size, file_slots))
        self._swept_s = self._flush_until_s = 0.0
        self._flush: Flush | None = None
        self._store_below: ObjectStore | None = None
        self.copier: Copier | None = None
        self.scrape: Scrape | None = None
        self.ucx: UcxOwner | None = None
        self.files: BlockFile | None = None
        self._unix = Path(config.run_dir) / f"{config.prefix}-{self.rank}.sock"
        try:
            if file_slots:
                self.files = open_file(config, self.rank, self.layout, file_slots)
                self._store_below = store_for(config.remote, self.layout.fingerprint, config.name, self.rank)
            if config.ucx:
                from kvtool.transfer.ucx import UcxOwner

                self.ucx = UcxOwner(name, self.segment.view)
            through = config.write == "through"
            store = Store(slots, size, file_slots, config.lease_term_s, config.reserve_term_s, through, config.evict)
            memory = SlotMemory(self.segment.view, slots, size)
            region = self.segment.view[SlotMemory.size(slots, size) :]
            directory = Directory(region, slots + file_slots, self.incarnation, ask=through)
            self.tiers = Tiers(store, memory, self.files, self._post, directory)
            self._recover()
            self._serve()
        except BaseException:
            self.clean_up()
            raise

    def _recover(self) -> None:
        began_s = time.monotonic()
        blocks = self.tiers.recover(began_s)
        if blocks:
            log.info("blocks recovered rank=%d blocks=%d seconds=%.3f", self.rank, blocks, time.monotonic() - began_s)

    def _serve(self) -> None:
        key = bytes.fromhex(self.config.key)
        self.loop = Loop(lambda: self.members.epoch, self._opened, self._message, self._closed, self._pass)
        self.loop.listen_unix(self._unix)
        host, port = self.loop.listen_tcp(self.config.host)
        if self.config.metrics:
            self.scrape = Scrape(self.loop, "127.0.0.1", lambda: text([self.service.status()]), time.monotonic)
        mine = self._state(host, port)
        ranks = self._meeting.meet(mine)
        state = PoolState(
            0,
            self.config.key,
            self.config.prefix,
            self.config.layout,
            self.layout.block_size,
            self.config.lease_term_s,
            ranks,
            self.config.base,
            max([self.config.copies, *self.config.namespaces.values()]),
            self.config.namespaces,
        )
        self.members = Membership(
            self.rank, state, Path(self.config.state_file), self._meeting.watch, lost_s=self.config.lost_s
        )
        self.members.on_retire = lambda why: self._stop(0, None)
        self.service = Service(
            self.tiers, key, self.layout.fingerprint, str(self.layout), self._welcome, self._report, self.loop.post
        )
        self.service.on_peer = self.members.admit
        self._admit_tenants(key)
        for op, handler in (
            (Op.VIEW, self.members.view), (Op.JOIN, self.members.join), (Op.DRAIN, self.members.drain),
        ):  # fmt: skip
            self.service.serve(op, handler)
        self.scrub = Scrub(self.tiers, self._post, self.config.scrub_rate)
        self.service.scrub_with(self.scrub)
        self._copy(state)

    def _admit_tenants(self, key: bytes) -> None:
        config = self.config
        self.service.audit_log = AuditLog(Path(config.run_dir) / f"audit-{self.rank}.jsonl")
        if config.tenants:
            ranks = len(self.members.state.ranks)
            tenants = read_tenants(Path(config.tenants), key, config.name, ranks, self.layout.block_size)
            self.service.gate.tenants = tenants
            self.members.publish_for(list(tenants.values()))
            self.tiers.store.quotas.set({tenant.name: tenant.quota for tenant in tenants.values()})

    def _copy(self, state: PoolState) -> None:
        """Replication to the other ranks, and away from this one."""
        limits = CopyLimits(rate=self.config.copy_rate)
        rules = Replicator(self.rank, self.tiers.store, limits, self.config.copies)
        mover = Mover(self.rank, self.layout, self.tiers.memory, self.files)
        self.copier = Copier(rules, self.tiers, mover, self._post, self._sender)
        self.service.copier = self.copier
        self.service.serve(Op.COPYING, self.copier.announced)
        self._copied_epoch = -1

    def _sender(self, owner: int) -> int | None:
        connection = self.loop.connections.get(owner)
        return connection.copies_for[0] if connection is not None and connection.copies_for is not None else None

    def _state(self, host: str, port: int) -> RankState:
        store, metadata = self.tiers.store, self.ucx.metadata() if self.ucx is not None else b""
        return RankState(
            rank=self.rank,
            identity=f"{self.config.name}/{self.rank}",
            host=socket.gethostname(),
            unix=str(self._unix),
            tcp=(host, port),
            segment=self.segment.name,
            segment_size=self.segment.size,
            slots=store.dram.count,
            file_slots=store.files.count,
            pid=os.getpid(),
            started=started_at(os.getpid()) or 0,
            ucx_name=self.segment.name if metadata else "",
            ucx_metadata=metadata.hex(),
            metrics="" if self.scrape is None else self.scrape.address,
            incarnation=self.incarnation,
            status="joining" if self._meeting.alone and not store.files.used else "live",
        )

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        self.members.publish()
        self.members.connect(self.loop, bytes.fromhex(self.config.key), self.layout.fingerprint)
        log.info("rank serves rank=%d slots=%d file_slots=%d pid=%d", self.rank, *self._rooms(), os.getpid())
        if self._store_below is not None:
            self.tiers.open_below(self._store_below, self.config.remote_size)
        self.loop.run()
        log.info("rank stops rank=%d", self.rank)

    def _rooms(self) -> tuple[int, int]:
        return self.tiers.store.dram.count, self.tiers.store.files.count

    def clean_up(self) -> None:
        """Remove everything that this rank made, but its block file. Again is a no-op."""
        if self.copier is not None:
            self.copier.close()
        if self.files is not None:
            below = self.tiers.below if hasattr(self, "tiers") else None
            if below is not None:
                below.close()
            close_file(self.files)
            self.files = None
        self._unix.unlink(missing_ok=True)
        self.segment.unlink()

    def _stop(self, number: int, frame: object) -> None:
        self.members.leaving = True
        self.loop.post(self._begin_flush)

    def _begin_flush(self) -> None:
        if self._flush is None:
            self._flush, self._flush_until_s = Flush(self.tiers.store), time.monotonic() + self.config.flush_s

    def _leave(self, flush: Flush, now_s: float) -> float:
        """Write to the file what only memory holds, then end; when to come again."""
        done = flush.step(now_s)
        self.tiers.carry_out()
        if done or now_s >= self._flush_until_s:
            log.info("memory written to files rank=%d blocks=%d whole=%s", self.rank, flush.wanted, done)
            self.loop.running = False
        return now_s + TICK_S

    def _post(self, event: Event) -> None:
        self.loop.post(lambda: self.service.event(event))

    def _opened(self, connection: Connection) -> None:
        self.service.opened(connection)

    def _message(self, connection: Connection, message: Message) -> None:
        if not self.members.answered(connection, message):
            self.service.message(connection, message)

    def _closed(self, connection: Connection) -> None:
        self.members.closed(connection)
        self.service.closed(connection)

    def _pass(self, now_s: float) -> float:
        if self.tiers.directory is not None:
            self.tiers.directory.beat(now_s, self.members.epoch)
        due_s = self.members.tick(now_s)
        copier = self.copier
        assert copier is not None
        if self.members.epoch != self._copied_epoch:
            self._copied_epoch = self.members.epoch
            copier.view(self.members.state, now_s)
        busy = self.service.busy
        for part_due_s in (self.service.tick(now_s), copier.tick(now_s, busy), self.scrub.tick(now_s, busy)):
            due_s = due_s if part_due_s is None else min(due_s, part_due_s)
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            if self.scrape is not None:
                self.scrape.tick(now_s)
            self.members.filled(self.tiers.store.dram.used / self.tiers.store.dram.count, now_s)
            if not Path(self.config.run_dir, CONFIG).exists():  # nobody can find or stop this pool any more
                log.warning("rank stops, its pool is gone from its run directory rank=%d", self.rank)
                self._stop(0, None)
        if self._flush is not None:
            due_s = min(due_s, self._leave(self._flush, now_s))
        sleep_s = min(TICK_S, due_s - now_s)
        if self.ucx is not None and now_s < self.service.ucx_wanted_until_s:
            self.ucx.progress()
            sleep_s = min(sleep_s, UCX_PROGRESS_S)
        return sleep_s

    def _welcome(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "identity": f"{self.config.name}/{self.rank}",
            "incarnation": self.members.rules.mine.standing.incarnation,
            "lease_term_s": self.config.lease_term_s,
        }

    def _report(self) -> dict[str, Any]:
        now_s = time.monotonic()
        return {
            "rank": self.rank,
            "identity": self.members.mine.identity,
            "block_tokens": self.layout.block_tokens,
            "epoch": self.members.epoch,
            "incarnation": self.members.mine.incarnation,
            "status": self.members.mine.status,
            "weight": self.members.mine.weight,
            "pid": os.getpid(),
            "clients": sum(
                c.admitted and c.peer_rank is None and c.copies_for is None for c in self.loop.connections.values()
            ),
            "dead": [rank.rank for rank in self.members.state.ranks if not rank.alive],
            "hung": self.members.hung(now_s),
            "linked": self.members.linked,
            "slowest_pass_s": self.loop.slowest_pass_s,
            "cpu_s": time.process_time(),
            "ucx": self.ucx is not None,
        }


def _only_one(path: Path, rank: int) -> int:
    """Nobody else is this rank while this process lives; the kernel ends that with it.

    Raises:
        Refused: another process is.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Refused(f"rank {rank} runs already: another process holds {path}") from None
    return fd


def _log_to(config: RankConfig) -> None:
    """Into the pool's log itself: mpiexec, which would pass our words on, may die before us."""
    logging.basicConfig(
        level=config.log_level,
        filename=Path(config.run_dir) / LOG,
        format="%(asctime)s %(levelname)s %(name)s %(process)d %(message)s",
    )


def _by_mpi() -> MpiMeeting:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiMeeting(world)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtool.pool.rank", description="One rank of a KV pool.")
    parser.add_argument("--config", type=Path, required=True, help="rank configuration, as written by kvtool pool up")
    parser.add_argument("--join", type=int, metavar="RANK", help="join the running pool as this rank, without MPI")
    given = parser.parse_args(arguments)
    try:
        config = RankConfig(**json.loads(given.config.read_text()))
    except (TypeError, ValueError) as error:
        print(
            f"rank {given.join}: {given.config} is not what this kvtool writes ({error}); was it upgraded? "
            "Restart the pool: kvtool pool down, kvtool pool up",
            file=sys.stderr,
        )
        return 2
    _log_to(config)
    number = given.join
    try:
        meeting: Meeting = _by_mpi() if number is None else Joining(config, number)
        number = meeting.rank
        rank = Rank(config, meeting)
    except KvtoolError as error:
        print(f"rank {number}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "mpi4py":
            raise
        print(f"rank {number}: another rank failed to start ({error})", file=sys.stderr, flush=True)
        os._exit(1)
    code = 0
    try:
        rank.run()
    except Exception:
        log.exception("rank failed rank=%d", rank.rank)
        code = 1
    rank.clean_up()
    logging.shutdown()
    os._exit(code)  # finalizing MPI would wait for ranks that are gone


if __name__ == "__main__":
    sys.exit(main())
