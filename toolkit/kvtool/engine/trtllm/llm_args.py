"""The keywords that a worker passes to `tensorrt_llm.LLM`: the bundle's own, and what its role adds.

Every keyword is looked up in the recorded signature of the version before it is passed (`signatures.check_keywords`),
since the real class can be asked on a GPU only.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from kvtool.engine.trtllm.bundle import LLM_FILE, Bundle
from kvtool.engine.trtllm.connector import MODULE, SCHEDULER_CLASS, WORKER_CLASS
from kvtool.engine.trtllm.signatures import check_keywords
from kvtool.engine.trtllm.version import Can, adapter_for, can
from kvtool.errors import EngineRefused

Role = Literal["prefill", "decode", "both"]
POLICY = "GUARANTEED_NO_EVICT"
"""The only one with which a connector's claims are safe: another may take a request's blocks back while they load."""
TRANSCEIVERS = ("NIXL", "UCX")
"""Those that kvtool sets up. MPI is on its way out, MOONCAKE needs a service of its own, DEFAULT is a guess."""


@dataclass(frozen=True)
class Transceiver:
    """TensorRT-LLM's own transfer of KV from prefill to decode. Both sides must have equal values."""

    backend: str
    buffer_tokens: int
    """A whole number of blocks, and at least the longest input."""
    timeout_s: float
    runtime: str | None = None
    """CPP or PYTHON; None: the version's default. Only where the version has the keyword."""


def llm_args(
    bundle: Bundle,
    *,
    role: Role,
    version: str | None = None,
    memory_fraction: float | None = None,
    host_cache_size: int = 0,
    transceiver: Transceiver | None = None,
    connector: bool = True,
    cuda_graphs: bool = True,
    max_batch_size: int | None = None,
    tokenizer: bool = False,
) -> dict[str, Any]:
    """Keywords for `LLM(**...)`, plain values only, so that they can be written as YAML.

    `version` is the TensorRT-LLM that will run (None: the bundle's). `memory_fraction`: of the GPU memory that is free
    once weights are loaded (None: the bundle's). `host_cache_size`: TensorRT-LLM's own host tier, bytes for each rank.
    `tokenizer` False: workers take and give token ids, and load none.

    Raises:
        EngineRefused: what the version cannot do, or values that do not fit each other.
    """
    version = version or bundle.fields.version
    _check_adapter(bundle, version)
    able = can(version)
    args = deepcopy(bundle.llm)
    if max_batch_size is not None:
        _check_batch(bundle, max_batch_size)
        args["max_batch_size"] = max_batch_size
    if memory_fraction is not None and not 0 < memory_fraction < 1:
        raise EngineRefused(f"memory_fraction: wanted more than 0 and less than 1, found {memory_fraction}")
    args["skip_tokenizer_init"] = not tokenizer
    if tokenizer:
        args["tokenizer"] = str(bundle.directory)
    cache = args["kv_cache_config"]
    if memory_fraction is not None:
        cache["free_gpu_memory_fraction"] = memory_fraction
    if host_cache_size:
        cache["host_cache_size"] = host_cache_size
    args["cuda_graph_config"] = _graphs(args, role, cuda_graphs)
    if connector:
        _add_connector(args, bundle, able, graphs=args["cuda_graph_config"] is not None)
    if transceiver is not None:
        _add_transceiver(args, bundle, able, transceiver, role, connector)
    check_keywords("LLM", args, version, f"{bundle.directory / LLM_FILE} ({role})")
    return args


def transfer_timeout_s(bundle: Bundle, link_bytes_per_s: float, floor_s: float = 10.0) -> float:
    """How long the longest sequence may take from prefill to decode: ten times its bytes over the link, whole seconds,
    not less than `floor_s`. Constant timeouts were seen to be too short for long prompts."""
    size = bundle.fields.max_seq_len * bundle.manifest.layout.token_size
    return max(floor_s, float(ceil(10 * size / link_bytes_per_s)))


def _check_adapter(bundle: Bundle, version: str) -> None:
    built, runs = bundle.fields.adapter, adapter_for(version).value
    if built != runs:
        raise EngineRefused(
            f"{bundle.directory}: built for TensorRT-LLM {bundle.fields.version} ({built}), to run on {version} "
            f"({runs}); build it again with --tensorrt-llm-version {version}"
        )


