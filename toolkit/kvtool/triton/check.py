"""What can be held against a deployment before a process is started: its spec, its engines, what is rendered.

Faults are gathered, not raised one at a time: who deploys to GPUs waits minutes for the next one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from math import lcm
from pathlib import Path

from kvtool.config.check import faults as spec_faults
from kvtool.config.environment import environment_faults
from kvtool.config.fault import Fault
from kvtool.config.gpu_places import place_faults
from kvtool.config.gpus import Facts, Role
from kvtool.config.gpus import faults as gpu_faults
from kvtool.config.spec import GpuRoleSpec, Spec
from kvtool.engine.manifest import Manifest, read_manifest
from kvtool.engine.trtllm.directory import findings, sequences_that_fit
from kvtool.engine.trtllm.gpus import gpu
from kvtool.engine.trtllm.version import Adapter, Can, can
from kvtool.errors import EngineRefused, KvtoolError
from kvtool.kv.shard import stored_layout
from kvtool.triton.rendered import config_faults, role_faults

ROLES = ("prefill", "decode")


def faults(spec: Spec, repositories: Path | None = None) -> list[Fault]:
    """Every fault; empty: the spec can be served. `repositories`: rendered ones to check in place of fresh ones."""
    found = list(_faults(spec, repositories))
    return list(dict.fromkeys(found))


def _faults(spec: Spec, repositories: Path | None) -> Iterator[Fault]:
    manifests: dict[str, Manifest] = {}
    for key, path in _engines(spec).items():
        try:
            manifests[key] = read_manifest(path)
        except KvtoolError as error:
            yield Fault(key, str(error))
    for key, manifest in manifests.items():
        if key == "engine" or manifest.target != spec.target:
            yield from spec_faults(spec, manifest)
    if spec.target == "torch":
        if not manifests:
            return
        yield from _rendered(spec, repositories, None, {})
        return
    of_roles = {role: manifests[_key(spec, role)] for role in ROLES if _key(spec, role) in manifests}
    of_roles = {role: manifest for role, manifest in of_roles.items() if manifest.tensorrt_llm}
    for key, path in _engines(spec).items():
        if key in manifests and manifests[key].tensorrt_llm:
            yield from (Fault(where, says) for where, says in findings(path, manifests[key]))
    yield from environment_faults(spec)
    if len(of_roles) < 2:
        return
    try:
        able = _able(spec, of_roles["prefill"])
    except KvtoolError as error:
        yield Fault("tensorrt_llm.version", str(error))
        return
    roles = [_role(spec, role, manifest) for role, manifest in of_roles.items()]
    try:
        arch = _arch(spec)
    except KvtoolError as error:
        yield Fault("tensorrt_llm.launch.gpu", str(error))
        return
    facts = Facts(roles[0], roles[1], able, _stored_size(roles, of_roles["prefill"]), arch)
    plain = [*gpu_faults(spec, facts), *place_faults(spec, facts), *_room(spec, of_roles)]
    yield from plain
    if not plain or repositories is not None:  # what cannot be served is not rendered
        yield from _rendered(spec, repositories, facts, of_roles)


def _engines(spec: Spec) -> dict[str, Path]:
    """Key of the spec -> engine directory, of all that are used."""
    if spec.target == "torch":
        return {"engine": spec.engine}
    return {_key(spec, role): _settings(spec, role).engine or spec.engine for role in ROLES}


def _settings(spec: Spec, role: str) -> GpuRoleSpec:
    found: GpuRoleSpec = getattr(spec.tensorrt_llm, role)
    return found


def _key(spec: Spec, role: str) -> str:
    return f"tensorrt_llm.{role}.engine" if _settings(spec, role).engine else "engine"


def _able(spec: Spec, manifest: Manifest) -> Can:
    """What the TensorRT-LLM on the hosts can do. Raises EngineRefused: another adapter than built the engine."""
    fields = manifest.tensorrt_llm
    assert fields is not None
    found = can(spec.tensorrt_llm.version or fields.version, Adapter(fields.adapter).backend)
    if found.adapter.value != fields.adapter:
        raise EngineRefused(
            f"{manifest.name} was built for TensorRT-LLM {fields.version} ({fields.adapter}), found {found.version} "
            f"({found.adapter.value}); build it again for {found.version}, or set the version that is on the hosts"
        )
    return found


def _arch(spec: Spec) -> str | None:
    launch = spec.tensorrt_llm.launch
    known = gpu(launch.gpu).arch if launch.gpu else None
    if known and launch.gpu_arch and known != launch.gpu_arch:
        raise EngineRefused(f"{launch.gpu} is {known}, launch.gpu_arch says {launch.gpu_arch}; leave gpu_arch out")
    return launch.gpu_arch or known


def _role(spec: Spec, name: str, manifest: Manifest) -> Role:
    assert manifest.tensorrt_llm is not None
    return Role(
        name=name,
        settings=_settings(spec, name),
        instances=getattr(spec, name).instances,
        engine=manifest.name,
        model_digest=manifest.model_digest,
        kv=manifest.layout,
        built=manifest.tensorrt_llm,
    )


def _stored_size(roles: list[Role], manifest: Manifest) -> int | None:
    try:
        return stored_layout(manifest.layout, lcm(*(role.built.tensor_parallel for role in roles))).block_size
    except (KvtoolError, ValueError):
        return None


def _room(spec: Spec, manifests: Mapping[str, Manifest]) -> Iterator[Fault]:
    """Whether each role's GPUs hold one full sequence at the least, where the spec says which GPUs they are."""
    kind = spec.tensorrt_llm.launch.gpu
    for role, manifest in manifests.items() if kind else ():
        settings, fields = _settings(spec, role), manifest.tensorrt_llm
        assert fields is not None and kind is not None
        try:
            held = sequences_that_fit(
                settings.engine or spec.engine, manifest, kind, settings.memory_fraction, settings.max_batch_size
            )
        except KvtoolError as error:
            yield Fault("tensorrt_llm.launch.gpu", f"what fits cannot be worked out: {error}")
            continue
        if held < 1:
            share = settings.memory_fraction if settings.memory_fraction is not None else "the engine's"
            yield Fault(
                f"tensorrt_llm.{role}.memory_fraction",
                f"wanted room for one sequence of {fields.max_seq_len} tokens on a {kind}, found less at {share}; "
                "raise it, build for shorter sequences, or over more GPUs (kvtool build --explain)",
            )


def _rendered(
    spec: Spec, repositories: Path | None, facts: Facts | None, manifests: Mapping[str, Manifest]
) -> Iterator[Fault]:
    if repositories is not None:
        yield from _hold(spec, repositories, facts, manifests)
        return
    from kvtool.triton.render import render

    with tempfile.TemporaryDirectory(prefix="kvtool-check-") as folder:
        out = Path(folder, "repositories")
        try:
            render(spec, out)
        except KvtoolError as error:
            yield Fault("render", str(error))
            return
        for fault in _hold(spec, out, facts, manifests):
            yield Fault(fault.key.replace(f"{out}/", ""), fault.says)


def _hold(spec: Spec, out: Path, facts: Facts | None, manifests: Mapping[str, Manifest]) -> Iterator[Fault]:
    yield from config_faults(out)
    if facts is not None and facts.decode.built.adapter != "engine-1.2":
        yield from role_faults(out, spec, facts, manifests)
