"""The front: one request's way over a prefill and a decode server, whatever happens to them meanwhile.

    admit -> prefill (tokens and a hand-off) -> decode (a stream of steps) -> the client

Everything runs in one event loop on a thread of its own, so Triton's execute() only hands requests over. A prefill
server that fails is replaced by another, or by none: decode can compute a prompt itself. A decode server that fails is
waited for or replaced, and the answer goes on where it was (`resume`). With the pool down the prefill stage has nobody
to hand its blocks to and is left out. The request's deadline bounds all of it, and every way out cancels what still
runs for the request elsewhere. Free of Triton's types.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Coroutine
from typing import Any

from kvtool.errors import Cancelled, DeadlinePassed, KvtoolError, Overloaded, RequestRefused, Unavailable
from kvtool.serve.turns import BATCH_PRIORITY, batch_share, is_batch
from kvtool.triton import rpc
from kvtool.triton.asked import Asked, Limits
from kvtool.triton.fleet import Fleet
from kvtool.triton.flight import Flight, Links, Sink
from kvtool.triton.giveway import HOLD_S, GiveWay
from kvtool.triton.peers import Peer, PeersFile
from kvtool.triton.stages import Stages
from kvtool.triton.usage import usage_fields
from kvtool.triton.wire import Step

log = logging.getLogger(__name__)

_CANCEL_S = 2.0
_POLL_S = 0.025


class Front:
    """See the module. `submit` and `status` may be called from any thread. `shared_cores`: what one instance computes
    takes time from the others."""

    def __init__(
        self,
        peers: PeersFile,
        limits: Limits,
        links: Links | None = None,
        handoff: str = "pool",
        shared_cores: bool = False,
    ) -> None:
        self._fleet, self._limits = Fleet(peers), limits
        self._links = links or rpc.Links()
        self._flights: dict[str, Flight] = {}
        self._mean_s = 1.0
        self._totals = {"requests": 0, "failed": 0, "prompt_tokens": 0, "hit_tokens": 0, "completion_tokens": 0}
        self._background: set[asyncio.Future[Any]] = set()
        self._give_way = GiveWay(self._hold_all if shared_cores else None)
        direct = handoff == "transceiver"
        self._stages = Stages(self._fleet, self._links, self._give_way, direct, self._pass_on, self._cancel_later)
        self._loop = asyncio.new_event_loop()
        self._busy = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front", daemon=True)
        self._thread.start()
        self._watching = [self._call(self._watch()), self._call(self._give_way.hold())]

    # From Triton's thread.

    def submit(self, asked: Asked, sink: Sink) -> None:
        """Take a request; its answer, or its error, goes to `sink`."""
        self._loop.call_soon_threadsafe(self._admit, asked, sink, time.monotonic())

    def operate(self, op: str, request_id: str, sink: Sink) -> None:
        """Answer "status" or "canary" (usage has the status), or "cancel" a request. In the loop, so that an answer
        shows that the loop lives."""
        self._loop.call_soon_threadsafe(self._operate, op, request_id, sink)

    def status(self) -> dict[str, Any]:
        """Requests in flight, and the instances as the front knows them."""
        now_s = time.monotonic()
        flights = [
            {
                "request_id": name,
                "stage": flight.stage,
                "age_s": round(now_s - flight.arrived_s, 3),
                "tokens": len(flight.resume.sent_tokens),
                "retries": flight.retries,
                "instances": dict(flight.instances),
            }
            for name, flight in list(self._flights.items())
        ]
        return {
            "in_flight": flights,
            "batch": self._give_way.batch,
            "loads": self._fleet.loads(),
            "totals": dict(self._totals),
        }

    def close(self) -> None:
        """End every request with Unavailable, cancel what runs for them elsewhere, stop the thread."""
        if self._thread.is_alive():
            self._call(self._end()).result(_CANCEL_S + 3)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
            if not self._thread.is_alive():
                self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # In the loop.

    def _admit(self, asked: Asked, sink: Sink, arrived_s: float) -> None:
        try:
            asked = asked.checked(self._limits)
            name = asked.request_id or uuid.uuid4().hex[:16]
            if name in self._flights:
                raise RequestRefused(f"{name}: a request with this id is in flight; ids must differ")
            self._check_room(is_batch(asked))
        except KvtoolError as error:
            sink.fail(error)
            return
        asked = asked.named(name)
        flight = Flight(asked, sink, arrived_s, arrived_s + asked.deadline_s)
        self._flights[name] = flight
        self._give_way.entered(flight)
        flight.task = self._loop.create_task(self._fly(flight))
        self._busy.set()

    def _check_room(self, batch: bool) -> None:
        """Raises Overloaded: as many are in flight as may be, and no batch request that an online one could replace."""
        most, own = self._limits.concurrent_max, self._give_way.batch
        wait_s = min(30.0, max(0.1, self._mean_s / most))
        if len(self._flights) >= most:
            youngest = None if batch else self._give_way.youngest()
            if youngest is None or youngest.task is None:
                raise Overloaded(
                    f"{len(self._flights)} requests are in flight, limits.concurrent_max is {most}; "
                    f"retry after {wait_s:.1f} s",
                    retry_after_s=wait_s,
                )
            youngest.gave_way = True
            youngest.task.cancel()
            self._forget(youngest)
        elif batch and own >= batch_share(most):
            raise Overloaded(
                f"{own} batch requests (priority {BATCH_PRIORITY}) are in flight, half of limits.concurrent_max {most} "
                f"is theirs; retry after {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    def _operate(self, op: str, request_id: str, sink: Sink) -> None:
        if op not in ("status", "canary", "cancel"):
            sink.fail(RequestRefused(f"op: wanted status, canary or cancel, found {op[:40]!r}"))
            return
        flight = self._flights.get(request_id) if op == "cancel" else None
        if flight is not None and flight.task is not None:
            flight.task.cancel()
        sink.step(Step((), "", "stop", {"cancelled": flight is not None} if op == "cancel" else self.status()))

    async def _fly(self, flight: Flight) -> None:
        """From admission to the last response; nothing of the request is left anywhere afterwards."""
        error: KvtoolError | None = None
        try:
            await asyncio.wait_for(self._stages.serve(flight), max(0.0, flight.left_s))
        except asyncio.TimeoutError:
            error = DeadlinePassed(
                f"{flight.asked.request_id}: not done within its deadline of {flight.asked.deadline_s:g} s "
                f"(in {flight.stage}, {len(flight.resume.sent_tokens)} tokens sent)"
            )
        except asyncio.CancelledError:
            error = Cancelled(f"{flight.asked.request_id}: cancelled by the client")
            if flight.gave_way:
                again = f"{flight.asked.request_id}: gave way to an online request; send it again"
                error = Overloaded(again, retry_after_s=1.0)
        except KvtoolError as failed:
            error = failed
        except Exception as bug:
            log.exception("request failed request=%s", flight.asked.request_id)
            error = KvtoolError(f"{flight.asked.request_id}: the front failed: {type(bug).__name__}: {bug}")
        finally:
            self._forget(flight)
        total_s = time.monotonic() - flight.arrived_s
        self._totals["requests"] += 1
        self._totals["failed"] += error is not None
        if error is None:
            self._mean_s += 0.1 * (total_s - self._mean_s)
        else:
            self._spawn(self._cancel_all(flight))
            with contextlib.suppress(Exception):
                flight.sink.fail(error)
        log.info(
            "request done request=%s tokens=%d seconds=%.4f retries=%d error=%s",
            flight.asked.request_id,
            len(flight.resume.sent_tokens),
            total_s,
            flight.retries,
            type(error).__name__ if error else "none",
        )

    def _pass_on(self, flight: Flight, step: Step) -> None:
        """Send what is new to the client; the last step goes with the usage of the whole way."""
        tokens, text = flight.resume.take(step.tokens, step.text)
        now_s = time.monotonic()
        if tokens and flight.first_token_s is None:
            flight.first_token_s = now_s
            self._give_way.served(flight)
        if step.finish:
            first_s = flight.first_token_s or now_s
            usage = usage_fields(flight.prefill_usage, step.usage)
            usage |= {
                "request_id": flight.asked.request_id,
                "ttft_ms": round(1e3 * (first_s - flight.arrived_s), 3),
                "total_ms": round(1e3 * (now_s - flight.arrived_s), 3),
                "finish_reason": step.finish,
                "instances": dict(flight.instances),
                "retries": flight.retries,
            }
            self._totals["prompt_tokens"] += usage["prompt_tokens"]
            self._totals["completion_tokens"] += usage["completion_tokens"]
            self._totals["hit_tokens"] += sum(usage["hit_tokens"].values())
            self._forget(flight)  # a client may use the id again as soon as it has the last response
            flight.sink.step(Step(tokens, text, step.finish, usage))
        elif tokens or text:
            flight.sink.step(Step(tokens, text))

    def _forget(self, flight: Flight) -> None:
        if self._flights.get(flight.asked.request_id) is flight:
            del self._flights[flight.asked.request_id]
            self._give_way.left(flight)

    # Cancelling.

    async def _watch(self) -> None:
        """Look for clients that went away; asleep while no request is in flight."""
        while True:
            if not self._flights:
                self._busy.clear()
                await self._busy.wait()
            for flight in list(self._flights.values()):
                if flight.task is not None and self._gone(flight):
                    flight.task.cancel()
            await asyncio.sleep(max(_POLL_S, 0.001 * len(self._flights)))

    @staticmethod
    def _gone(flight: Flight) -> bool:
        try:
            return flight.sink.cancelled()
        except Exception:  # one broken client must not end the watch over all others
            log.exception("cannot tell whether the client is there request=%s", flight.asked.request_id)
            return False

    async def _cancel_all(self, flight: Flight) -> None:
        await asyncio.gather(*(self._cancel(peer, name) for peer, name in flight.touched))

    def _cancel_later(self, peer: Peer, request_id: str) -> None:
        self._spawn(self._cancel(peer, request_id))

    async def _cancel(self, peer: Peer, request_id: str) -> None:
        """Best effort: a server that cannot be told is gone, or ends the request by its deadline."""
        with contextlib.suppress(KvtoolError):
            await self._links.operate(peer, {"op": "cancel", "request_id": request_id}, _CANCEL_S)

    async def _hold_all(self, seconds: float) -> None:
        """Best effort: an instance that does not hear it goes on, or holds until the lease is over."""

        async def tell(peer: Peer) -> None:
            with contextlib.suppress(KvtoolError):
                await self._links.operate(peer, {"op": "hold", "seconds": seconds}, HOLD_S)

        with contextlib.suppress(Unavailable):
            await asyncio.gather(*(tell(peer) for peer in self._fleet.peers().instances))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._background.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._background.discard)

    async def _end(self) -> None:
        for watch in self._watching:
            watch.cancel()
        for flight in list(self._flights.values()):
            if flight.task is not None:
                flight.task.cancel()
                await asyncio.wait([flight.task], timeout=1.0)
        if self._background:
            await asyncio.wait(self._background, timeout=_CANCEL_S)
        await self._links.close()
