"""What each version of TensorRT-LLM can do, stated in one place.

Three adapters cover them: `engine-1.2` builds TensorRT engines (up to 1.2.x; the engine path left TensorRT-LLM in 1.3),
`pytorch-1.2` drives `tensorrt_llm.LLM` of 1.1 to 1.2.x, and `pytorch-1.3` that of 1.3 and 1.4. Everything that asks
"may I?" asks `can`, and a refusal names the version that could.

The installed version is read from the package's metadata. Nothing here imports tensorrt_llm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib import metadata
from typing import Any, Literal, get_args

from kvtool.engine.trtllm.release import Release, first_of_series, parse_release
from kvtool.errors import EngineRefused

Backend = Literal["pytorch", "tensorrt"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
DISTRIBUTION = "tensorrt_llm"
KNOWN = ("1.1.0", "1.2.0", "1.2.1", "1.3.0rc15", "1.3.0rc22", "1.3.0rc27", "1.3.0rc29", "1.4.0rc1")
"""Releases whose signatures were read, or that lie between two such; refusals choose from them."""

_FIRST, _V1_2, _V1_3, _V1_4, _END = (first_of_series(text) for text in ("1.1", "1.2", "1.3", "1.4", "1.5"))
_DISK = parse_release("1.3.0rc27")


class Adapter(str, Enum):
    ENGINE_1_2 = "engine-1.2"
    PYTORCH_1_2 = "pytorch-1.2"
    PYTORCH_1_3 = "pytorch-1.3"

    @property
    def backend(self) -> Backend:
        return "tensorrt" if self is Adapter.ENGINE_1_2 else "pytorch"


@dataclass(frozen=True)
class Can:
    """One version of TensorRT-LLM with one backend. Connector fields are False and empty where there is none."""

    version: str
    adapter: Adapter
    engine_build: bool
    """convert_checkpoint, trtllm-build, and Triton's C++ backend to serve what they make."""
    kv_connector: bool
    connector_module: str | None
    """Where the connector's base classes are."""
    layer_groups: bool
    """V2 cache manager: layouts of layer groups and regions instead of one pool tensor."""
    block_hashes: bool
    """The scheduler's RequestData carries the engine's block hashes, priorities and the request's salt."""
    connector_cuda_graphs: bool
    """A forward-pass callable, so that saves work where layer hooks do not run."""
    attention_dp_connector: bool
    connector_callbacks: tuple[str, ...]
    """Optional callbacks that this version calls."""
    load_failure_channel: bool
    """A connector can say that a load failed. In no version that was read."""
    transceiver_backends: tuple[str, ...]
    transceiver_runtimes: tuple[str, ...]
    """Values of transceiver_runtime; empty where there is no such keyword (the C++ one runs)."""
    transceiver_runtime_default: str | None
    transceiver_with_connector: bool
    """Both in one server. Early versions raise, later ones warn; the release that changed it is not known, so none
    before 1.3 is trusted with it."""
    disk_tier: bool
    """TensorRT-LLM's own disk tier below its host tier."""
    connector_presets: tuple[str, ...]
    quantised_kv: tuple[str, ...]
    """KV dtypes beside the model's own."""
    python_plugins: bool
    """TensorRT plugins whose body is Python. Never: a C++ runtime cannot run them."""
    numpy: str
    tensorrt: str | None
    """The TensorRT that engines of this version are built with and bound to."""
    notes: tuple[str, ...] = ()
    """What is known to go wrong."""

    @property
    def backend(self) -> Backend:
        return self.adapter.backend

    def need(self, feature: str, what: str) -> None:
        """Refuse unless this version has `feature`, a field of this class; `what` says it in words.

        Raises:
            EngineRefused: with the version that can, if one does.
        """
        if getattr(self, feature):
            return
        raise EngineRefused(f"TensorRT-LLM {self.version} ({self.adapter.value}): no {what}; {_who_can(feature)}")

    def need_value(self, feature: str, value: str, what: str) -> None:
        """Refuse unless `value` is among this version's `feature`, a field that lists values.

        Raises:
            EngineRefused: with what this version takes, and the version that takes the value.
        """
        values: tuple[str, ...] = getattr(self, feature)
        if value in values:
            return
        takes = ", ".join(values) if values else "none"
        raise EngineRefused(
            f"TensorRT-LLM {self.version} ({self.adapter.value}): {what}: found {value!r}, this version takes {takes}; "
            f"{_who_can(feature, value)}"
        )


