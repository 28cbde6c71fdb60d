"""One rank without MPI: the production loop, service, rules and memory in a thread of the test, on real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from blocks import LAYOUT

from kvtool.kv.store import Store
from kvtool.pool.auditlog import AuditLog
from kvtool.pool.handshake import Knock, shake
from kvtool.pool.loop import Loop
from kvtool.pool.memory import SlotMemory
from kvtool.pool.service import Service
from kvtool.pool.state import PoolState, RankState, started_at, write_state
from kvtool.pool.tenants import Tenant, tenant_state_file, write_tenant_states
from kvtool.pool.tiers import Tiers

KEY = b"k" * 32


@dataclass
class Lone:
    loop: Loop
    service: Service
    state: RankState
    failed: list[BaseException]

    def do(self, call):
        """Run `call` on the loop; what it gives."""
        done, given = threading.Event(), []

        def on_loop() -> None:
            given.append(call())
            done.set()

        self.loop.post(on_loop)
        assert done.wait(5), "the loop hangs"
        return given[0]

    def state_file(self, far: bool = False, tenant: Tenant | None = None) -> Path:
        """For clients, of a tenant or the operator; `far`: as from another host."""
        rank = replace(self.state, host="elsewhere") if far else self.state
        path = Path(self.state.unix).parent / ("far.json" if far else "pool.json")
        state = PoolState(7, KEY.hex(), "lone", asdict(LAYOUT), LAYOUT.block_size, 10.0, [rank])
        write_state(path, state)
        if tenant is None:
            return path
        write_tenant_states(path, state, [tenant])
        return tenant_state_file(path.parent, tenant.name)

    def connect(self, tcp: bool = False) -> socket.socket:
        sock = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
        sock.settimeout(5)
        sock.connect(self.state.tcp if tcp else self.state.unix)
        return sock

    def knock(self, key: bytes = KEY, to: str | None = "lone/0", **claims) -> Knock:
        return Knock(key, {"fingerprint": LAYOUT.fingerprint, "name": "test", **claims}, to)

    def enter(self, tcp: bool = False, **claims):
        """A connection that has shaken hands, and its session."""
        sock = self.connect(tcp)
        _, session, _ = shake(sock, self.knock(**claims), time.monotonic() + 5)
        sock.settimeout(5)
        return sock, session


@contextlib.contextmanager
def lone_rank(directory: Path, slots: int = 16, lease_term_s: float = 10.0, tenants: Sequence[Tenant] = ()):
    view = memoryview(bytearray(SlotMemory.size(slots, LAYOUT.block_size)))
    tiers = Tiers(
        Store(slots, LAYOUT.block_size, 0, lease_term_s, lease_term_s),
        SlotMemory(view, slots, LAYOUT.block_size),
        None,
        lambda event: loop.post(lambda: service.event(event)),
    )
    loop = Loop(
        lambda: 7,
        lambda connection: service.opened(connection),
        lambda connection, message: service.message(connection, message),
        lambda connection: service.closed(connection),
        lambda now_s: min(0.05, max(0.0, (service.tick(now_s) or now_s + 1) - now_s)),
    )
    service = Service(
        tiers,
        KEY,
        LAYOUT.fingerprint,
        str(LAYOUT),
        lambda: {"rank": 0, "identity": "lone/0"},
        lambda: {"rank": 0},
        loop.post,
    )
    service.gate.tenants = {tenant.name: tenant for tenant in tenants}
    tiers.store.quotas.set({tenant.name: tenant.quota for tenant in tenants})
    service.audit_log = AuditLog(directory / "audit.jsonl")
    loop.listen_unix(directory / "lone.sock")
    tcp = loop.listen_tcp("127.0.0.1")
    state = RankState(
        0, "lone/0", socket.gethostname(), str(directory / "lone.sock"), tcp, "none", 0, slots, 0, os.getpid(),
        started_at(os.getpid()) or 0,
    )  # fmt: skip
    failed: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    lone = Lone(loop, service, state, failed)
    try:
        yield lone
        assert not failed, f"the loop failed: {failed[0]!r}"
    finally:
        loop.running = False
        loop.post(lambda: None)
        thread.join(5)
        for connection in list(loop.connections.values()):
            loop.close(connection, "end of the test")
        loop.stop_listening()
