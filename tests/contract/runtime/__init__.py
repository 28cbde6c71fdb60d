"""Behind a generated `tensorrt_llm`: recorded classes, a model that reads every KV byte, and an executor.

Names are found when they are asked for, so that light modules stay light; see `schema` for what comes from the record.
"""

from __future__ import annotations

import importlib
from typing import Any

from .schema import VERSION, recorded

__version__ = VERSION
_FROM = {
    "llm": "LLM",
    "result": "RequestOutput GenerationResult CompletionOutput",
    "params": "SamplingParams GuidedDecodingParams SchedulingParams LoRARequest logger",
    "request": "LlmRequest LlmRequestState FinishReason KvCacheRetentionConfig",
    "ranks": "mpi_rank mpi_world_size local_mpi_rank mpi_comm mpi_barrier mpi_broadcast mpi_allgather Mapping",
    "connector": "KvCacheConnectorScheduler KvCacheConnectorWorker RequestData SchedulerOutput",
    "manager": "KvCacheConnectorManager",
    "layout": "KvCacheLayout KvCacheLayerGroupLayout KvCacheRegion KvCacheBufferRef valid_page_slots",
    "build": "Engine EngineConfig get_engine_version get_model_format",
}
_WHERE = {name: module for module, names in _FROM.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
    if (found := recorded(name)) is not None:
        return found
    raise AttributeError(f"tensorrt_llm {VERSION}: {name!r} is not recorded")
