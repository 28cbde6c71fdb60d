"""kvtool's KV cache connector for TensorRT-LLM: the module that `kv_connector_config.connector_module` names.

The base classes are where this release has them: 1.3 and later in `connectors`, before that beside it. Which callbacks
a release calls differs; those that it does not know are never called. Importing this module imports tensorrt_llm.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.engine.trtllm.connector import read_settings
from kvtool.engine.trtllm.version import can, installed
from kvtool.errors import EngineRefused, Missing
from kvtool_trtllm.control import Control, address_of
from kvtool_trtllm.meta import Meta
from kvtool_trtllm.refusals import check_engine
from kvtool_trtllm.scheduler import Scheduler, hello_of
from kvtool_trtllm.worker import Worker

_WHERE = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


def _bases() -> tuple[Any, Any]:
    """
    Raises:
        Missing: no TensorRT-LLM here.
        EngineRefused: one without connectors.
    """
    if installed() is None:
        raise Missing(
            "kvtool_trtllm.connector is loaded by TensorRT-LLM, and tensorrt_llm is not installed here; "
            "name it in kv_connector_config on a GPU host"
        )
    for name in _WHERE:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and name.startswith(error.name):
                continue
            raise
        return module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker
    raise EngineRefused(f"tensorrt_llm {installed()}: no KV cache connectors in it; install 1.1 or later")


if TYPE_CHECKING:

    class _SchedulerBase:
        def __init__(self, llm_args: Any) -> None: ...

    class _WorkerBase(_SchedulerBase):
        def bind_connector_meta(self, metadata: object) -> None: ...

else:
    _SchedulerBase, _WorkerBase = _bases()


class KvtoolConnectorScheduler(_SchedulerBase):
    """On rank 0. See `scheduler.Scheduler`."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        settings = read_settings()
        check_engine(llm_args, settings, can(str(installed())))
        address, key = address_of(settings.control, settings.key_file)
        control = Control(address, key, settings.tensor_parallel, hello_of(settings))
        self.substance = Scheduler(settings, control)
        self._control = control
        self._pool = settings.pool_state is not None

    def wait_for_initialization(self) -> None:
        if self._pool:  # workers without a pool have nothing to stage, and do not call
            self._control.wait_for_workers()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self.substance.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        self.substance.allocated(request, [block_ids])

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        self.substance.allocated(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        return self.substance.build(scheduler_output.new_requests, scheduler_output.cached_requests)

    def request_finished(self, request: Any, cache_block_ids: Any) -> bool:
        return self.substance.finished(request)

    request_finished_by_layer_group = request_finished

    def request_reset(self, request: Any) -> None:
        self.substance.reset(request)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        self.substance.cancel_load(request, start, end)

    def try_abort_request(self, request_id: int, reason: str = "") -> bool:
        """A later release asks whether a request may go at once. A load may be writing to its pages: no."""
        return False

    def finalize_successful_load(self, request_id: int) -> bool:
        return True

    def shutdown(self) -> None:
        self.substance.close()


class KvtoolConnectorWorker(_WorkerBase):
    """On every rank. See `worker.Worker`."""

    supports_attention_dp = False

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        settings = read_settings()
        check_engine(llm_args, settings, can(str(installed())))
        self.substance = Worker(settings, rank_of(settings.tensor_parallel))

    def register_forward_pass_callable(self) -> Callable[[], None]:
        return self.substance.forward_done

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        self.substance.register_tensor(kv_cache_tensor)

    def register_kv_cache_layout(self, layout: Any) -> None:
        self.substance.register_layout(layout)

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        assert isinstance(metadata, Meta), f"metadata of another connector: {type(metadata).__name__}"
        self.substance.bind(metadata)

    def start_load_kv(self, stream: Any) -> None:
        self.substance.start_loads(stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        self.substance.wait_for_layer(layer_idx, stream)

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        self.substance.save_layer(layer_idx, stream)

    def wait_for_save(self, stream: Any) -> None:
        self.substance.finish_saves(stream)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return self.substance.get_finished(finished_gen_req_ids, started_loading_req_ids)

    def take_failed_load_request_ids(self) -> set[int]:
        """None, ever: what was claimed is held and checked by every rank before."""
        return set()

    def abort_request(self, request_id: int) -> bool:
        return False

    try_abort_request = abort_request

    def finalize_finished_loads(self, request_ids: list[int], stream: Any) -> None:
        """Loads that are reported as finished have ended on the device already."""

    def shutdown(self) -> None:
        self.substance.close()


def rank_of(world: int) -> int:
    """This process's rank in the engine."""
    if world == 1:
        return 0
    return int(importlib.import_module("tensorrt_llm._utils").mpi_rank())
