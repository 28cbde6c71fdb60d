"""The stages of one request in flight: prefill and decode instances are chosen, called, and replaced when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from kvtool.errors import EngineFull, KvtoolError, Overloaded, Unavailable
from kvtool.triton.fleet import Fleet
from kvtool.triton.flight import Flight, Links
from kvtool.triton.giveway import GiveWay
from kvtool.triton.peers import Peer
from kvtool.triton.wire import Step

log = logging.getLogger(__name__)

SERVERS_LOST_MAX = 3
"""Decode servers that one request may lose before it is given up: it may be what kills them."""
_ALIVE = (Overloaded, EngineFull)
_LOOK_S = 0.1
_KEEPS_S = 5.0
"""How old a context request's KV may be when a decode server is asked to pull it; half of the shortest timeout that is
rendered for the transfer."""


class Stages:
    """`direct`: decode servers only generate, from what a context request left. `pass_on` gets each step of the answer,
    `cancel` what may still run on an instance that failed. In the front's loop."""

    def __init__(
        self,
        fleet: Fleet,
        links: Links,
        give_way: GiveWay,
        direct: bool,
        pass_on: Callable[[Flight, Step], None],
        cancel: Callable[[Peer, str], None],
    ) -> None:
        self._fleet, self._links, self._give_way, self._direct = fleet, links, give_way, direct
        self._pass_on, self._cancel = pass_on, cancel

    async def serve(self, flight: Flight) -> None:
        """The whole answer, each step of it to `pass_on`.

        Raises:
            Unavailable: no instance could be had, or those that were had were lost.
            KvtoolError: what an instance says of the request itself.
        """
        tokens: tuple[int, ...] = ()
        handoff = ""
        while True:
            await self._give_way.turn(flight)
            if not tokens or self._direct:  # a context request serves one generation request
                tokens, handoff = await self._prompt(flight)
            if not self._direct:
                await self._give_way.turn(flight)
            made_s, flight.stage = time.monotonic(), "decode"
            peer = await self._choose(flight)
            if self._direct and time.monotonic() - made_s > _KEEPS_S:
                continue
            flight.instances["decode"] = peer.name
            try:
                await self._decode(flight, peer, tokens, handoff)
                return
            except Unavailable as error:
                self._lost(flight, peer, error)
                if isinstance(error, _ALIVE) and len(self._fleet.peers().of("decode")) == 1:
                    raise
                if len(flight.lost) >= SERVERS_LOST_MAX:
                    raise Unavailable(
                        f"{flight.asked.request_id}: {len(flight.lost)} decode servers were lost with this request, "
                        f"the last so: {error}"
                    ) from None

    async def _prompt(self, flight: Flight) -> tuple[tuple[int, ...], str]:
        """Prompt tokens, and a hand-off where a prefill server could be had.

        Raises:
            Unavailable: none could, and decode cannot do without.
        """
        flight.stage = "prefill"
        peers = self._fleet.peers()
        tokens: tuple[int, ...] = ()
        handoff = ""
        if self._direct:
            await self._choose(flight, "prefill")
            await self._choose(flight)  # who would pull the KV must be there first: it does not keep
        if self._direct or (peers.pool_up and peers.of("prefill")):
            tokens, handoff = await self._prefill(flight)
        if self._direct and not tokens:
            raise Unavailable(
                f"{flight.asked.request_id}: no prefill server took the prompt, and decode servers only generate with "
                "tensorrt_llm.handoff transceiver; try again later"
            )
        if not tokens:
            flight.stage = "tokenize"
            tokens = await self._tokenize(flight)
        return tokens, handoff

    async def _prefill(self, flight: Flight) -> tuple[tuple[int, ...], str]:
        """Tokens and hand-off; ((), "") when no prefill server could be had, which costs time and no answer.

        Raises:
            Overloaded: every prefill server that was asked is full. Decode is not where that work should pile up.
        """
        full: Overloaded | None = None
        for _ in range(2):
            peer = self._fleet.choose("prefill", flight.chain)
            if peer is None:
                break
            flight.instances["prefill"] = peer.name
            ask = flight.ask()
            flight.touched.append((peer, ask.request_id))
            try:
                with self._fleet.took(peer, flight.chain, flight.prompt_tokens, flight.left_s):
                    text = flight.asked.text
                    tokens, handoff, usage = await self._links.prefill(peer, text, ask, flight.left_s)
            except Unavailable as error:
                self._lost(flight, peer, error)
                full = error if isinstance(error, Overloaded) else full
                continue
            flight.touched.pop()
            flight.prefill_usage = usage
            return tokens, handoff
        flight.instances.pop("prefill", None)
        if full is not None:
            raise full
        return (), ""

    async def _tokenize(self, flight: Flight) -> tuple[int, ...]:
        while True:
            peer = await self._choose(flight)
            try:
                with self._fleet.took(peer, (), flight.prompt_tokens, flight.left_s):
                    return await self._links.tokenize(peer, flight.asked.text, flight.ask(), flight.left_s)
            except Unavailable as error:
                self._lost(flight, peer, error)

    async def _decode(self, flight: Flight, peer: Peer, tokens: tuple[int, ...], handoff: str) -> None:
        ask = flight.ask()
        flight.touched.append((peer, ask.request_id))
        flight.resume.restart()
        steps = self._links.decode(peer, tokens, ask, handoff, flight.left_s)
        with self._fleet.took(peer, flight.chain, len(tokens) + ask.max_tokens, flight.left_s):
            async with contextlib.aclosing(steps):
                async for step in steps:
                    if step.error is not None:
                        raise step.error
                    self._pass_on(flight, step)
        flight.touched.pop()

    def _lost(self, flight: Flight, peer: Peer, error: KvtoolError) -> None:
        flight.retries += 1
        if peer.role == "decode" and not isinstance(error, _ALIVE):
            flight.lost.add(peer.identity)
        log.warning("instance failed request=%s instance=%s error=%s", flight.asked.request_id, peer.name, error)
        if flight.touched and flight.touched[-1][0] == peer:
            self._cancel(*flight.touched[-1])

    async def _choose(self, flight: Flight, role: str = "decode") -> Peer:
        """An instance that may be tried now; waits for one until the deadline (in `_fly`) ends it."""
        while True:
            peer = self._fleet.choose(role, flight.chain)
            if peer is not None:
                return peer
            await asyncio.sleep(_LOOK_S)
