"""What a spec with target tensorrt_llm comes to: engines of both roles, LLM arguments, connector settings, the pool.

Read by `render`, the supervisor and the pool's keeper, so that all three mean the same engines and the same blocks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any, Literal

import yaml

from kvtool.config.spec import GpuRoleSpec, Spec
from kvtool.engine.manifest import Manifest, TensorRTLLMFields, read_manifest
from kvtool.engine.trtllm.bundle import Bundle, read_bundle
from kvtool.engine.trtllm.llm_args import Transceiver, llm_args, transfer_timeout_s
from kvtool.engine.trtllm.version import Adapter, Can, can
from kvtool.errors import EngineRefused
from kvtool.kv.layout import KVLayout
from kvtool.kv.shard import stored_layout

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


@dataclass(frozen=True)
class RoleTarget:
    """One role: its engine, and what the spec says of its instances."""

    role: Role
    engine: Path
    manifest: Manifest
    settings: GpuRoleSpec
    instances: int

    @property
    def fields(self) -> TensorRTLLMFields:
        assert self.manifest.tensorrt_llm is not None
        return self.manifest.tensorrt_llm

    @property
    def gpus(self) -> str:
        """As the served model is told: "0,1;2,3"."""
        return _lists(self.settings.gpus)


@dataclass(frozen=True)
class Target:
    spec: Spec
    can: Can
    prefill: RoleTarget
    decode: RoleTarget

    @property
    def roles(self) -> tuple[RoleTarget, RoleTarget]:
        return self.prefill, self.decode

    @property
    def handoff(self) -> Literal["pool", "transceiver"]:
        return self.spec.tensorrt_llm.handoff

    @property
    def connector(self) -> bool:
        """Whether engines offload to the pool. Beside a transceiver only in a version that is trusted with both."""
        asked = self.spec.tensorrt_llm.connector is not False and self.spec.pool.enabled
        wanted = asked and self.can.kv_connector
        return wanted and (self.handoff == "pool" or self.can.transceiver_with_connector)

    @property
    def stored_parallel(self) -> int:
        """The width under which blocks lie in the pool, so that both roles read them."""
        return lcm(*(each.fields.tensor_parallel for each in self.roles))

    @property
    def pool_layout(self) -> KVLayout:
        """Of the blocks in the pool: one stored shard each."""
        return stored_layout(self.prefill.manifest.layout, self.stored_parallel)


def target_of(spec: Spec) -> Target:
    """
    Raises:
        EngineRefused: no engine for TensorRT-LLM there, or the roles' engines are of different kinds.
    """
    found = {}
    for role in ROLES:
        settings: GpuRoleSpec = getattr(spec.tensorrt_llm, role)
        engine = settings.engine or spec.engine
        manifest = read_manifest(engine)
        if manifest.tensorrt_llm is None:
            raise EngineRefused(f"{engine}: wanted an engine for tensorrt_llm, found one for {manifest.target}")
        found[role] = RoleTarget(role, engine, manifest, settings, getattr(spec, role).instances)
    prefill, decode = found["prefill"], found["decode"]
    if prefill.fields.adapter != decode.fields.adapter:
        raise EngineRefused(
            f"{prefill.engine} is for {prefill.fields.adapter}, {decode.engine} for {decode.fields.adapter}; "
            "build both engines for the same version of TensorRT-LLM"
        )
    version = spec.tensorrt_llm.version or prefill.fields.version
    backend = Adapter(prefill.fields.adapter).backend
    return Target(spec, can(version, backend), prefill, decode)


def role_files(target: Target, role: RoleTarget) -> dict[str, str]:
    """Files beside the served model of one role: name -> text. The same bytes for the same spec and engines.

    Raises:
        EngineRefused: what the version cannot do, or values that do not fit each other.
    """
    bundle = read_bundle(role.engine)
    settings = role.settings
    cache: dict[str, Any] = bundle.llm.get("kv_cache_config", {})
    fraction = settings.memory_fraction or cache.get("free_gpu_memory_fraction", 0.9)
    args = llm_args(
        bundle,
        role=role.role,
        version=target.can.version,
        memory_fraction=fraction,
        host_cache_size=settings.host_cache_size // role.fields.world_size,
        transceiver=transceiver(target) if target.handoff == "transceiver" else None,
        connector=target.connector,
        cuda_graphs=settings.cuda_graphs,
        max_batch_size=settings.max_batch_size,
    )
    said = {"llm.yaml": args}
    if target.connector:
        said["connector.yaml"] = _connector(target, role, bundle)
    return {name: yaml.safe_dump(table, sort_keys=True, width=1000) for name, table in said.items()}


def _connector(target: Target, role: RoleTarget, bundle: Bundle) -> dict[str, Any]:
    """The bundle's settings with what the deployment decides: the namespace, and the width that both roles share."""
    pool = target.spec.pool
    connector = bundle.connector.model_copy(
        update={
            "namespace": pool.namespace,
            "pool_path": pool.path,
            "stored_parallel": target.stored_parallel,
            "tensor_parallel": role.fields.tensor_parallel,
        }
    )
    return connector.model_dump(mode="json", exclude_none=True)


def transceiver(target: Target) -> Transceiver:
    """Of both sides, which must agree: a buffer for the longest sequence of either, and a timeout from its bytes."""
    wanted = target.spec.tensorrt_llm.transceiver
    block = target.prefill.manifest.kv.block_tokens
    longest = max(each.fields.max_seq_len for each in target.roles)
    timeout_s = wanted.timeout
    if timeout_s is None:
        timeout_s = max(transfer_timeout_s(read_bundle(each.engine), wanted.bandwidth) for each in target.roles)
    return Transceiver(
        backend=wanted.backend,
        buffer_tokens=wanted.buffer_tokens or -(-longest // block) * block,
        timeout_s=timeout_s,
        runtime=wanted.runtime,
    )


def gpu_lists(target: Target) -> dict[Role, list[list[int]]]:
    """GPU ids of each instance of both roles: the spec's, or one after the other from 0, prefill first."""
    found: dict[Role, list[list[int]]] = {}
    following = itertools.count()
    for each in target.roles:
        counted = [[next(following) for _ in range(each.fields.world_size)] for _ in range(each.instances)]
        found[each.role] = each.settings.gpus or counted
    return found


def world_size(target: Target) -> int:
    """MPI ranks of the one server that TensorRT engines are served by: one for each GPU, and the orchestrator."""
    return 1 + sum(each.instances * each.fields.world_size for each in target.roles)


def engine_values(target: Target) -> dict[str, dict[str, object]]:
    """Placeholders of the models `context` and `generation`. Ranks are counted through: rank 0 is the orchestrator."""
    ranks, gpus = itertools.count(1), gpu_lists(target)
    found: dict[str, dict[str, object]] = {}
    for model, each in (("context", target.prefill), ("generation", target.decode)):
        own = [[next(ranks) for _ in range(each.fields.world_size)] for _ in range(each.instances)]
        settings = each.settings
        found[model] = {
            "model": model,
            "engine_dir": each.engine,
            "max_batch_size": settings.max_batch_size or each.fields.max_batch_size,
            "instances": each.instances,
            "memory_fraction": settings.memory_fraction or 0.9,
            "host_cache_size": settings.host_cache_size // each.fields.world_size,
            "block_reuse": str(each.fields.block_reuse).lower(),
            "gpu_device_ids": _lists(gpus[each.role]),
            "participant_ids": _lists(own),
        }
    return found


def _lists(ids: list[list[int]]) -> str:
    return ";".join(",".join(map(str, each)) for each in ids)
