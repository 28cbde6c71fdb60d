"""Device copies beside torch's operations and beside one plain copy of as many bytes, in turns, on one GPU.

    python tests/bench/copies.py [--json FILE]

Pages of a Llama-3.1-8B pool (4 MiB), in random order, to and from packed blocks on the device and in pinned host
memory, as one stored shard and as four. Times are what a caller sees: launch, run, synchronise. Without a GPU it says
so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from kvtool.kv.layout import KVLayout
from kvtool.kv.reshard import page_runs
from kvtool.measure.stats import Ratio, ratio, summarise
from kvtool_trtllm.copies import Mover, Piece, Table, checksum, gather, mover_for, scatter
from kvtool_trtllm.kernel import Kernel
from kvtool_trtllm.twin import Twin

PAGE = KVLayout(layers=32, kv_heads=8, head_dim=128, block_tokens=32)
COUNTS, SHARDS, ROUNDS = (1, 16, 64), (1, 4), 11


@dataclass(frozen=True)
class Row:
    """`against_torch`, `against_plain`: our time over theirs, so below 1 is faster."""

    what: str
    blocks: int
    shards: int
    packed_on: str
    gigabytes_s: float
    against_torch: Ratio
    against_plain: Ratio
    raw_s: dict[str, Any]

    def __str__(self) -> str:
        return (
            f"{self.what:9} {self.blocks:3} blocks {self.shards} shards, packed on {self.packed_on:6} "
            f"{self.gigabytes_s:8.1f} GB/s   torch {self.against_torch}   one plain copy {self.against_plain}"
        )


def measure(device: torch.device, ours: Mover, page: KVLayout = PAGE, rounds: int = ROUNDS) -> list[Row]:
    """Every combination; the three contenders run in turns, the first round is thrown away."""
    rng, rows = Random(1), []
    pool = torch.empty(2 * max(COUNTS), page.block_size, dtype=torch.uint8, device=device)
    for blocks in COUNTS:
        for packed_on in dict.fromkeys((device.type, "cpu")):
            packed = torch.empty(blocks, page.block_size, dtype=torch.uint8, device=packed_on)
            packed = packed.pin_memory() if packed_on != device.type else packed
            for shards in SHARDS:
                pages = rng.sample(range(pool.shape[0]), blocks)
                for what, work in _moves(pool, packed, page, shards, pages, ours).items():
                    rows.append(_row(what, blocks, shards, packed, device, work, rounds))
        rows.append(_row("checksum", blocks, 1, pool[:blocks], device, _sums(pool[:blocks], ours), rounds))
    return rows


def _moves(
    pool: torch.Tensor, packed: torch.Tensor, page: KVLayout, shards: int, pages: list[int], ours: Mover
) -> dict[str, dict[str, Callable[[], Any]]]:
    table = Table([Piece(pool[:, run.page_at : run.page_at + run.size], run.at) for run in page_runs(page, shards)])
    plain = pool[: len(pages)]
    return {
        "gather": {
            "ours": lambda: gather(table, pages, packed, mover=ours),
            "torch": lambda: gather(table, pages, packed, mover=Twin()),
            "plain": lambda: packed.copy_(plain, non_blocking=True),
        },
        "scatter": {
            "ours": lambda: scatter(table, pages, packed, mover=ours),
            "torch": lambda: scatter(table, pages, packed, mover=Twin()),
            "plain": lambda: plain.copy_(packed, non_blocking=True),
        },
    }


def _sums(blocks: torch.Tensor, ours: Mover) -> dict[str, Callable[[], Any]]:
    return {
        "ours": lambda: checksum(blocks, mover=ours),
        "torch": lambda: checksum(blocks, mover=Twin()),
        "plain": lambda: blocks.clone(),
    }


def _row(
    what: str,
    blocks: int,
    shards: int,
    packed: torch.Tensor,
    device: torch.device,
    work: dict[str, Callable[[], Any]],
    rounds: int,
) -> Row:
    taken: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, do in work.items():
            _synchronise(device)
            began_s = time.perf_counter()
            do()
            _synchronise(device)
            if turn:
                taken[name].append(time.perf_counter() - began_s)
    ours = summarise(taken["ours"])
    return Row(
        what, blocks, shards, packed.device.type, packed.numel() / ours.median / 1e9,
        ratio(taken["ours"], taken["torch"]), ratio(taken["ours"], taken["plain"]),
        {name: summarise(times).to_json() for name, times in taken.items()},
    )  # fmt: skip


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where raw results go")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU: device copies were not measured")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    ours = mover_for(device)
    if not isinstance(ours, Kernel):
        print("no kernels for this GPU (the log says why): device copies were not measured")
        return 1
    rows = measure(device, ours)
    name = torch.cuda.get_device_name(device)
    print(f"{name}, torch {torch.__version__}, {ours.name}; {ROUNDS} rounds, ratios of time: below 1 is faster")
    for row in rows:
        print(row)
    if asked.json:
        facts = {"gpu": name, "torch": torch.__version__, "python": platform.python_version(), "rounds": ROUNDS}
        raw = [
            {**vars(row), "against_torch": row.against_torch.to_json(), "against_plain": row.against_plain.to_json()}
            for row in rows
        ]
        asked.json.write_text(json.dumps({"facts": facts, "rows": raw}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
