"""The deployment spec: everything that a deployment is told, each default in this file and nowhere else.

One YAML file describes one deployment: engine, pool, servers, limits. Unknown keys, wrong types and units are refused
(`config.load` adds file and line), so a typing slip is never a silent default. The descriptions below are the
documentation: `kvtool config init`, `kvtool config schema` and the README's table are made from them.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from kvtool.units import parse_seconds, parse_size

VERSION = 1
"""Of the spec's schema; a file of another version is refused."""


def _path(value: object) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"wanted a path, found {value!r}")
    return Path(value).expanduser()


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "examples": ["512MiB"]}]}),
]
Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "examples": ["250ms", "30s"]}]}),
]
FilePath = Annotated[Path, BeforeValidator(_path), WithJsonSchema({"type": "string", "format": "path"})]
Port = Annotated[int, Field(ge=0, le=65535)]


def _default(text: str, description: str) -> Any:
    """A size or duration with its default as people write it; parsed as if it came from the file."""
    return Field(text, description=description)


def _section(kind: type[BaseModel], description: str) -> Any:
    return Field(default_factory=kind, description=description)


class Section(BaseModel):
    """Unknown keys refused, no coercion between types, immutable once read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


class PoolSpec(Section):
    enabled: bool = Field(True, description="Keep KV blocks between requests; false serves every prompt cold.")
    ranks: int = Field(2, ge=1, le=1024, description="Pool processes under mpiexec; each owns its share of the blocks.")
    dram_size: Size = _default("256MiB", "Shared memory of each rank; a hard cap.")
    file_size: Size = _default("1GiB", "File tier of each rank; a hard cap. 0 switches it off.")
    file_dir: FilePath | None = Field(None, description="Where the file tier lies; null is RUN_DIR/pool.")
    remote: str | None = Field(
        None, description="Store below the files: a directory, or a URL such as s3://BUCKET; null for none."
    )
    remote_size: Size = _default("0", "Room in that store for each rank; a hard cap.")
    file_key: FilePath | None = Field(
        None, description="File of mode 0600: the key that block files are encrypted with."
    )
    write: Literal["back", "through"] = Field(
        "back",
        description="When a block goes to its file: back, its memory is wanted; through, before its put is answered.",
    )
    evict: Literal["auto", "fifo", "lru", "lru-2", "s3-fifo", "arc", "turn"] = Field(
        "auto",
        description="Which blocks leave first; auto watches what each policy would have hit, and changes to the best.",
    )
    flush: Seconds = _default("3s", "How long a stopping rank may write its memory to its file.")
    path: Literal["auto", "shm", "ucx", "socket"] = Field(
        "auto",
        description="How blocks travel: shm on the same node, ucx between nodes, socket where neither can be had; auto "
        "takes the first of them that it can.",
    )
    lease_term: Seconds = _default("10s", "How long a reader that died can hold a block.")
    copies: int = Field(
        1,
        ge=1,
        le=8,
        description="Ranks that hold each block. The first of them answers a put, the others follow within moments; "
        "from then on the death of a rank costs no block.",
    )
    metrics: bool = Field(True, description="Whether each rank serves /metrics on a loopback port.")
    namespace: str = Field(
        "default", min_length=1, max_length=64, description="Part of every key; blocks never cross namespaces."
    )


class PrefillSpec(Section):
    instances: int = Field(1, ge=1, le=64, description="Prefill servers.")
    threads: int = Field(2, ge=1, le=1024, description="Compute threads of each.")
    kv_blocks: int = Field(512, ge=1, description="KV blocks of each; one prompt in full must fit.")
    chunk_tokens: int = Field(512, ge=1, description="Prompt tokens computed between two looks at the queue.")


class DecodeSpec(Section):
    instances: int = Field(1, ge=1, le=64, description="Decode servers.")
    threads: int = Field(1, ge=1, le=1024, description="Threads of each for decode steps.")
    prompt_threads: int = Field(
        2,
        ge=1,
        le=1024,
        description="Threads of each for prompts that it computes itself: what prefill or the pool did not.",
    )
    kv_blocks: int = Field(1024, ge=1, description="KV blocks of each; shared by the sequences of its batch.")
    batch_max: int = Field(16, ge=1, le=1024, description="Sequences that decode together.")


class FrontSpec(Section):
    host: str = Field("127.0.0.1", description="Loopback address that every server of the deployment listens on.")
    http_port: Port = Field(0, description="The front server's HTTP port; 0 is chosen at start.")
    grpc_port: Port = Field(0, description="The front server's gRPC port; 0 is chosen at start.")
    metrics_port: Port = Field(0, description="The front server's metrics port; 0 is chosen at start.")

    @field_validator("host")
    @classmethod
    def _loopback(cls, host: str) -> str:
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if not loopback:
            raise ValueError(
                f"wanted a loopback address, found {host!r}: the servers have no authentication yet; "
                "keep 127.0.0.1 and put an authenticating proxy in front"
            )
        return "127.0.0.1" if host == "localhost" else host

    @model_validator(mode="after")
    def _distinct(self) -> FrontSpec:
        given = [port for port in (self.http_port, self.grpc_port, self.metrics_port) if port]
        if len(given) != len(set(given)):
            raise ValueError(f"http_port, grpc_port and metrics_port must differ, found {given}")
        return self


class LimitsSpec(Section):
    max_tokens_default: int = Field(256, ge=1, description="Tokens generated when a request does not say.")
    max_tokens_max: int = Field(4096, ge=1, description="Most tokens that a request may ask for.")
    deadline: Seconds = _default("600s", "Longest time a request may take, queueing included.")
    concurrent_max: int = Field(256, ge=1, description="Requests in flight; one more is refused with a retry time.")

    @model_validator(mode="after")
    def _ordered(self) -> LimitsSpec:
        if self.max_tokens_default > self.max_tokens_max:
            raise ValueError(
                f"max_tokens_default {self.max_tokens_default} is above max_tokens_max {self.max_tokens_max}"
            )
        if self.deadline <= 0:
            raise ValueError("deadline must be positive")
        return self


class BudgetsSpec(Section):
    match: Seconds = _default("0.5s", "Longest wait for the pool to say what it holds.")
    fetch: Seconds = _default("2s", "Longest wait for blocks; what is missing then is recomputed.")
    put: Seconds = _default("2s", "Longest wait to store blocks; what is not stored then is dropped.")


class SuperviseSpec(Section):
    canary_interval: Seconds = _default("10s", "Time between two probe inferences of one server.")
    canary_timeout: Seconds = _default("10s", "A server whose probe takes longer is restarted.")
    start_timeout: Seconds = _default("120s", "Longest time a server or the pool may take to be ready.")

    @field_validator("canary_interval", "canary_timeout", "start_timeout")
    @classmethod
    def _positive(cls, seconds: float) -> float:
        if seconds <= 0:
            raise ValueError("must be positive")
        return seconds


class TransceiverSpec(Section):
    """TensorRT-LLM's own transfer of KV; both roles get the same values."""

    backend: Literal["NIXL", "UCX"] = Field("NIXL", description="What moves the bytes; never left to a default.")
    buffer_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens that one transfer's buffer holds: a whole number of blocks, at least the longest sequence. "
        "Null is the longest sequence, rounded up to blocks.",
    )
    timeout: Seconds | None = Field(
        None, description="Longest time one transfer may take; null is ten times what the longest sequence takes."
    )
    bandwidth: Size = _default("1GiB", "Bytes a second between a prefill and a decode GPU at the least.")
    runtime: Literal["CPP", "PYTHON"] | None = Field(
        None, description="Which transceiver of a TensorRT-LLM that has two; null is the version's default."
    )