def _check_batch(bundle: Bundle, max_batch_size: int) -> None:
    if not 1 <= max_batch_size <= bundle.fields.max_num_tokens:
        raise EngineRefused(
            f"max_batch_size: wanted 1 to max_num_tokens ({bundle.fields.max_num_tokens}), found {max_batch_size}"
        )


def _graphs(args: dict[str, Any], role: Role, wanted: bool) -> dict[str, Any] | None:
    """CUDA graphs are for decode steps; an instance that only computes prompts replays none."""
    if not wanted or role == "prefill":
        return None
    return {"max_batch_size": args["max_batch_size"], "enable_padding": True}


def _add_connector(args: dict[str, Any], bundle: Bundle, able: Can, *, graphs: bool) -> None:
    able.need("kv_connector", "KV cache connector")
    if graphs:
        able.need("connector_cuda_graphs", "CUDA graphs beside a connector (set cuda_graphs: false)")
    for key, what in (("pipeline_parallel", "pipeline"), ("context_parallel", "context")):
        if getattr(bundle.fields, key) > 1:
            raise EngineRefused(
                f"{bundle.directory}: {what} parallelism {getattr(bundle.fields, key)} with the KV-offload connector: "
                "TensorRT-LLM registers one rank's pool only; build with tensor parallelism alone, or without connector"
            )
    if bundle.fields.max_beam_width > 1:
        raise EngineRefused(f"{bundle.directory}: max_beam_width: wanted 1 with the connector, beams share no blocks")
    if args.get("enable_attention_dp"):
        able.need("attention_dp_connector", "connector under attention data parallelism")
        if args["kv_cache_config"].get("host_cache_size"):
            raise EngineRefused(
                "host_cache_size: TensorRT-LLM's own host tier and a connector exclude each other under attention data "
                "parallelism; set it to 0, the pool is the host tier"
            )
    args["kv_connector_config"] = {
        "connector_module": MODULE,
        "connector_scheduler_class": SCHEDULER_CLASS,
        "connector_worker_class": WORKER_CLASS,
    }
    args["kv_cache_config"] |= {"enable_partial_reuse": False, "copy_on_partial_reuse": False}
    args["scheduler_config"] = {"capacity_scheduler_policy": POLICY}


def _add_transceiver(
    args: dict[str, Any], bundle: Bundle, able: Can, wanted: Transceiver, role: Role, connector: bool
) -> None:
    if connector:
        able.need(
            "transceiver_with_connector",
            "cache transceiver beside a connector (handoff: pool carries KV through the connector alone)",
        )
    if wanted.backend not in TRANSCEIVERS:
        raise EngineRefused(f"transceiver.backend: wanted one of {', '.join(TRANSCEIVERS)}, found {wanted.backend!r}")
    able.need_value("transceiver_backends", wanted.backend, "transceiver.backend")
    block, longest = bundle.manifest.layout.block_tokens, bundle.fields.max_seq_len
    if wanted.buffer_tokens % block or wanted.buffer_tokens < longest:
        raise EngineRefused(
            f"transceiver.buffer_tokens: wanted a multiple of tokens_per_block ({block}) and at least max_seq_len "
            f"({longest}), found {wanted.buffer_tokens}; {-(-longest // block) * block} fits"
        )
    if wanted.timeout_s <= 0:
        raise EngineRefused(f"transceiver.timeout: wanted more than 0 s, found {wanted.timeout_s} s")
    config: dict[str, Any] = {
        "backend": wanted.backend,
        "max_tokens_in_buffer": wanted.buffer_tokens,
        "kv_transfer_timeout_ms": ceil(wanted.timeout_s * 1000),
    }
    if wanted.runtime is not None:
        able.need_value("transceiver_runtimes", wanted.runtime, "transceiver.runtime")
        config["transceiver_runtime"] = wanted.runtime
    args["cache_transceiver_config"] = config
    if role == "prefill":
        args["disable_overlap_scheduler"] = True  # a context server answers after the step that it sends from
