"""`kvtool sim`: what would happen, on traces, without bytes and without waiting."""

from __future__ import annotations

from typing import ClassVar

from kvtool.cli.lazy import Entry, LazyGroup


class SimGroup(LazyGroup):
    """Replay traces on the rules that production runs."""

    entries: ClassVar[dict[str, Entry]] = {
        "cache": Entry("kvtool.cli.sim_cache:cache", "Hit ratios of a trace, by eviction policy and cache size."),
    }