class GpuRoleSpec(Section):
    """Instances of one role on GPUs; lists have one entry for each instance."""

    engine: FilePath | None = Field(None, description="Engine directory of this role; null is the spec's engine.")
    gpus: list[list[int]] = Field([], description="GPU ids of each instance, one id for each rank: [[0, 1], [2, 3]].")
    nodes: list[int] = Field([], description="Node of each instance, from 0; empty is node 0 for all.")
    urls: list[str] = Field(
        [], description="HOST:PORT of each instance's gRPC, for a front elsewhere; empty where one host runs all."
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Of the GPU memory that weights leave, the share for KV blocks; null is the engine's. Instances "
        "that share a GPU may not exceed 1 together.",
    )
    host_cache_size: Size = _default(
        "0", "TensorRT-LLM's own host tier of one instance, divided among its ranks. 0 leaves host memory to the pool."
    )
    cuda_graphs: bool = Field(True, description="Replay decode steps as CUDA graphs.")
    max_batch_size: int | None = Field(None, ge=1, description="Sequences in one step; null is the engine's.")
    env: dict[str, str] = Field({}, description="Environment of the servers, such as UCX_NET_DEVICES: mlx5_0:1.")


class LaunchSpec(Section):
    """What `kvtool deploy render --launch` writes launch files from."""

    image: str | None = Field(None, min_length=1, description="Container image with Triton, TensorRT-LLM and kvtool.")
    nodes: int = Field(1, ge=1, le=1024, description="Hosts with GPUs.")
    gpus_per_node: int = Field(8, ge=1, le=64, description="GPUs of each host.")
    gpu: str | None = Field(
        None, min_length=1, description="Kind of GPU, such as h100-80gb: what must fit is worked out for it; null: not."
    )
    gpu_arch: str | None = Field(
        None, pattern=r"^sm_[0-9]{2,3}$", description="Architecture of the GPUs, such as sm_90; null is not compared."
    )
    tensorrt_version: str | None = Field(
        None, min_length=1, description="TensorRT on the GPU hosts, which engines are bound to; null is not compared."
    )
    node_memory: Size | None = Field(
        None, description="Memory that the deployment may use on each host; null is not compared."
    )
    engines: str = Field("/engines", pattern=r"^/", description="Folder in containers that holds engine directories.")
    claim: str = Field("kvtool-engines", min_length=1, description="Kubernetes volume claim with that folder.")
    secret: str | None = Field(
        None, min_length=1, description="Kubernetes secret or folder of key files, by name only; null for none."
    )
    namespace: str = Field("default", min_length=1, max_length=63, description="Kubernetes namespace.")
    partition: str | None = Field(None, min_length=1, description="Slurm partition; null is the cluster's default.")
    time_limit: Seconds = _default("86400s", "Slurm's time limit of the whole deployment.")
    grpc_port: Port = Field(8001, ge=1024, le=64000, description="First gRPC port in launch files; instances count up.")


