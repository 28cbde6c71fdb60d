"""`kvtool sim`: what would happen: traces replayed, and the whole pool under virtual time."""

from __future__ import annotations

from typing import ClassVar

from kvtool.cli.lazy import Entry, LazyGroup


class SimGroup(LazyGroup):
    """Try the rules that production runs, on traces and on troubles."""

    entries: ClassVar[dict[str, Entry]] = {
        "cache": Entry("kvtool.cli.sim_cache:cache", "Hit ratios of a trace, by eviction policy and cache size."),
        "pool": Entry("kvtool.cli.sim_pool:pool", "Ranks and clients under virtual time, with faults from a seed."),
    }
