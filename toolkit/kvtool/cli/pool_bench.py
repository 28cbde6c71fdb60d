"""`kvtool pool bench`: put, get, view and match of a running pool, or of one of its own, beside memcpy."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvtool.cli.console import out, print_json, step, table
from kvtool.errors import SpecRefused
from kvtool.pool.state import FILE
from kvtool.units import parse_size, show_size


def bench(
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="A running pool; else one of its own is started.", show_default=False),
    ] = None,
    sizes: Annotated[str, typer.Option("--sizes", help="Bytes of a block.")] = "256KiB,1MiB,4MiB",
    blocks: Annotated[int, typer.Option("--blocks", min=2, max=512, help="Blocks at once, beside one.")] = 16,
    runs: Annotated[int, typer.Option("--runs", min=3, help="Turns of each pair.")] = 9,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Of a pool of its own.")] = 2,
    path: Annotated[str, typer.Option("--path", help="How blocks travel: auto, shm, ucx or socket.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="All figures as JSON, with hardware and versions.")] = False,
) -> None:
    """Checked blocks into and out of a pool, in turns with memcpy of the same blocks on this machine."""
    from kvtool.measure.facts import facts
    from kvtool.measure.pool import MATCH_KEYS, measure
    from kvtool.pool.client import PoolClient
    from kvtool.pool.state import read_state

    wanted = _sizes(sizes)
    context = facts(["kvtool", *sys.argv[1:]], seed=1)
    with _pool(run_dir, wanted, blocks, ranks) as folder:
        state = read_state(folder / FILE)
        fits = [size for size in wanted if size <= state.kv_layout.block_size]
        if not fits:
            raise SpecRefused(
                f"--sizes {sizes}: the pool in {folder} holds blocks of up to {show_size(state.kv_layout.block_size)}"
            )
        client = PoolClient(folder / FILE, state.kv_layout, path=path, client_name="bench")
        try:
            found = measure(client, fits, (1, blocks), runs, step)
        finally:
            client.close()
    if as_json:
        rows = [row.to_json() for row in found.rows]
        print_json({**context, "runs": runs, "rows": rows, "match_us": found.match_us.to_json(), "read": found.by})
        return
    cells = [
        [row.what, show_size(row.size), str(row.blocks), str(row.rate_ratio), f"{row.gb_s.median:.2f}",
         f"{row.memcpy_gb_s.median:.2f}"]
        for row in found.rows
    ]  # fmt: skip
    title = f"Checked blocks beside memcpy, {runs} turns each; read by {', '.join(found.by)}"
    columns = ["what", "block", "blocks", "ratio of rates", "GB/s", "memcpy GB/s"]
    out().print(table(title, columns, cells, right=(2, 3, 4, 5)))
    match = found.match_us
    out().print(f"match of {MATCH_KEYS} keys: median {match.median:.0f} us, P99 {match.p99:.0f} us", markup=False)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [parse_size(each) for each in text.split(",")]
    except ValueError as error:
        raise SpecRefused(f"--sizes {text}: {error}") from None
    if min(sizes) < 4096:
        raise SpecRefused(f"--sizes {text}: wanted 4KiB or more each")
    return sorted(sizes)


@contextmanager
def _pool(run_dir: Path | None, sizes: list[int], blocks: int, ranks: int) -> Iterator[Path]:
    """The pool that is meant, or one that is made for this and ends with it."""
    from kvtool.kv.layout import KVLayout
    from kvtool.measure.pool import MATCH_BLOCKS
    from kvtool.pool.config import PoolConfig
    from kvtool.pool.launch import start_pool, stop_pool
    from kvtool.pool.memory import SlotMemory

    if run_dir is not None:
        yield run_dir.absolute()
        return
    layout = KVLayout(layers=1, kv_heads=1, head_dim=32, block_tokens=-(-max(sizes) // 128))
    room = SlotMemory.size(2 * blocks + MATCH_BLOCKS, layout.block_size)
    config = PoolConfig(layout, ranks=ranks, dram_size=room + 2**21, file_size=0, name="bench", heal=False)
    with tempfile.TemporaryDirectory(prefix="kvtool-bench-") as folder:
        step(f"starting {ranks} ranks with {show_size(config.dram_size)} each")
        try:
            start_pool(config, Path(folder))
            yield Path(folder)
        finally:
            stop_pool(Path(folder))