class TensorRTLLMSpec(Section):
    """How engines for TensorRT-LLM are served; only with target: tensorrt_llm."""

    version: str | None = Field(
        None, min_length=1, description="TensorRT-LLM on the GPU hosts; null is the version that the engine names."
    )
    handoff: Literal["pool", "transceiver"] = Field(
        "pool",
        description="What carries KV from prefill to decode: the pool by the connector, or TensorRT-LLM's transceiver.",
    )
    connector: bool | None = Field(
        None,
        description="Whether engines offload KV blocks to the pool and look there first; null is wherever their "
        "version can, beside a transceiver too.",
    )
    transceiver: TransceiverSpec = _section(TransceiverSpec, "TensorRT-LLM's own KV transfer.")
    prefill: GpuRoleSpec = _section(GpuRoleSpec, "Prefill instances on GPUs.")
    decode: GpuRoleSpec = _section(GpuRoleSpec, "Decode instances on GPUs.")
    launch: LaunchSpec = _section(LaunchSpec, "Where and how it is started.")


class Spec(Section):
    """One deployment. Paths are relative to the spec file."""

    version: int = Field(VERSION, description="Schema of this file.")
    name: str = Field("kvtool", description="Names the deployment: its state directory and shared memory.")
    target: Literal["torch", "tensorrt_llm"] = Field("torch", description="Runtime: torch on CPU, or TensorRT-LLM.")
    engine: FilePath = Field(description="Engine directory that `kvtool build` wrote.")
    run_dir: FilePath | None = Field(None, description="State, logs and sockets; null is a per-user state directory.")
    tritonserver: str = Field(
        "auto", min_length=1, description="The tritonserver binary; auto is the one on PATH, else nvidia-pytriton's."
    )
    pool: PoolSpec = _section(PoolSpec, "The KV-cache pool.")
    prefill: PrefillSpec = _section(PrefillSpec, "Servers that compute prompts.")
    decode: DecodeSpec = _section(DecodeSpec, "Servers that generate tokens.")
    front: FrontSpec = _section(FrontSpec, "The server that clients talk to.")
    limits: LimitsSpec = _section(LimitsSpec, "What one request may ask for.")
    budgets: BudgetsSpec = _section(BudgetsSpec, "Longest waits for the pool in one request.")
    supervise: SuperviseSpec = _section(SuperviseSpec, "How failed servers are found.")
    tensorrt_llm: TensorRTLLMSpec = _section(TensorRTLLMSpec, "GPUs, hand-off and launch; for target tensorrt_llm.")

    @field_validator("version")
    @classmethod
    def _known(cls, version: int) -> int:
        if version != VERSION:
            raise ValueError(f"wanted version {VERSION}, found {version}; this kvtool reads version {VERSION} only")
        return version

    @field_validator("name")
    @classmethod
    def _plain(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", name):
            raise ValueError(f"wanted 1 to 32 of a-z, 0-9, _ and -, found {name!r}")
        return name

    @field_validator("tensorrt_llm")
    @classmethod
    def _meant(cls, section: TensorRTLLMSpec, info: ValidationInfo) -> TensorRTLLMSpec:
        if info.data.get("target") == "torch" and section != TensorRTLLMSpec.model_validate({}):
            raise ValueError("found settings for GPUs, but target is torch; set target: tensorrt_llm, or take them out")
        return section

    @property
    def state_dir(self) -> Path:
        """`run_dir`, or $XDG_STATE_HOME/kvtool/NAME (~/.local/state without it)."""
        return self.run_dir or default_run_dir(self.name)


def default_run_dir(name: str) -> Path:
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "kvtool" / name


def json_schema() -> dict[str, Any]:
    """JSON Schema of the spec file, for editors and CI."""
    schema = Spec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
