"""`kvtool sim cache`: how much of a trace each eviction policy would have served, by cache size."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli import console
from kvtool.errors import SpecRefused
from kvtool.kv.policy import AUTO, CHOICES, make
from kvtool.kv.policy.mini import MiniCache
from kvtool.kv.shadow import AutoCache
from kvtool.sim.replay import Hits, Order, as_keys, prompts, replay
from kvtool.sim.trace import BLOCK_TOKENS, read_trace

SIZES = "1000,3000,5000,10000,20000,30000,50000"


class OrderName(str, Enum):
    fwd = "fwd"
    rev = "rev"


def cache(
    trace: Annotated[Path, typer.Argument(help="Trace file: one JSON object a line, with hash_ids.")],
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help=f"One of {', '.join(CHOICES)}; again for more. Default: all.")
    ] = None,
    sizes: Annotated[str, typer.Option("--sizes", help="Cache sizes in blocks, with commas.")] = SIZES,
    order: Annotated[OrderName, typer.Option("--order", help="Which block of a prompt is touched first.")] = (
        OrderName.fwd
    ),
    tails: Annotated[bool, typer.Option("--tails/--no-tails", help="Cache trailing partial blocks too.")] = True,
    block_tokens: Annotated[int, typer.Option("--block-tokens", min=1, help="Tokens of a block.")] = BLOCK_TOKENS,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Hit ratios of a trace, by eviction policy and cache size."""
    counts = _sizes(sizes)
    for name in policy or []:
        if name not in CHOICES:
            raise SpecRefused(f"--policy {name}: wanted one of {', '.join(CHOICES)}")
    blocks, asked = prompts(read_trace(trace, block_tokens), tails, block_tokens)
    found: list[tuple[str, int, Hits, str]] = []
    begun_s = time.perf_counter()
    for name in policy or CHOICES:
        for size in counts:
            hits, note = _replayed(name, blocks, asked, size, order.value)
            found.append((name, size, hits, note))
    seconds = time.perf_counter() - begun_s
    if as_json:
        console.print_json([_plain(*row) for row in found])
        return
    title = f"{trace.name}: prefix hits (block hits) of {asked:,} blocks asked for, in percent"
    rows = [
        [
            name,
            *(f"{100 * hits.prefix_ratio:.2f} ({100 * hits.block_ratio:.2f})" for n, _, hits, _ in found if n == name),
        ]
        for name in dict.fromkeys(row[0] for row in found)
    ]
    columns = ["policy", *(f"{size:,}" for size in counts)]
    console.out().print(console.table(title, columns, rows, right=range(1, len(columns))))
    for _, size, _, note in found:
        if note:
            console.done(f"auto at {size:,} blocks: {note}")
    console.done(f"{len(found)} replays, {len(found) * asked / seconds / 1e6:.2f} M block accesses/s")


def _replayed(name: str, blocks: list[tuple[int, ...]], asked: int, size: int, order: Order) -> tuple[Hits, str]:
    """The hits, and which policies were in use when the name is `auto`."""
    if name != AUTO:
        return replay(blocks, asked, MiniCache(make(name), size), order), ""
    cache = AutoCache(size)
    hits = replay(as_keys(blocks), asked, cache, order)
    shown = cache.shadows.judgement()
    curve = ", ".join(f"{100 * ratio:.1f} at {at:,}" for at, ratio in shown.curve)
    changes = "1 change" if shown.changes == 1 else f"{shown.changes} changes"
    return hits, f"{shown.policy} at the end, after {changes}; its block hits lately, in percent: {curve}"


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise SpecRefused(f"--sizes {text}: wanted block counts above 0 with commas between, such as {SIZES}")
    return [int(part) for part in parts]


def _plain(name: str, size: int, hits: Hits, note: str) -> dict[str, Any]:
    return {
        "policy": name,
        "size": size,
        "asked": hits.asked,
        "prefix_hits": hits.prefix_hits,
        "block_hits": hits.block_hits,
        "prefix_ratio": hits.prefix_ratio,
        "block_ratio": hits.block_ratio,
        "note": note,
    }
