"""Results of kvbench as Markdown, kvtool beside its peers.

    scripts/bench-peers KVBENCH table FILE... [--ceilings FILE]

For each phase: medians, and how many times faster kvtool is than the fastest peer (throughput; for phases that are
calls and no bytes, the median time of a call), and its share of a plain memcpy of distinct blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

PHASES = ["put", "get", "put-dup", "put-b64", "get-b64", "exists-256", "get-2cl", "put-2cl",
          "ssd-put", "ssd-get-cold", "ssd-get-all"]  # fmt: skip
BY_TIME = {"put-dup", "exists-256"}
OURS = "kvtool"
Rows = list[dict[str, Any]]


def median(rows: Rows, name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def score(rows: Rows, phase: str) -> float:
    """Higher is better."""
    if phase in BY_TIME:
        return 1.0 / (median(rows, "p50_ms") or 1e9)
    return median(rows, "GBps") or 0.0


def cpu(rows: Rows) -> float | None:
    client, server = median(rows, "cli_cpu_s_per_GB"), median(rows, "srv_cpu_s_per_GB")
    return None if client is None or server is None else client + server


def print_block(block: int, groups: dict[tuple[str, str], Rows], memcpy_gb_s: float | None) -> None:
    print(f"\n### Blocks of {block // 1024} KiB\n")
    print("| phase | store | n | GB/s | p50 ms | p99 ms | CPU s/GB | against the best peer | of memcpy | not right |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for phase in PHASES:
        here = {store: rows for (name, store), rows in groups.items() if name == phase}
        peers = {store: score(rows, phase) for store, rows in here.items() if not store.startswith(OURS)}
        best = max(peers, key=peers.__getitem__) if peers else None
        for store, rows in here.items():
            against = share = ""
            if store.startswith(OURS) and best is not None and peers[best]:
                against = f"{score(rows, phase) / peers[best]:.2f}x {best}"
            if memcpy_gb_s and phase not in BY_TIME and not phase.startswith("ssd"):
                share = f"{(median(rows, 'GBps') or 0.0) / memcpy_gb_s:.2f}"
            wrong = [
                f"{sum(r[k] for r in rows)} {k}" for k in ("fails", "short", "bad_blocks") if any(r[k] for r in rows)
            ]
            cells = [phase, store, str(len(rows))]
            cells += [show(median(rows, name)) for name in ("GBps", "p50_ms", "p99_ms")]
            print(f"| {' | '.join([*cells, show(cpu(rows)), against, share, ', '.join(wrong)])} |")


def print_memory(rows: Rows) -> None:
    print("\n### Memory of the servers\n")
    print("| block | store | empty MB | after MB | stored MB | after / stored |")
    print("|---:|---|---:|---:|---:|---:|")
    for row in rows:
        cells = [f"{row['block'] // 1024} KiB", row["peer"]]
        cells += [show(row[name]) for name in ("empty_MB", "after_MB", "stored_MB")]
        print(f"| {' | '.join(cells)} | {row['after_MB'] / row['stored_MB']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--ceilings", type=Path, help="what kvbench.ceilings wrote")
    arguments = parser.parse_args()
    rows: Rows = [row for file in arguments.files for row in json.loads(file.read_text())]
    memcpy_gb_s = None
    if arguments.ceilings:
        memcpy_gb_s = json.loads(arguments.ceilings.read_text())["results"]["memcpy, 1 thread"]["GBps"]
    blocks: dict[int, dict[tuple[str, str], Rows]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if "GBps" in row:
            blocks[row["block"]][row["phase"], row["peer"]].append(row)
    for block, groups in sorted(blocks.items()):
        print_block(block, groups, memcpy_gb_s)
    memory = [row for row in rows if row["phase"] == "memory" and "after_MB" in row]
    if memory:
        print_memory(memory)


if __name__ == "__main__":
    main()