def installed() -> str | None:
    """The version of TensorRT-LLM that is installed here, or None. Reads metadata only."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def adapter_for(version: str, backend: str = "pytorch") -> Adapter:
    """The adapter that drives `version` with `backend` ("pytorch" or "tensorrt").

    Raises:
        EngineRefused: a version or backend that has none.
    """
    release = parse_release(version)
    if backend not in BACKENDS:
        raise EngineRefused(f"backend: wanted one of {', '.join(BACKENDS)}, found {backend!r}")
    if release < _FIRST:
        raise EngineRefused(
            f"TensorRT-LLM {version}: kvtool drives 1.1 to 1.4 (connectors came with 1.1); install 1.2.1 or later"
        )
    if release >= _END:
        raise EngineRefused(
            f"TensorRT-LLM {version}: kvtool drives 1.1 to 1.4, signatures of later versions are not recorded; "
            f"install {KNOWN[-1]}, or a kvtool that knows {release.series}"
        )
    if backend == "tensorrt":
        if release >= _V1_3:
            raise EngineRefused(
                f"TensorRT-LLM {version}: TensorRT engines (trtllm-build, the C++ Triton backend) were removed in 1.3; "
                "build them with 1.2.1, or choose the pytorch backend (TensorRT-LLM's own migration guide: "
                "docs/source/legacy/tensorrt-backend-removal.md)"
            )
        return Adapter.ENGINE_1_2
    return Adapter.PYTORCH_1_3 if release >= _V1_3 else Adapter.PYTORCH_1_2


def can(version: str, backend: str = "pytorch") -> Can:
    """What `version` can do with `backend`.

    Raises:
        EngineRefused: a version or backend that no adapter drives.
    """
    adapter, release = adapter_for(version, backend), parse_release(version)
    return Can(version=version, adapter=adapter, **_common(release), **_of(adapter, release))


def engine_builder_here() -> str:
    """The installed version, if it can build TensorRT engines: it must say so in its version and depend on tensorrt.

    Raises:
        EngineRefused: none installed, a version without the engine path, or one that does not depend on tensorrt.
    """
    version = installed()
    if version is None:
        raise EngineRefused(
            f"tensorrt_llm is not installed here; a TensorRT engine is built in NVIDIA's container of release "
            f"{_BUILDS}, or choose the pytorch backend, which builds a bundle without it"
        )
    adapter_for(version, "tensorrt")
    if not any(_is_tensorrt(line) for line in metadata.requires(DISTRIBUTION) or []):
        raise EngineRefused(
            f"tensorrt_llm {version} is installed without tensorrt among its requirements, so it cannot build engines; "
            f"install {_BUILDS}, or choose the pytorch backend"
        )
    return version


def tensorrt_installed() -> str | None:
    """The version of the tensorrt package here, or None."""
    for name in ("tensorrt", "tensorrt_cu13", "tensorrt_cu12"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


_BUILDS = "1.2.1"


def _is_tensorrt(requirement: str) -> bool:
    return re.match(r"tensorrt([-_]cu\d+)?\s*($|[<>=!~;(\[])", requirement.strip(), re.IGNORECASE) is not None


def _common(release: Release) -> dict[str, Any]:
    return {
        "numpy": ">=2.0,<2.4" if release >= _V1_3 else "<2",
        "python_plugins": False,
        "load_failure_channel": False,
    }


def _of(adapter: Adapter, release: Release) -> dict[str, Any]:
    if adapter is Adapter.ENGINE_1_2:
        return {
            "engine_build": True,
            "kv_connector": False,
            "connector_module": None,
            "layer_groups": False,
            "block_hashes": False,
            "connector_cuda_graphs": False,
            "attention_dp_connector": False,
            "connector_callbacks": (),
            "transceiver_backends": _transceivers(release),
            "transceiver_runtimes": (),
            "transceiver_runtime_default": None,
            "transceiver_with_connector": False,
            "disk_tier": False,
            "connector_presets": (),
            "quantised_kv": ("fp8", "int8"),
            "tensorrt": "10.14.1" if release >= parse_release("1.2.0") else None,
            "notes": ("an engine is bound to the exact TensorRT version and GPU architecture that built it",),
        }
    new = adapter is Adapter.PYTORCH_1_3
    return {
        "engine_build": False,
        "kv_connector": True,
        "connector_module": "tensorrt_llm._torch.pyexecutor." + ("connectors." if new else "") + "kv_cache_connector",
        "layer_groups": new,
        "block_hashes": new,
        "connector_cuda_graphs": release >= _V1_2,
        "attention_dp_connector": release >= _V1_4,
        "connector_callbacks": _callbacks(release),
        "transceiver_backends": _transceivers(release),
        "transceiver_runtimes": _runtimes(release),
        "transceiver_runtime_default": _runtime_default(release),
        "transceiver_with_connector": new,
        "disk_tier": release >= _DISK,
        "connector_presets": _presets(release),
        "quantised_kv": ("fp8",),
        "tensorrt": None,
        "notes": () if new else ("1.2: context pipeline parallel with generation tensor parallel hangs",),
    }


def _transceivers(release: Release) -> tuple[str, ...]:
    return ("UCX", "NIXL", "MPI", *(("MOONCAKE",) if release >= _V1_2 else ()))


def _runtimes(release: Release) -> tuple[str, ...]:
    return ("CPP", "PYTHON") if release >= _V1_3 else ()


def _runtime_default(release: Release) -> str | None:
    if release >= parse_release("1.4.0rc1"):
        return "PYTHON"
    return "auto" if release >= _DISK else None


def _presets(release: Release) -> tuple[str, ...]:
    if release < _V1_3:
        return ()
    return ("lmcache", "lmcache-mp", "kvbm", *(("mooncake-store",) if release >= _V1_4 else ()))


def _callbacks(release: Release) -> tuple[str, ...]:
    names: list[str] = []
    if release >= _V1_2:
        names.append("register_forward_pass_callable")
    if release >= _V1_3:
        names += ["wait_for_initialization", "register_kv_cache_layout"]
        names += ["update_state_after_alloc_by_layer_group", "request_finished_by_layer_group"]
    if release >= _V1_4:
        names += ["request_reset", "cancel_load"]
    return tuple(names)


@cache
def _all() -> tuple[Can, ...]:
    found = []
    for version in KNOWN:
        for backend in BACKENDS:
            try:
                found.append(can(version, backend))
            except EngineRefused:
                continue
    return tuple(found)


def _who_can(feature: str, value: str | None = None) -> str:
    for one in _all():
        has = getattr(one, feature)
        if has if value is None else value in has:
            return f"{one.version} can ({one.adapter.value})"
    return "no version that kvtool knows can"
