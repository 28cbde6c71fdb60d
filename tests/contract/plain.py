"""A connector of a page: blocks in a dictionary. It proves the executor, and with `fault` that a bad one is caught.

Right as it stands: chained keys with salt and adapter, blocks copied when they are claimed, loads ordered after the
engine's stream, gathers ordered behind the pass by an event and waited for by the stream before pages may be reused.
"""

from __future__ import annotations

import functools
import importlib
import threading
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

FAULTS = (
    "reports loads early", "reports saves early", "frees pages that are gathered", "gathers without an event",
    "loads without an event", "hashes blocks alone", "ignores the salt", "ignores the adapter", "returns (0, True)",
    "claims the whole prompt", "claims and does not load", "loads the block before", "names an id twice",
    "names a stranger", "does not pickle", "saves what is not computed", "loses the tail of chunks",
    "keeps no state over a reset", "counts matched tokens twice", "forgets a save", "frees pages that are loaded",
    "takes -1 for a page",
)  # fmt: skip


@dataclass
class Shared:
    """What a pool would hold, and what scheduler and workers would tell each other by other ways."""

    model: Any
    size: int = 1
    fault: str = ""
    blocks: dict[tuple[bytes, int, int], bytes] = field(default_factory=dict)
    staged: dict[tuple[int, int], list[dict[int, bytes]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Known:
    keys_of: Any
    tokens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    saved: int = 0
    matched: int = 0
    first: int = 0
    emitted: bool = False
    loading: bool = False
    steps: int = 0


def classes(module: str, shared: Shared) -> tuple[Any, Any]:
    """(worker, scheduler), subclasses of the abstract pair of `module`, over `shared`."""
    base = importlib.import_module(module)
    stream = importlib.import_module("tensorrt_llm._fake.stream")
    ranks = importlib.import_module("tensorrt_llm._fake.ranks")
    model, size = shared.model, shared.model.block_tokens
    is_ = shared.fault.__eq__

    def keys(request: Any, tokens: list[int]) -> list[bytes]:
        salt = None if is_("ignores the salt") else request.cache_salt_id
        lora = None if is_("ignores the adapter") else request.lora_task_id
        seed = blake3(repr((salt, lora, request.multimodal_hashes)).encode()).digest()
        out, parent = [], seed
        for at in range(0, len(tokens) // size * size, size):
            parent = blake3(
                (seed if is_("hashes blocks alone") else parent) + repr(tokens[at : at + size]).encode()
            ).digest()
            out.append(parent)
        return out

    class Scheduler(base.KvCacheConnectorScheduler):
        def __init__(self, llm_args: Any) -> None:
            super().__init__(llm_args)
            self.known: dict[int, Known] = {}
            self.loads: list[Any] = []

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            tokens, first = request.get_tokens(0), num_computed_tokens // size
            if is_("keeps no state over a reset"):
                known = self.known.setdefault(request.request_id, Known(None))
            else:
                known = self.known[request.request_id] = Known(None)
            known.keys_of, known.first, known.saved = functools.partial(keys, request), first, first
            if is_("returns (0, True)"):
                return 0, True
            found = keys(request, tokens)[first : None if is_("claims the whole prompt") else (len(tokens) - 1) // size]
            count, groups = 0, range(len(model.layer_groups))
            with shared.lock:
                for key in found:
                    places = [(key, rank, group) for rank in range(shared.size) for group in groups]
                    if not all(place in shared.blocks for place in places):
                        break
                    count += 1
                for rank in range(shared.size):
                    shared.staged[request.request_id, rank] = [
                        {group: shared.blocks[key, rank, group] for group in groups} for key in found[:count]
                    ]
            known.matched = count
            known.saved += count
            if is_("counts matched tokens twice"):
                count *= 2
            if is_("claims and does not load"):
                known.matched = 0
                return count * size, False
            return count * size, count > 0

        def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
            self.update_state_after_alloc_by_layer_group(request, [block_ids])

        def update_state_after_alloc_by_layer_group(self, request: Any, block_ids: list[list[int]]) -> None:
            known = self.known[request.request_id]
            if known.matched:
                shift = 1 if is_("loads the block before") and known.first else 0
                span = slice(known.first - shift, known.first - shift + known.matched)
                self.loads.append((request.request_id, [pages[span] for pages in block_ids]))
                known.loading = True

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            loads, self.loads = self.loads, []
            saves = []
            for data in (*scheduler_output.new_requests, *scheduler_output.cached_requests):
                saves.extend(self._saves(data))
            return (loads, saves, (lambda: 0) if is_("does not pickle") else None)

        def _saves(self, data: Any) -> list[Any]:
            known = self.known[data.request_id]
            known.loading = False
            known.tokens.extend(data.new_tokens)
            fresh = getattr(data, "new_block_ids_by_layer_group", None) or [data.new_block_ids]
            known.pages = known.pages or [[] for _ in fresh]
            for pages, more in zip(known.pages, fresh, strict=True):
                pages.extend(more)
            end = data.computed_position + data.num_scheduled_tokens
            known.steps += 1
            if is_("saves what is not computed"):
                end = len(known.tokens)
            if is_("loses the tail of chunks") and known.steps > 1:
                return []
            whole = min(end, len(known.tokens)) // size
            out = []
            for block, key in list(enumerate(known.keys_of(known.tokens)))[known.saved : whole]:
                at = [pages[block] for pages in known.pages]
                out.append((data.request_id, key, at))
                known.emitted = True
            known.saved = max(known.saved, whole)
            return out

        def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
            known = self.known.pop(request.request_id)
            self.loads = [load for load in self.loads if load[0] != request.request_id]
            if is_("frees pages that are loaded") and known.loading:
                return False
            if is_("frees pages that are gathered"):
                return False
            return known.emitted or known.loading

        def request_finished_by_layer_group(self, request: Any, cache_block_ids: list[list[int]]) -> bool:
            return self.request_finished(request, [])

    class Worker(base.KvCacheConnectorWorker):
        def __init__(self, llm_args: Any) -> None:
            super().__init__(llm_args)
            self.rank = ranks.mpi_rank()
            self.side = stream.Stream(self.rank + 5, 0.02 if is_("frees pages that are loaded") else 0.003)
            self.events: dict[str, dict[int, list[Any]]] = {"saving": {}, "loading": {}}
            self.asked: dict[str, list[int]] = {"saving": [], "loading": []}
            self.parts: list[list[Any]] = []
            self.stream: Any = None
            self.passed: Any = None
            self.said: list[int] = []

        def close(self) -> None:
            self.side.close()

        def register_kv_caches(self, kv_cache_tensor: Any) -> None:
            import torch

            self.parts = [[kv_cache_tensor.view(torch.uint8).flatten(1)]]

        def register_kv_cache_layout(self, layout: Any) -> None:
            self.parts = [[region.as_tensor() for region in group.regions] for group in layout.groups]

        def register_forward_pass_callable(self) -> Any:
            return self._passed

        def _passed(self) -> None:
            self.passed = self.stream.record_event()

        def start_load_kv(self, stream: Any) -> None:
            self.stream = stream
            if not is_("loads without an event"):
                self.side.wait_event(stream.record_event())
            for request_id, pages in self._metadata[0]:
                blocks = shared.staged.pop((request_id, self.rank))
                self.side.enqueue(functools.partial(self._scatter, pages, blocks))
                self.events["loading"].setdefault(request_id, []).append(self.side.record_event())
            if is_("gathers without an event"):
                self._gathers()

        def _scatter(self, pages: list[list[int]], blocks: list[dict[int, bytes]]) -> None:
            import torch

            for at, block in enumerate(blocks):
                for group, parts in enumerate(self.parts):
                    raw, offset = torch.frombuffer(bytearray(block[group]), dtype=torch.uint8), 0
                    for part in parts:
                        if pages[group][at] >= 0 or is_("takes -1 for a page"):
                            part[pages[group][at]] = raw[offset : offset + part.shape[1]]
                        offset += part.shape[1]

        def _gather(self, key: bytes, pages: list[int]) -> None:
            for group, parts in enumerate(self.parts):
                if pages[group] >= 0:
                    raw = b"".join(part[pages[group]].numpy().tobytes() for part in parts)
                    with shared.lock:
                        shared.blocks.setdefault((key, self.rank, group), raw)

        def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

        def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

        def wait_for_save(self, stream: Any) -> None:
            if is_("gathers without an event"):
                return
            self.side.wait_event(self.passed)
            self._gathers()
            if not (is_("frees pages that are gathered") or is_("reports saves early")):
                stream.wait_event(self.side.record_event())

        def _gathers(self) -> None:
            for request_id, key, pages in self._metadata[1]:
                self.side.enqueue(functools.partial(self._gather, key, pages))
                if not is_("forgets a save"):
                    self.events["saving"].setdefault(request_id, []).append(self.side.record_event())

        def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]) -> Any:
            out = []
            for kind, fresh in (("saving", finished_gen_req_ids), ("loading", started_loading_req_ids)):
                self.asked[kind].extend(fresh)
                early = is_(f"reports {kind[:-3].replace('sav', 'save')}s early")
                ended = [one for one in self.asked[kind] if early or self._over(kind, one)]
                self.asked[kind] = [one for one in self.asked[kind] if one not in ended]
                for one in ended:
                    self.events[kind].pop(one, None)
                out.append(ended)
            if is_("names an id twice"):
                self.said, out[1] = out[1], out[1] + self.said
            if is_("names a stranger"):
                out[0] = [*out[0], 10**6]
            return out[0], out[1]

        def _over(self, kind: str, one: int) -> bool:
            if is_("forgets a save") and kind == "saving" and one not in self.events[kind]:
                return False
            return all(event.query() for event in self.events[kind].get(one, ()))

    return Worker, Scheduler
