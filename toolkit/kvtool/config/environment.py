"""Environment that a spec gives its GPU servers: what is known to break transfers or starts, and what is a secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from kvtool.config.fault import Fault
from kvtool.config.spec import Spec

_OURS = {
    "CUDA_VISIBLE_DEVICES": "tensorrt_llm.*.gpus names the GPUs",
    "TRTLLM_VISIBLE_DEVICES": "tensorrt_llm.*.gpus names the GPUs",
    "TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE": "tensorrt_llm.transceiver.buffer_tokens sizes the buffer of both sides",
    "TRTLLM_USE_UCX_KVCACHE": "tensorrt_llm.transceiver.backend chooses",
    "TRTLLM_USE_NIXL_KVCACHE": "tensorrt_llm.transceiver.backend chooses",
    "TRTLLM_USE_MPI_KVCACHE": "tensorrt_llm.transceiver.backend chooses",
}
_JOB = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_", "SLURM_")
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_KEY|ACCESS_KEY)(_|$)")
_NIXL = ("UCX", "LIBFABRIC")
_TCP = {"all", "tcp"}
_CUDA = {"all", "cuda", "cuda_copy"}


def environment_faults(spec: Spec) -> Iterator[Fault]:
    for role in ("prefill", "decode"):
        env: Mapping[str, str] = getattr(spec.tensorrt_llm, role).env
        for name, value in env.items():
            yield from (Fault(f"tensorrt_llm.{role}.env.{name}", says) for says in _says(spec, name, value))
    prefill, decode = spec.tensorrt_llm.prefill.env, spec.tensorrt_llm.decode.env
    for name in ("UCX_TLS", "TRTLLM_NIXL_KVCACHE_BACKEND"):
        if prefill.get(name) != decode.get(name):
            yield Fault(
                f"tensorrt_llm.decode.env.{name}",
                f"prefill has {prefill.get(name)!r}, decode has {decode.get(name)!r}; two sides of one transfer need "
                "the same",
            )


def _says(spec: Spec, name: str, value: str) -> Iterator[str]:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        yield "wanted a name of letters, digits and _"
    if name in _OURS:
        yield f"found {value!r}, which kvtool sets: {_OURS[name]}; take it out"
    if name.startswith("KVTOOL_"):
        yield f"found {value!r}, which kvtool sets by itself; take it out"
    if name.startswith(_JOB):
        yield f"found {value!r}: it makes TensorRT-LLM a rank of a job that is not its own, and hang; take it out"
    if _SECRET.search(name):
        yield "looks like a secret; specs are copied and shown: put it in a file or in tensorrt_llm.launch.secret"
    if name == "UCX_TLS":
        yield from _transports(value)
    if name == "UCX_NET_DEVICES" and value.split(":")[0] == "lo" and spec.tensorrt_llm.launch.nodes > 1:
        yield f"found {value!r}, the loopback device, on {spec.tensorrt_llm.launch.nodes} nodes; name a network device"
    if name == "TRTLLM_NIXL_KVCACHE_BACKEND":
        if value not in _NIXL:
            yield f"wanted one of {', '.join(_NIXL)}, found {value!r}"
        elif spec.tensorrt_llm.transceiver.backend != "NIXL":
            yield (
                f"found {value!r} with tensorrt_llm.transceiver.backend: {spec.tensorrt_llm.transceiver.backend}; take "
                "it out, or set the backend to NIXL"
            )


def _transports(value: str) -> Iterator[str]:
    """UCX_TLS: a list of what may be used, or behind ^ of what may not."""
    names = {name.strip() for name in value.removeprefix("^").split(",") if name.strip()}
    without = value.startswith("^")
    for group, what in ((_TCP, "tcp"), (_CUDA, "cuda_copy")):
        if bool(group & names) == without:
            why = "connections are made" if what == "tcp" else "GPU memory is read"
            yield f"wanted {what} among the transports, by which {why}, found {value!r}; add it, or leave UCX_TLS unset"
