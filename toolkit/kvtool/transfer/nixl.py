"""The one door to NIXL: imported when first used, with the settings that its UCX needs.

Set before the import, unless the user has set them:

* `UCX_TCP_TX_SEG_SIZE`, `UCX_TCP_RX_SEG_SIZE` = 1m. UCX's defaults keep TCP at a quarter of a plain socket's rate.
* `UCX_LOG_LEVEL` = error and `NIXL_LOG_LEVEL` = FATAL: a peer's death is an exception here, not lines on stdout
  (NIXL's Python logger writes there).

`tcp` must stay in `UCX_TLS`: shared-memory transports have no peer-failure handler, and without one NIXL 1.5 first
refuses and then crashes. Processes that use MPI import mpi4py before this; the other order crashes at exit in libnl.
So does a host that has RDMA's libraries installed, whose libnl is loaded next to the one in NIXL's wheel, unless the
host's comes first; `load` sees to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import msgpack

from kvtool.errors import Missing, ProtocolError, Refused

SETTINGS = {
    "UCX_TCP_TX_SEG_SIZE": "1m",
    "UCX_TCP_RX_SEG_SIZE": "1m",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "FATAL",
}
_MAGIC, _VERSION = "kvtool-ucx", 1
_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")


def make_agent(name: str) -> Any:
    """A NIXL agent with the UCX backend and no progress thread (which would take a whole core while idle).

    Raises:
        Missing: NIXL is not installed, or its UCX plugin cannot be loaded.
        Refused: UCX_TLS leaves out tcp.
    """
    api = load()
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    except api.nixlBind.nixlBackendError as error:
        raise Missing(f"NIXL's UCX backend did not start: {error}; check UCX_TLS and UCX_NET_DEVICES") from None
    if "UCX" not in agent.backends:
        raise Missing("NIXL is installed without its UCX plugin; reinstall it: pip install --force-reinstall nixl-cu13")
    return agent


@cache
def installed() -> bool:
    """Whether `load` is worth a try; imports nothing."""
    return any(importlib.util.find_spec(package) is not None for package in _PACKAGES)


@cache
def load() -> ModuleType:
    """NIXL's `_api` module (its errors are in `.nixlBind`)."""
    check_transports(os.environ.get("UCX_TLS", ""))
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    with contextlib.suppress(OSError):  # a host without it needs nothing
        ctypes.CDLL("libnl-route-3.so.200")
    for package in _PACKAGES:
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError:
            continue
    raise Missing("UCX transfers need NIXL; install it: pip install 'kvtool[ucx]' (or pip install nixl-cu13)")


def version() -> str:
    """Major and minor of NIXL, such as "1.5": peers whose versions differ are refused, as its metadata is its own."""
    package = load().__name__.partition(".")[0].replace("_", "-")
    return ".".join(importlib.metadata.version(package).split(".")[:2])


def check_transports(setting: str) -> None:
    """Refuse a `UCX_TLS` without tcp.

    Raises:
        Refused: with what was found and what would be right.
    """
    names = [name.strip() for name in setting.lstrip("^").split(",") if name.strip()]
    with_tcp = "tcp" not in names if setting.startswith("^") else not names or bool({"tcp", "all"} & set(names))
    if not with_tcp:
        raise Refused(
            f"UCX_TLS={setting} leaves out tcp, without which NIXL cannot notice that a peer died; "
            f"add tcp (UCX_TLS={'all' if setting.startswith('^') else setting + ',tcp'}) or unset it"
        )


class Metadata(NamedTuple):
    """What a reader needs to reach an owner: its NIXL name, where its memory lies, and NIXL's own part."""

    agent: str
    address: int
    size: int
    ucx: bytes


def pack(agent: str, address: int, size: int, ucx: bytes) -> bytes:
    """Metadata for the wire."""
    packed: bytes = msgpack.packb([_MAGIC, _VERSION, version(), agent, address, size, ucx])
    return packed


def unpack(raw: bytes) -> Metadata:
    """
    Raises:
        ProtocolError: not metadata of ours, or of another version of kvtool or NIXL.
    """
    try:
        magic, found, nixl_version, *rest = msgpack.unpackb(raw)
        known = magic == _MAGIC and len(rest) == len(Metadata._fields)
    except (ValueError, TypeError, msgpack.UnpackException):
        known = False
    if not known:
        raise ProtocolError(f"wanted the UCX metadata of a kvtool pool rank, got {len(raw)} bytes of something else")
    if found != _VERSION or nixl_version != version():
        raise ProtocolError(
            f"the peer speaks UCX metadata version {found} of NIXL {nixl_version}, this process {_VERSION} of NIXL "
            f"{version()}; install the same kvtool and nixl on both"
        )
    return Metadata(*rest)
