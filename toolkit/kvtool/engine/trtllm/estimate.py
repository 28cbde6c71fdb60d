"""What ranks of one host share, and how long moving KV takes beside computing it again.

Pure arithmetic. Times are estimates from the maker's figures with the shares below; they rank choices and set timeouts,
and are not results.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.engine.facts import ModelFacts, count
from kvtool.engine.trtllm.gpus import Gpu, gpu
from kvtool.engine.trtllm.settings import Node, TrtllmSettings
from kvtool.errors import EngineRefused
from kvtool.units import show_size

PCIE_SHARE = 0.8
"""Of PCIe's figure, for pinned copies of whole blocks."""
HOST_COPY = 10 * 10**9
"""Bytes/s at which one rank copies and checks blocks of the pool into its pinned staging."""
FLOPS_SHARE = 0.45
"""Of the peak, in prefill."""
HOST_SHARE_MAX = 0.9
"""Of the host's memory; the processes themselves live in the rest."""
TIMEOUT_SLACK = 10
"""A transfer may take so many times its estimate before it counts as lost."""


@dataclass(frozen=True)
class HostTier:
    """Bytes of host memory for each rank of a node, its GPUs all taken."""

    ranks: int
    pool: int
    own: int
    """TensorRT-LLM's host_cache_size, which is for each rank."""
    staging: int
    limit: int
    """What all of it must stay below, on the node."""

    @property
    def node_total(self) -> int:
        return self.ranks * (self.pool + self.own + self.staging)


def host_tier(node: Node, staging: int, where: str) -> HostTier:
    """The node's memory divided by the ranks on it. `staging`: pinned bytes of each rank's connector.

    Raises:
        EngineRefused: together they take more than HOST_SHARE_MAX of it; with what would fit.
    """
    found = HostTier(
        ranks=node.gpus,
        pool=node.pool // node.gpus,
        own=node.host_cache // node.gpus,
        staging=staging,
        limit=int(node.memory * HOST_SHARE_MAX),
    )
    if found.node_total > found.limit:
        left = max(0, found.limit - found.ranks * (found.staging + found.own))
        raise EngineRefused(
            f"{where}: node: {node.gpus} ranks want {show_size(found.node_total)} of host memory (pool "
            f"{show_size(node.pool)}, host_cache {show_size(node.host_cache)}, {show_size(staging)} of staging each); "
            f"{show_size(found.limit)} is {HOST_SHARE_MAX:.0%} of the {show_size(node.memory)} there are; lower pool "
            f"to {show_size(left)}, or raise memory if the cgroup allows more"
        )
    return found


@dataclass(frozen=True)
class Refetch:
    """Bringing the KV of a prefix to the GPUs, or computing it again. Seconds; bytes on one rank."""

    tokens: int
    size: int
    here_s: float
    """From the pool's memory on the same node."""
    away_s: float
    """From another node's: over the network into staging, where it is checked."""
    compute_s: float


def refetch(facts: ModelFacts, settings: TrtllmSettings, kv_token: int, tokens: int) -> Refetch:
    """`kv_token`: KV bytes of a token on one rank. Ranks fetch at the same time, each its part."""
    size = kv_token * tokens
    onto_gpu = size / (gpu(settings.gpu).pcie * PCIE_SHARE)
    return Refetch(
        tokens=tokens,
        size=size,
        here_s=size / HOST_COPY + onto_gpu,
        away_s=size / settings.node.network + size / HOST_COPY + onto_gpu,
        compute_s=prefill_flops(facts, tokens)
        / (settings.tensor_parallel * flops(gpu(settings.gpu), settings) * FLOPS_SHARE),
    )


def prefill_flops(facts: ModelFacts, tokens: int) -> float:
    """Of one prompt: 2 for each active parameter and token, and causal attention's two products over tokens^2 / 2."""
    qk, v = facts.head_dim, facts.latent.v_dim if facts.latent else facts.head_dim
    return 2.0 * count(facts).active * tokens + facts.layers * facts.heads * (qk + v) * float(tokens) ** 2


def flops(card: Gpu, settings: TrtllmSettings) -> float:
    """Peak of one GPU for these weights: int4 weights are multiplied in 16 bits, nvfp4 at twice FP8's rate."""
    if settings.quantisation == "nvfp4":
        return 2 * card.fp8_flops
    return card.fp8_flops if settings.quantisation in ("fp8", "fp8_block_scales") else card.bf16_flops


def transfer_s(size: int, bandwidth: int) -> float:
    return size / bandwidth


def timeout_s(size: int, bandwidth: int, floor_s: float = 30.0) -> float:
    """How long a transfer of `size` bytes may take before it counts as lost: by its size, and never under `floor_s`."""
    return max(floor_s, TIMEOUT_SLACK * transfer_s(size, bandwidth))
