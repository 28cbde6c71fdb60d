"""Whether a spec for GPUs fits its engines, its hosts and the TensorRT-LLM there: rules over plain facts.

Prefill and decode are two servers, and what differs between them unseen is what goes wrong: KV dtype, block size,
buffers, widths, versions. Every rule is a generator, so that a spec is told all of its faults at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvtool.config.fault import Fault
from kvtool.config.spec import GpuRoleSpec, Spec
from kvtool.errors import KvtoolError
from kvtool.units import show_size


class KVFacts(Protocol):
    @property
    def block_tokens(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def kv_factor(self) -> int: ...

    @property
    def token_size(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


class BuiltFacts(Protocol):
    """`engine.manifest.TensorRTLLMFields`."""

    adapter: str
    version: str
    tensorrt_version: str | None
    gpu_arch: str | None
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    kv_dtype: str
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    max_beam_width: int
    block_reuse: bool

    @property
    def world_size(self) -> int: ...


class Able(Protocol):
    """`engine.trtllm.version.Can`: both raise KvtoolError with the version that can."""

    @property
    def version(self) -> str: ...

    @property
    def kv_connector(self) -> bool: ...

    @property
    def transceiver_with_connector(self) -> bool: ...

    def need(self, feature: str, what: str) -> None: ...

    def need_value(self, feature: str, value: str, what: str) -> None: ...


@dataclass(frozen=True)
class Role:
    """One role of a spec with its engine. `name`: prefill or decode."""

    name: str
    settings: GpuRoleSpec
    instances: int
    engine: str
    model_digest: str
    kv: KVFacts
    built: BuiltFacts

    @property
    def key(self) -> str:
        return f"tensorrt_llm.{self.name}"

    @property
    def batch(self) -> int:
        return self.settings.max_batch_size or self.built.max_batch_size


@dataclass(frozen=True)
class Facts:
    """`able`: of the TensorRT-LLM on the hosts. `stored_size`: of one block in the pool; None: no layout for it.
    `arch`: of the GPUs, None: not known."""

    prefill: Role
    decode: Role
    able: Able
    stored_size: int | None
    arch: str | None

    @property
    def roles(self) -> tuple[Role, Role]:
        return self.prefill, self.decode

    @property
    def longest(self) -> int:
        return max(role.built.max_seq_len for role in self.roles)


def faults(spec: Spec, facts: Facts) -> Iterator[Fault]:
    """Everything that is wrong between engines, version and hand-off, rule by rule; places: `config.gpu_places`."""
    for rule in (_versions, _agreement, _handoff, _transceiver, _connector):
        yield from rule(spec, facts)


def _versions(spec: Spec, facts: Facts) -> Iterator[Fault]:
    runs, launch = facts.able.version, spec.tensorrt_llm.launch
    for role in facts.roles:
        built = role.built
        if built.adapter == "engine-1.2" and built.version != runs:
            yield Fault(
                "tensorrt_llm.version",
                f"{role.engine} is a TensorRT engine of TensorRT-LLM {built.version}, found {runs}; an engine loads "
                "only in the release that built it: build it again, or set the version so",
            )
        wanted, there = built.tensorrt_version, launch.tensorrt_version
        if wanted is not None and there is not None and wanted != there:
            yield Fault(
                "tensorrt_llm.launch.tensorrt_version",
                f"{role.engine} was built with TensorRT {wanted}, found {there}; an engine is bound to the exact "
                "TensorRT: use an image with that one, or build it again",
            )
        if None not in (facts.arch, built.gpu_arch) and facts.arch != built.gpu_arch:
            yield Fault(
                "tensorrt_llm.launch.gpu_arch",
                f"{role.engine} was built for {built.gpu_arch}, the GPUs are {facts.arch}; build it again for them, or "
                "point the spec at GPUs of that kind",
            )


def _agreement(spec: Spec, facts: Facts) -> Iterator[Fault]:
    prefill, decode = facts.roles
    both = {
        "adapter": (prefill.built.adapter, decode.built.adapter),
        "model_digest": (prefill.model_digest[:12], decode.model_digest[:12]),
        "kv dtype": (prefill.kv.dtype, decode.kv.dtype),
        "kv_dtype": (prefill.built.kv_dtype, decode.built.kv_dtype),
        "tokens_per_block": (prefill.kv.block_tokens, decode.kv.block_tokens),
        "kv layout": (prefill.kv.fingerprint[:12], decode.kv.fingerprint[:12]),
        "gpu_arch": (prefill.built.gpu_arch, decode.built.gpu_arch),
    }
    for what, (here, there) in both.items():
        if here != there:
            yield Fault(
                "tensorrt_llm.decode.engine",
                f"{what}: prefill ({prefill.engine}) has {here}, decode ({decode.engine}) has {there}; KV of one is "
                "not KV of the other: build both of one checkpoint with equal settings",
            )
    if decode.built.max_seq_len < prefill.built.max_seq_len:
        yield Fault(
            "tensorrt_llm.decode.engine",
            f"max_seq_len: wanted at least prefill's {prefill.built.max_seq_len}, found {decode.built.max_seq_len}; "
            "what prefill takes decode must continue: build decode for longer sequences",
        )
    for role in facts.roles:
        block = role.kv.block_tokens
        if block < 2 or block & (block - 1):
            yield Fault(
                f"{role.key}.engine", f"tokens_per_block: wanted a power of two above 1, found {block}; build it again"
            )
        if role.built.max_beam_width > 1:
            yield Fault(
                f"{role.key}.engine",
                f"max_beam_width: wanted 1, found {role.built.max_beam_width}; neither hand-off carries beams",
            )


def _handoff(spec: Spec, facts: Facts) -> Iterator[Fault]:
    """Of TensorRT engines the C++ backend hands over by itself, whatever the spec says."""
    wanted = spec.tensorrt_llm
    if wanted.handoff != "pool" or facts.decode.built.adapter == "engine-1.2":
        return
    if not spec.pool.enabled:
        yield Fault(
            "pool.enabled",
            "wanted true with tensorrt_llm.handoff: pool, found false; enable it, or set handoff: transceiver",
        )
    if wanted.connector is False:
        yield Fault(
            "tensorrt_llm.connector",
            "wanted true with handoff: pool, found false; the connector is what carries KV: set it, or handoff: "
            "transceiver",
        )


def _transceiver(spec: Spec, facts: Facts) -> Iterator[Fault]:
    if spec.tensorrt_llm.handoff != "transceiver":
        return
    wanted, key = spec.tensorrt_llm.transceiver, "tensorrt_llm.transceiver"
    yield from _able(
        f"{key}.backend", lambda: facts.able.need_value("transceiver_backends", wanted.backend, "transceiver.backend")
    )
    if wanted.runtime is not None:
        runtime = wanted.runtime
        yield from _able(
            f"{key}.runtime", lambda: facts.able.need_value("transceiver_runtimes", runtime, "transceiver.runtime")
        )
    block = facts.prefill.kv.block_tokens
    fits = -(-facts.longest // block) * block
    buffer = wanted.buffer_tokens
    if buffer is not None and (buffer % block or buffer < facts.longest):
        yield Fault(
            f"{key}.buffer_tokens",
            f"wanted a multiple of tokens_per_block ({block}) and at least the longest sequence ({facts.longest} "
            f"tokens), found {buffer}; set {fits}, or null",
        )
    if wanted.bandwidth == 0:
        yield Fault(f"{key}.bandwidth", "wanted bytes a second, found 0; set what the slowest link carries")
        return
    size = facts.longest * facts.prefill.kv.token_size
    least_s = size / wanted.bandwidth
    if wanted.timeout is not None and wanted.timeout < least_s:
        yield Fault(
            f"{key}.timeout",
            f"wanted at least {least_s:.3g} s, what {show_size(size)} of the longest sequence take at "
            f"{show_size(wanted.bandwidth)}/s, found {wanted.timeout:g} s; raise it, or set null",
        )


def _connector(spec: Spec, facts: Facts) -> Iterator[Fault]:
    wanted, able = spec.tensorrt_llm, facts.able
    if wanted.connector:
        key = "tensorrt_llm.connector"
        yield from _able(key, lambda: able.need("kv_connector", "KV cache connector; take tensorrt_llm.connector out"))
        if wanted.handoff == "transceiver":
            what = "connector beside a transceiver; set tensorrt_llm.connector: false, or handoff: pool"
            yield from _able(key, lambda: able.need("transceiver_with_connector", what))
    connects = wanted.connector is not False and spec.pool.enabled and able.kv_connector
    if connects and (wanted.handoff == "pool" or able.transceiver_with_connector):
        yield from _connected(spec, facts)


def _connected(spec: Spec, facts: Facts) -> Iterator[Fault]:
    """What a connector cannot go with."""
    for role in facts.roles:
        for what in ("pipeline_parallel", "context_parallel"):
            if (found := getattr(role.built, what)) > 1:
                yield Fault(
                    f"{role.key}.engine",
                    f"{what}: wanted 1 with the connector, found {found}; TensorRT-LLM shows a connector one stage "
                    "only: build with tensor parallelism alone, or set tensorrt_llm.connector: false",
                )
        if not role.built.block_reuse:
            yield Fault(
                f"{role.key}.engine",
                "block_reuse: wanted true with the connector, found false; nothing would be found again: build it "
                "again, or set tensorrt_llm.connector: false",
            )
        if role.name == "decode" and role.settings.cuda_graphs:
            yield from _able(
                f"{role.key}.cuda_graphs",
                lambda: facts.able.need(
                    "connector_cuda_graphs", "CUDA graphs beside a connector; set cuda_graphs: false"
                ),
            )
    if facts.stored_size is None:
        widths = " and ".join(str(role.built.tensor_parallel) for role in facts.roles)
        yield Fault(
            "tensorrt_llm.decode.engine",
            f"stored_parallel: the widths {widths} share no split of {facts.prefill.kv.kv_heads} KV heads into whole "
            "ones; build engines whose tensor_parallel divide each other",
        )
    elif spec.pool.enabled and spec.pool.dram_size < 16 * facts.stored_size:
        yield Fault(
            "pool.dram_size",
            f"{show_size(spec.pool.dram_size)} hold {spec.pool.dram_size // facts.stored_size} stored blocks of "
            f"{show_size(facts.stored_size)}; set at least {show_size(16 * facts.stored_size)}",
        )


def _able(key: str, ask: Callable[[], None]) -> Iterator[Fault]:
    try:
        ask()
    except KvtoolError as cannot:
        yield Fault(key, str(cannot))
