"""What each tenant of a pool has, over all ranks, for `kvtool pool status`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvtool.units import show_size

COLUMNS = ["tenant", "DRAM", "files", "blocks", "hits", "gave way to its own", "refused"]


def tenant_rows(answers: Iterable[dict[str, Any]]) -> list[list[str]]:
    """One row a tenant, from the reports of the ranks that answer; empty when the pool has no tenants."""
    sums: dict[str, dict[str, int | None]] = {}
    slot_size = 0
    for answer in answers:
        slot_size = answer["slot_size"]
        for name, usage in answer.get("tenants", {}).items():
            mine = sums.setdefault(name, {})
            for what, count in usage.items():
                had = mine.get(what, 0)
                mine[what] = None if count is None or had is None else had + count
    return [_row(name, found, slot_size) for name, found in sorted(sums.items())]


def _row(name: str, found: dict[str, int | None], slot_size: int) -> list[str]:
    def size(slots: int | None) -> str:
        return "any" if slots is None else show_size(slots * slot_size)

    dram = (found["dram"] or 0) + (found["aside"] or 0)
    return [
        name,
        f"{size(dram)} of {size(found['quota_dram'])}",
        f"{size(found['files'])} of {size(found['quota_files'])}",
        f"{found['blocks']} of {'any' if found['quota_blocks'] is None else found['quota_blocks']}",
        *(str(found[what]) for what in ("hits", "evicted", "refused")),
    ]
