"""Eviction policies, by name. `base` says what one is; `kv.shadow` chooses among them where the name is `auto`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvtool.kv.policy.arc import Arc
from kvtool.kv.policy.base import Policy
from kvtool.kv.policy.lru2 import Lru2
from kvtool.kv.policy.recency import Fifo, Lru
from kvtool.kv.policy.s3fifo import S3Fifo
from kvtool.kv.policy.turn import Turn

POLICIES: dict[str, Callable[[], Policy[Any]]] = {
    "fifo": Fifo,
    "lru": Lru,
    "lru-2": Lru2,
    "s3-fifo": S3Fifo,
    "arc": Arc,
    "turn": Turn,
}
AUTO = "auto"
CHOICES = (AUTO, *POLICIES)
"""What a pool may be told."""


def make(name: str) -> Policy[Any]:
    """A new policy.

    Raises:
        ValueError: no policy has that name.
    """
    if name not in POLICIES:
        raise ValueError(f"wanted an eviction policy of {', '.join(POLICIES)}, found {name!r}")
    return POLICIES[name]()
