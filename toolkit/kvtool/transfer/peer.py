"""What a UCX reader knows of one peer and of what it posted to it, and how it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtool.errors import Unavailable

if TYPE_CHECKING:
    from kvtool.transfer.landing import Landing

_SPIN_S = 100e-6
_WAIT_S = (20e-6, 200e-6)  # first and longest wait between polls


class PeerDead(Unavailable):
    """The peer's process or link is gone; connect again when there is a new one."""


class PeerHung(Unavailable):
    """The peer did not serve a transfer by its deadline, or has not finished one that was given up."""


@dataclass
class Peer:
    """One incarnation of an owner: its NIXL name, where its memory lies, and what is under way with it."""

    agent: str
    address: int
    size: int
    running: int = 0  # transfers that may still touch our memory, abandoned ones too; never removed before none does
    abandoned: int = 0
    dead: bool = False
    removed: bool = False


@dataclass
class Posted:
    """A posted transfer that was given up: polled until it is over."""

    peer: Peer
    handle: Any
    slots: list[int] = field(default_factory=list)
    landings: list[Landing] = field(default_factory=list)


def poll(state: Callable[[], str], deadline_s: float) -> str:
    """Poll until the transfer is over or `deadline_s`: spin briefly, then wait ever longer."""
    spin_until_s, wait_s = time.monotonic() + _SPIN_S, _WAIT_S[0]
    while (found := state()) == "PROC":
        now_s = time.monotonic()
        if now_s >= deadline_s:
            break
        if now_s > spin_until_s:
            time.sleep(wait_s)
            wait_s = min(wait_s * 1.5, _WAIT_S[1])
    return found


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
