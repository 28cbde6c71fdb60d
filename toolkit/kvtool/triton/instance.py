"""One server of a deployment over all its lives, as the supervisor keeps it and `deploy.json` shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtool.triton import process, server
from kvtool.triton.peers import Peer
from kvtool.triton.ports import Ports


@dataclass
class Instance:
    """`state`: starting, serving or restarting. `epoch` counts its lives; `failures` restarts in a row."""

    name: str
    role: str
    state: str = "starting"
    epoch: int = 0
    restarts: int = 0
    failures: int = 0
    server: server.Server | None = None
    ports: Ports | None = None
    watched: list[process.Process] = field(default_factory=list)
    canary_at_s: float | None = None
    canary_took_s: float | None = None
    last_error: str = ""

    @property
    def peer(self) -> Peer:
        assert self.server is not None
        return Peer(self.name, self.role, self.server.grpc_address, self.epoch)

    def states(self) -> list[str]:
        """ "runs", "stopped" or "gone" for the server and each of its Python stubs. A few reads of /proc."""
        return [_state(each) for each in self.watched]

    def fields(self) -> dict[str, Any]:
        """For deploy.json."""
        running = self.server
        found = process.look(running.pid) if running else None
        ports = self.ports
        return {
            "name": self.name,
            "role": self.role,
            "state": self.state,
            "epoch": self.epoch,
            "restarts": self.restarts,
            "last_error": self.last_error,
            "pid": running.pid if running else None,
            "started_ticks": found.started_ticks if found else None,
            "stubs": [each.pid for each in self.watched if running and each.pid != running.pid],
            "http_port": ports.http if ports else None,
            "grpc_port": ports.grpc if ports else None,
            "metrics_port": ports.metrics if ports else None,
            "canary_at_s": self.canary_at_s,
            "canary_took_s": self.canary_took_s,
            "log": str(running.log) if running else "",
        }


def _state(known: process.Process) -> str:
    now = process.look(known.pid)
    if now is None or not now.alive or now.started_ticks != known.started_ticks:
        return "gone"
    return "stopped" if now.state == "T" else "runs"
