"""The instances as the front sees them: which one to ask next, from the address file and `conductor.route`.

A restarted instance is another one to the router: what failed under the last epoch says nothing about the new.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from kvtool.conductor.route import Digest, Router
from kvtool.errors import Unavailable
from kvtool.triton.peers import Peer, Peers, PeersFile

_REST_S = 0.5


class Fleet:
    """Belongs to the front's loop."""

    def __init__(self, file: PeersFile) -> None:
        self._file = file
        self._routers = {role: Router((), rest_s=_REST_S) for role in ("prefill", "decode")}
        self._known: dict[str, Peer] = {}

    def peers(self) -> Peers:
        """What the address file says now. Raises Unavailable: it cannot be read."""
        peers = self._file.read()
        now = {f"{peer.name}/{peer.epoch}": peer for peer in peers.instances}
        if now != self._known:
            for name in self._known.keys() - now.keys():
                self._routers[self._known[name].role].health(time.monotonic(), name, False, "gone")
            for name in now.keys() - self._known.keys():
                self._routers[now[name].role].health(time.monotonic(), name, True)
            self._known = now
        return peers

    def choose(self, role: str, chain: Sequence[Digest]) -> Peer | None:
        """The instance for a prompt with this chain; None while there is none that may be tried."""
        self.peers()
        try:
            choice = self._routers[role].choose(time.monotonic(), chain)
        except Unavailable:
            return None
        return self._known[choice.instance]

    @contextlib.contextmanager
    def took(self, peer: Peer, chain: Sequence[Digest], tokens: int, deadline_s: float) -> Iterator[None]:
        """Count a request on `peer`; an Unavailable that leaves the block counts against the instance."""
        name, router = f"{peer.name}/{peer.epoch}", self._routers[peer.role]
        ticket = router.started(time.monotonic(), name, chain, tokens, deadline_s)
        try:
            yield
        except Unavailable:
            router.failed(time.monotonic(), ticket)
            raise
        finally:
            router.finished(time.monotonic(), ticket)  # a ticket that failed is over already

    def loads(self) -> dict[str, int]:
        """Requests on each instance that has any."""
        every = (one for router in self._routers.values() for one in router.instances())
        return {one.name.partition("/")[0]: one.requests for one in every if one.requests}
