"""The scheduler half, on rank 0: what the pool has for a request, and which blocks go there.

Called by the executor's thread, between two passes: whatever it waits for, the engine waits for. The only wait is for
blocks that are being staged, and it has a budget (`claim_budget_s`). See `control` for why tokens are claimed only
after every rank holds their blocks, and `requests` for the rules.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvtool import __version__
from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.errors import EngineFailed
from kvtool.kv.block import BlockKey
from kvtool_trtllm.keys import first_of, generation_only, keys_of, request_id_of, seed_of
from kvtool_trtllm.meta import Load, Meta
from kvtool_trtllm.requests import Claim, Known, Requests, Step

log = logging.getLogger(__name__)

CLAIM_TERM_S = 60.0
"""A claim that nobody allocates for is given back then."""
BOOKS_TERM_S = 3600.0
"""Books of a request that nothing is heard of are closed then; were it to go on, its blocks are not saved."""
_TICK_S = 1.0


class Stages(Protocol):
    """What the scheduler needs of `control.Control`."""

    def stage(self, load_id: int, keys: Sequence[BlockKey], budget_s: float) -> int: ...

    def keep(self, load_id: int, blocks: int) -> None: ...

    def wait_for_workers(self) -> None: ...

    def close(self) -> None: ...


def hello_of(settings: ConnectorSettings) -> dict[str, Any]:
    """What scheduler and workers must agree on."""
    return {
        "kvtool": __version__,
        "layout": str(settings.kv.layout()),
        "model": settings.model_digest,
        "namespace": settings.namespace,
        "tensor_parallel": settings.tensor_parallel,
        "stored_parallel": settings.stored_parallel,
    }


class Scheduler:
    """The callbacks' substance, free of TensorRT-LLM's types. `tick`: whether a thread of its own ends what is due."""

    def __init__(
        self,
        settings: ConnectorSettings,
        control: Stages,
        now_s: Callable[[], float] = time.monotonic,
        tick: bool = True,
    ) -> None:
        self._settings, self._control, self._now_s = settings, control, now_s
        self._requests = Requests(settings.kv.block_tokens, settings.save)
        self._lock = threading.Lock()
        self._forget: list[int] = []
        self._loads = self._iteration = 0
        self.counts = {"asked_tokens": 0, "claimed_tokens": 0, "expired": 0, "saved_blocks": 0, "requests": 0}
        self._closed = threading.Event()
        if tick:
            threading.Thread(target=self._tick, name="kvtool-claims", daemon=True).start()

    # Admission.

    def match(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens behind the first `computed` the pool gives, and whether they come beside the batch."""
        request_id, tokens = request_id_of(request), list(request.get_tokens(0))
        layerwise = self._settings.load == "layerwise"
        with self._lock:
            before = self._requests.ended(request_id)
            if before is not None:
                self._drop(request_id, before)
            self.counts["requests"] += 1
            if generation_only(request):
                return 0, False
            seed = seed_of(request, self._settings)
            claim = self._claim(seed, tokens, computed, layerwise) if seed is not None else None
            self._requests.admitted(request_id, seed, len(tokens), computed, claim, self._now_s())
        if claim is None:
            return 0, False
        count = claim.count * self._settings.kv.block_tokens
        log.debug("claimed request=%d tokens=%d after=%d of=%d", request_id, count, computed, len(tokens))
        return count, not layerwise

    def _claim(self, seed: bytes, tokens: list[int], computed: int, layerwise: bool) -> Claim | None:
        size = self._settings.kv.block_tokens
        blocks = self._requests.claimable(len(tokens), computed)
        self.counts["asked_tokens"] += len(blocks) * size
        if not blocks:
            return None
        keys = keys_of(seed, tokens, size)[blocks.start : blocks.stop]
        self._loads += 1
        held = self._control.stage(self._loads, keys, self._settings.claim_budget_s)
        if not held:
            return None
        self.counts["claimed_tokens"] += held * size
        return Claim(self._loads, blocks.start, held, layerwise, self._now_s(), tuple(keys[:held]))

    def allocated(self, request: Any, pages: Sequence[Sequence[int]]) -> None:
        """
        Raises:
            EngineFailed: tokens were claimed and there is no way any more to have their blocks.
        """
        request_id = request_id_of(request)
        with self._lock:
            if seed_of(request, self._settings) is None:  # matched as C++ has it, which lacks what Python adds
                self._requests.unknowable(request_id)
            claim = self._requests.allocated(request_id, pages)
            if claim is None:
                return
            if claim.pages is None:
                self._control.keep(claim.load_id, 0)
                given = [len(group) for group in pages]
                raise EngineFailed(
                    f"request {request_id}: {claim.count} blocks from block {claim.first} on were claimed and {given} "
                    "pages allocated in all; the engine must not run over pages that nobody fills"
                )
            if claim.expired:
                self._stage_again(request_id, claim)

    def _stage_again(self, request_id: int, claim: Claim) -> None:
        """Of a claim that had lapsed when the engine came back to it."""
        self._loads += 1
        claim.load_id = self._loads
        held = self._control.stage(claim.load_id, claim.keys, max(5.0, self._settings.claim_budget_s))
        if held < claim.count:
            self._control.keep(claim.load_id, 0)
            raise EngineFailed(
                f"request {request_id}: allocated {CLAIM_TERM_S:g} s after its blocks were claimed, and {held} of "
                f"{claim.count} can be had now; the engine must not run over pages that nobody fills"
            )

    # Each iteration.

    def build(self, new: Sequence[Any], cached: Sequence[Any]) -> Meta:
        with self._lock:
            self._iteration += 1
            loads = tuple(
                Load(claim.load_id, request_id, claim.pages, claim.layerwise)
                for request_id, claim in self._requests.loads()
                if claim.pages is not None
            )
            now_s = self._now_s()
            saves = [self._requests.step(step_of(data), new=True, now_s=now_s) for data in new]
            saves += [self._requests.step(step_of(data), new=False, now_s=now_s) for data in cached]
            whole = tuple(save for save in saves if save is not None)
            self.counts["saved_blocks"] += sum(len(save.keys) for save in whole)
            forget, self._forget = tuple(self._forget), []
        self.expire()
        return Meta(self._iteration, loads, whole, forget)

    # Ends.

    def finished(self, request: Any) -> bool:
        """Whether its pages must stay until `get_finished` has reported it: a load is writing to them. Gathers need no
        such thing: the engine's stream waits for them before anything else is queued on it."""
        with self._lock:
            known = self._requests.ended(request_id_of(request))
            if known is None:
                return False
            self._drop(request_id_of(request), known)
            return known.loading

    def reset(self, request: Any) -> None:
        """Its pages are gone, and it will be admitted again."""
        request_id = request_id_of(request)
        with self._lock:
            known = self._requests.ended(request_id)
            if known is not None:
                self._drop(request_id, known)
                self._forget.append(request_id)

    def cancel_load(self, request: Any, start: int = 0, end: int | None = None) -> None:
        """The engine will not take prompt tokens [start, end) from the pool, and computes them if it still runs the
        request; what lies before or behind is still to be filled. A load that the workers have goes on to its end."""
        with self._lock:
            untaken = self._requests.untaken(request_id_of(request), start, end)
            if untaken is not None and not untaken[0].expired:
                self._control.keep(untaken[0].load_id, untaken[1])

    def _drop(self, request_id: int, known: Known) -> None:
        claim, known.claim = known.claim, None
        if claim is not None and not claim.expired:
            self._control.keep(claim.load_id, 0)

    def expire(self) -> None:
        """Give back what was claimed and never allocated for, and forget whom nothing is heard of."""
        with self._lock:
            for request_id in self._requests.silent(self._now_s() - BOOKS_TERM_S):
                self._requests.ended(request_id)
            for request_id, claim in self._requests.due(self._now_s() - CLAIM_TERM_S):
                self.counts["expired"] += 1
                self._control.keep(claim.load_id, 0)
                log.warning("claim lapsed request=%d blocks=%d", request_id, claim.count)

    def _tick(self) -> None:
        while not self._closed.wait(_TICK_S):
            self.expire()

    def audit(self) -> list[tuple[int, int, float]]:
        """Claims held now: (request, blocks, age in seconds)."""
        now_s = self._now_s()
        with self._lock:
            return [
                (request_id, claim.count, now_s - claim.at_s)
                for request_id, claim in self._requests.claims()
                if not claim.expired
            ]

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {**self.counts, "known": len(self._requests), "pages_lacking": self._requests.lacking}

    def close(self) -> None:
        self._closed.set()
        self._control.close()


def step_of(data: Any) -> Step:
    """One RequestData of any version. Pages come by layer group where there are several, else flat."""
    groups = getattr(data, "new_block_ids_by_layer_group", None)
    pages = groups if groups else [data.new_block_ids]
    scheduled = first_of(data, "num_scheduled_tokens")
    return Step(int(data.request_id), data.new_tokens, pages, int(data.computed_position), scheduled)
