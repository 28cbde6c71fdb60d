"""The canary: one small real inference, and what it means when it is late.

A long prefill chunk on a busy machine makes a canary late, and a restart would make that worse. So a late canary counts
as a failure only if the engine does nothing else meanwhile: its counts of computed and generated tokens stand still.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any, Protocol

from kvtool.errors import DeadlinePassed, ProtocolError, Unavailable
from kvtool.triton.peers import Peer

log = logging.getLogger(__name__)

_WORK = ("computed_tokens", "generated_tokens", "steps", "done")
"""Counts that only the engine moves."""


class Operator(Protocol):
    async def operate(self, peer: Peer, op: dict[str, Any], timeout_s: float) -> str: ...


async def canary(links: Operator, peer: Peer, timeout_s: float) -> float:
    """Seconds until `peer` gave a sign of life.

    Raises:
        KvtoolError: the inference failed, or came to nothing in `timeout_s` while the engine stood still.
    """
    began_s = time.monotonic()
    try:
        answer = await _ask(links, peer, "canary", timeout_s)
    except DeadlinePassed:
        if not await _progresses(links, peer, timeout_s):
            raise
        log.warning("canary late but the engine works name=%s", peer.name)
        answer = {}
    if not answer.get("ok", True):
        raise Unavailable(f"{peer.name}: {answer.get('error', {}).get('message', answer)}")
    return time.monotonic() - began_s


async def _progresses(links: Operator, peer: Peer, timeout_s: float) -> bool:
    until_s = time.monotonic() + timeout_s
    before = _work(await _ask(links, peer, "status", timeout_s))
    while before and time.monotonic() < until_s:
        await asyncio.sleep(min(1.0, timeout_s / 4))
        if _work(await _ask(links, peer, "status", timeout_s)) != before:
            return True
    return False


async def _ask(links: Operator, peer: Peer, op: str, timeout_s: float) -> dict[str, Any]:
    answer = await links.operate(peer, {"op": op}, timeout_s)
    try:
        return dict(json.loads(answer))
    except (ValueError, TypeError):
        raise ProtocolError(f"{peer.name}: wanted a JSON object from {op}, found {answer[:200]!r}") from None


def _work(status: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, count in status.get("counts", {}).items() if name in _WORK}
