"""Step `connector`: the connector pair driven in TensorRT-LLM's order over real GPU pages and a real pool.

One request's pages go to the pool; another with the same tokens finds them, and other pages get the same bytes.
Requests and settings are TensorRT-LLM's own objects; no forward pass is run, so that every byte is known.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from kvtool.engine.trtllm.bundle import CONNECTOR_FILE, Bundle, read_bundle
from kvtool.engine.trtllm.connector import MODULE, POOL_ENV, SCHEDULER_CLASS, SETTINGS_ENV, WORKER_CLASS
from kvtool.engine.trtllm.llm_args import llm_args
from kvtool.engine.trtllm.signatures import fields
from kvtool.engine.trtllm.version import can, installed
from kvtool_trtllm.gpucheck.account import Context, Evidence, Wrong, gpu
from kvtool_trtllm.gpucheck.serving import connected_pool

BLOCKS, SLOTS = 10, 48
LIMIT_S = 60.0
TICK_S = 0.01
MakeRequest = Callable[[int, list[int]], Any]
"""(request id, tokens) -> a request as the scheduler is given them."""


def show_connector(context: Context) -> tuple[str, Evidence]:
    torch = gpu()
    bundle, version = read_bundle(context.work / "bundle"), installed()
    args = llm_args(bundle, role="both", version=version, connector=True, cuda_graphs=False)
    settings = import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs(**args)
    stream = torch.cuda.current_stream()
    with connected_pool(context.work, bundle) as (_, state):
        found = round_trip(bundle, state, str(version), settings, "cuda:0", stream, real_request)
        torch.cuda.synchronize()
    return f"{found['blocks']} blocks, {found['bytes'] >> 10} KiB", found


def real_request(request_id: int, tokens: list[int]) -> Any:
    request = import_module("tensorrt_llm._torch.pyexecutor.llm_request").LlmRequest
    sampling = import_module("tensorrt_llm.bindings").SamplingConfig()
    return request(
        request_id=request_id, max_new_tokens=8, input_tokens=tokens, sampling_config=sampling, is_streaming=False
    )


def round_trip(
    bundle: Bundle, state: Path, version: str, settings: Any, device: str, stream: Any, make: MakeRequest
) -> dict[str, int]:
    """Save, find, load, compare.

    Raises:
        Wrong: blocks were not found, not loaded, or other bytes; or pages of others were touched.
    """
    import torch

    layout = bundle.manifest.layout
    os.environ |= {SETTINGS_ENV: str(bundle.directory / CONNECTOR_FILE), POOL_ENV: str(state)}
    width = layout.kv_heads * layout.block_tokens * layout.head_dim
    shape = (SLOTS, layout.layers, layout.kv_factor, width)
    random = torch.Generator().manual_seed(5)
    raw = torch.randint(-(1 << 15), 1 << 15, shape, generator=random, dtype=torch.int32).to(torch.int16)
    memory = raw.view(torch.bfloat16).to(device)
    rng, slots = Random(3), list(range(SLOTS))
    tokens = [rng.randrange(2, bundle.manifest.vocab_size) for _ in range(BLOCKS * layout.block_tokens + 5)]
    rng.shuffle(slots)  # pages lie anywhere, as in a pool that has been used
    first, second = slots[: BLOCKS + 1], slots[BLOCKS + 1 : 2 * (BLOCKS + 1)]
    pair = Pair(settings, version, stream, layout.layers)
    try:
        pair.register(memory)
        pair.save(make(1, tokens), tokens, first)
        memory[torch.tensor(second, device=device)] = 0
        request, matched = pair.find(make, tokens)
        if matched % layout.block_tokens or matched > BLOCKS * layout.block_tokens:
            raise Wrong(f"{matched} tokens were found of {len(tokens)}: not whole blocks, or more than were saved")
        pair.load(request, second)
    finally:
        pair.close()
    compared = _compare(raw, memory, first, second, matched // layout.block_tokens)
    return {"blocks": matched // layout.block_tokens, "bytes": compared, "found_tokens": matched}


def _compare(raw: Any, memory: Any, first: Sequence[int], second: Sequence[int], blocks: int) -> int:
    """Loaded pages are those that were saved, all others what they were. Bytes that were loaded."""
    import torch

    now = memory.cpu().view(torch.int16)
    wanted = raw.clone()
    wanted[list(second)] = 0
    for source, target in zip(first[:blocks], second[:blocks], strict=True):
        wanted[target] = raw[source]
    for page in range(SLOTS):
        if not torch.equal(now[page], wanted[page]):
            kind = "was loaded with other bytes" if page in second[:blocks] else "was written, and is not the request's"
            raise Wrong(f"page {page} {kind}")
    return int(blocks * raw[0].numel() * raw.element_size())


class Pair:
    """Scheduler and worker of one rank, called as the executor calls them."""

    def __init__(self, settings: Any, version: str, stream: Any, layers: int) -> None:
        module = import_module(MODULE)
        self._version, self._stream, self._layers = version, stream, layers
        with ThreadPoolExecutor(2) as threads:  # they meet while both are being made
            made = [threads.submit(getattr(module, name), settings) for name in (SCHEDULER_CLASS, WORKER_CLASS)]
            self.scheduler, self.worker = (one.result(LIMIT_S) for one in made)
        called = can(version).connector_callbacks
        self._forward: Callable[[], None] | None = None
        if "register_forward_pass_callable" in called:
            self._forward = self.worker.register_forward_pass_callable()
        self._waits = "wait_for_initialization" in called

    def register(self, memory: Any) -> None:
        """`memory`: the pool of pages. Where the version has that call, the scheduler waits for its workers then."""
        self.worker.register_kv_caches(memory)
        if self._waits:
            self.scheduler.wait_for_initialization()

    def save(self, request: Any, tokens: list[int], pages: list[int]) -> None:
        """A prompt that nothing is known of, computed in one pass; a token generated behind it; its end."""
        matched, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        if matched:
            raise Wrong(f"an empty pool was said to hold {matched} tokens")
        self.scheduler.update_state_after_alloc(request, pages)
        self._step([self._data(request, tokens, pages, 0)])
        self._step([], [self._data(request, [7], [], len(tokens))])
        if self.scheduler.request_finished(request, pages):
            self._until("saved", 0, request.request_id)

    def find(self, make: MakeRequest, tokens: list[int]) -> tuple[Any, int]:
        """A new request for the same tokens, once the pool has their blocks."""
        until_s, number = time.monotonic() + LIMIT_S, 2
        while True:
            request = make(number, tokens)
            matched, later = self.scheduler.get_num_new_matched_tokens(request, 0)
            if matched and later:
                return request, int(matched)
            if time.monotonic() > until_s:
                raise Wrong(f"nothing was found in the pool within {LIMIT_S:g} s of the save")
            number += 1
            time.sleep(TICK_S)

    def load(self, request: Any, pages: list[int]) -> None:
        self.scheduler.update_state_after_alloc(request, pages)
        self._until("loaded", 1, request.request_id)

    def close(self) -> None:
        for one in (self.worker, self.scheduler):
            end = getattr(one, "shutdown", None) or getattr(one, "close", None)
            if end:
                end()

    def _data(self, request: Any, tokens: list[int], pages: list[int], position: int) -> Any:
        values = {
            "request_id": request.request_id,
            "new_tokens": tokens,
            "new_block_ids": pages,
            "computed_position": position,
            "num_scheduled_tokens": len(tokens),
        }
        module = import_module(str(can(self._version).connector_module))
        return module.RequestData(**{key: values[key] for key in values if key in fields("RequestData", self._version)})

    def _step(
        self,
        new: Sequence[Any] = (),
        cached: Sequence[Any] = (),
        finished: Sequence[int] = (),
        loading: Sequence[int] = (),
    ) -> tuple[Iterable[int], Iterable[int]]:
        """One iteration of the executor, without a model in it."""
        module = import_module(str(can(self._version).connector_module))
        output = module.SchedulerOutput(new_requests=list(new), cached_requests=list(cached))
        self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(self._stream)
        for layer in range(self._layers):
            self.worker.wait_for_layer_load(layer, self._stream)
            self.worker.save_kv_layer(layer, self._stream)
        if self._forward:
            self._forward()
        self.worker.wait_for_save(self._stream)
        saved, loaded = self.worker.get_finished(list(finished), list(loading))
        return saved, loaded

    def _until(self, what: str, which: int, request_id: int) -> None:
        """Iterations until the worker reports the request: saved (0) or loaded (1). Its id is given once, at first."""
        given: list[list[int]] = [[], []]
        given[which].append(request_id)
        until_s = time.monotonic() + LIMIT_S
        while request_id not in self._step((), (), *given)[which]:
            if time.monotonic() > until_s:
                raise Wrong(f"request {request_id} was not {what} within {LIMIT_S:g} s")
            given[which].clear()
            time.sleep(TICK_S)
