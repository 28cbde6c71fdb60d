"""The worker half, on every rank: blocks into the engine's pages and out of them.

Called by the executor's thread around each forward pass; all that may take time runs on streams and in threads of its
own. `get_finished` names a request when nothing of ours touches its pages any more on this rank; TensorRT-LLM acts on
it when every rank has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtool.engine.trtllm.connector import ConnectorSettings
from kvtool.kv.shard import stored_layout
from kvtool.pool.base import Pool
from kvtool_trtllm.control import ControlWorker, address_of
from kvtool_trtllm.copies import prepare
from kvtool_trtllm.loading import Loader
from kvtool_trtllm.meta import Meta
from kvtool_trtllm.pages import EnginePages, of_layout, of_tensor
from kvtool_trtllm.saving import Saver
from kvtool_trtllm.scheduler import hello_of
from kvtool_trtllm.staging import Slots, Staging
from kvtool_trtllm.streams import Device, device_of

log = logging.getLogger(__name__)

OpenPool = Callable[[ConnectorSettings, int], "Pool | None"]


def open_pool(settings: ConnectorSettings, rank: int) -> Pool | None:
    """The pool that the settings name; None where they name none. One that does not run yet is no error."""
    if settings.pool_state is None:
        return None
    from kvtool.pool.client import PoolClient

    return PoolClient(
        Path(settings.pool_state),
        stored_layout(settings.kv.layout(), settings.stored_parallel),
        path=settings.pool_path,
        client_name=f"tensorrt_llm-{rank}",
        namespace=settings.namespace,
    )


class Worker:
    """`pool_of` and `device` are replaced by tests."""

    def __init__(
        self,
        settings: ConnectorSettings,
        rank: int,
        pool_of: OpenPool | None = None,
        device: Device | None = None,
    ) -> None:
        self._settings, self._rank, self._device = settings, rank, device
        self._pool = (pool_of or open_pool)(settings, rank)
        self._meta = Meta(0)
        self._stream: Any = None
        self._slots: Slots | None = None
        self._staging: Staging | None = None
        self._loader: Loader | None = None
        self._saver: Saver | None = None
        self._control: ControlWorker | None = None
        self._asked: dict[str, list[int]] = {"saving": [], "loading": []}

    # Start.

    def register_tensor(self, tensor: Any) -> None:
        """V1: the pool tensor. Raises EngineRefused: it is not what the settings say."""
        self._register(of_tensor(tensor, self._settings, self._rank))

    def register_layout(self, layout: Any) -> None:
        """V2: the layout. Raises EngineRefused: as above."""
        self._register(of_layout(layout, self._settings, self._rank))

    def _register(self, pages: EnginePages) -> None:
        if self._pool is None:
            log.warning("no pool is named, nothing is matched or saved rank=%d", self._rank)
            return
        device = self._device or device_of(pages.device)
        copies = prepare(pages.device.device)  # the kernels are compiled now, not in the first request
        self._slots = Slots(device, pages.size, self._settings.staging_bytes)
        self._staging = Staging(self._slots, pages, self._pool)
        self._loader = Loader(device, pages, self._staging, self._slots)
        self._saver = Saver(device, pages, self._slots, self._pool, self._settings.save_budget_s)
        address, key = address_of(self._settings.control, self._settings.key_file)
        hello = {**hello_of(self._settings), "rank": self._rank}
        self._control = ControlWorker(address, key, hello, self._staging)
        log.info(
            "connector rank=%d block_bytes=%d groups=%d staging_blocks=%d copies=%s",
            self._rank,
            pages.size,
            len(pages.groups),
            self._slots.count,
            copies,
        )

    # Each iteration.

    def bind(self, meta: Meta) -> None:
        self._meta = replace(meta, loads=(*self._meta.loads, *meta.loads))  # of one whose loads were never started too
        if self._saver is not None:
            if meta.forget:
                self._saver.forget(meta.forget)
            self._saver.begin(meta.saves)

    def start_loads(self, stream: Any) -> None:
        self._stream = stream
        loads, self._meta = self._meta.loads, Meta(self._meta.iteration)
        if self._loader is not None:
            self._loader.start(loads, stream)

    def wait_for_layer(self, layer: int, stream: Any) -> None:
        if self._loader is not None:
            self._loader.wait_for_layer(layer, stream)

    def save_layer(self, layer: int, stream: Any) -> None:
        if self._saver is not None:
            self._saver.layer_done(layer, stream)

    def forward_done(self) -> None:
        """The callable that the engine runs when a pass is queued; CUDA graphs included."""
        if self._saver is not None and self._stream is not None:
            self._saver.passed(self._stream)

    def finish_saves(self, stream: Any) -> None:
        if self._loader is not None:
            self._loader.check_waited()
        if self._saver is not None:
            self._saver.finish(stream)

    def get_finished(self, saving: Sequence[int], loading: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of the ids given so far, those that are done on this rank now; each once."""
        self._asked["saving"].extend(saving)
        self._asked["loading"].extend(loading)
        if self._loader is None:
            return [], []
        done = self._done("saving"), self._done("loading")
        self._loader.tidy()  # after the look: what is reported gives its memory back in the same call
        return done

    def _done(self, kind: str) -> list[int]:
        assert self._loader is not None
        started = self._loader.started if kind == "loading" else set(self._asked[kind])
        done = [one for one in self._asked[kind] if one in started and self._loader.done(one)]
        self._loader.started.difference_update(done if kind == "loading" else ())
        self._asked[kind] = [one for one in self._asked[kind] if one not in done]
        return done

    # For operators, and the end.

    def audit(self) -> list[tuple[str, str, float]]:
        """Staging memory held now: (kind, owner, age in seconds)."""
        return self._slots.audit() if self._slots is not None else []

    def drained(self, timeout_s: float) -> bool:
        """Whether everything saved so far is with the pool, at the latest after `timeout_s`."""
        return self._saver is None or self._saver.drained(timeout_s)

    def status(self) -> dict[str, Any]:
        if self._slots is None or self._staging is None or self._loader is None or self._saver is None:
            return {"pool": False}
        return {
            "pool": True,
            "staging_blocks": self._slots.count,
            "dropped": dict(self._slots.dropped),
            "staged": dict(self._staging.counts),
            "loaded_blocks": self._loader.blocks,
            "saves": dict(self._saver.counts),
        }

    def close(self) -> None:
        for part in (self._control, self._saver, self._loader):
            if part is not None:
                part.close()
        if self._pool is not None:
            self._pool.close()
