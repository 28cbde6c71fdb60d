"""One request in flight through the front, and what the front needs around it: calls to instances, and a client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvtool.conductor.route import text_chain
from kvtool.errors import KvtoolError
from kvtool.triton.asked import Asked
from kvtool.triton.peers import Peer
from kvtool.triton.resume import Resume
from kvtool.triton.wire import Ask, Step


class Links(Protocol):
    """Calls to instances, as `rpc.Links` makes them; each raises Unavailable when the instance is gone."""

    async def prefill(
        self, peer: Peer, text: bytes, ask: Ask, timeout_s: float
    ) -> tuple[tuple[int, ...], str, dict[str, Any]]: ...

    async def tokenize(self, peer: Peer, text: bytes, ask: Ask, timeout_s: float) -> tuple[int, ...]: ...

    def decode(
        self, peer: Peer, tokens: tuple[int, ...], ask: Ask, handoff: str, timeout_s: float
    ) -> AsyncGenerator[Step, None]: ...

    async def operate(self, peer: Peer, op: dict[str, Any], timeout_s: float) -> str: ...

    async def close(self) -> None: ...


class Sink(Protocol):
    """Where the answer goes. Called from the front's thread only; `step.finish` or `fail` is the last call."""

    def step(self, step: Step) -> None: ...

    def fail(self, error: KvtoolError) -> None: ...

    def cancelled(self) -> bool:
        """Whether the client has gone away."""
        ...


@dataclass
class Flight:
    """One request in flight. `touched`: (instance, worker's request id) that may hold something for it."""

    asked: Asked
    sink: Sink
    arrived_s: float
    until_s: float
    stage: str = "prefill"
    touched: list[tuple[Peer, str]] = field(default_factory=list)
    instances: dict[str, str] = field(default_factory=dict)
    prefill_usage: dict[str, Any] = field(default_factory=dict)
    retries: int = 0
    first_token_s: float | None = None
    resume: Resume = field(default_factory=Resume)
    lost: set[tuple[str, int]] = field(default_factory=set)
    task: asyncio.Task[None] | None = None
    gave_way: bool = False
    """Ended by the front, for an online request."""

    def __post_init__(self) -> None:
        self.chain = text_chain(self.asked.text.decode())

    @property
    def prompt_tokens(self) -> int:
        """A guess, before anyone counted: four characters a token."""
        return len(self.asked.text) // 4 + 1

    @property
    def left_s(self) -> float:
        return self.until_s - time.monotonic()

    def ask(self) -> Ask:
        """For one attempt: a worker that still holds an earlier one must not take it for the same."""
        return self.asked.ask(f"{self.asked.request_id}~{len(self.touched)}", self.left_s)
