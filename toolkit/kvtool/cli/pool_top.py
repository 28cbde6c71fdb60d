"""`kvtool pool top`: every rank of a running pool, now, once a second until Ctrl-C."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtool.cli import console
from kvtool.config.spec import default_run_dir
from kvtool.errors import SpecRefused
from kvtool.pool.launch import PoolStatus, pool_status
from kvtool.pool.rates import RankRates, alarms, hit_ratio, rates
from kvtool.units import parse_seconds, show_size


def top(
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Run directory of the pool.", show_default=False)
    ] = None,
    interval: Annotated[str, typer.Option("--interval", help="Between two looks.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="Two looks, one table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, one object a look.")] = False,
) -> None:
    """Room, hit ratio, bytes a second, evictions and copies of every rank, as they change."""
    folder = run_dir.absolute() if run_dir is not None else default_run_dir("pool")
    try:
        interval_s = parse_seconds(interval)
    except ValueError as error:
        raise SpecRefused(f"--interval {interval}: {error}") from None
    looks = _Looks(folder)
    looks.look()
    if once or as_json:
        while True:
            time.sleep(interval_s)
            looks.look()
            if as_json:
                console.print_json(looks.plain())
            else:
                console.out().print(looks.shown())
            if once:
                return
    with Live(looks.shown(), console=console.out(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                looks.look()
                live.update(looks.shown(), refresh=True)
        except KeyboardInterrupt:
            return


class _Looks:
    """The last two looks at a pool."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._before: PoolStatus | None = None
        self._now: PoolStatus | None = None
        self._times_s = (0.0, 0.0)

    def look(self) -> None:
        self._before, self._now = self._now, pool_status(self._run_dir)
        self._times_s = (self._times_s[1], time.monotonic())

    def shown(self) -> Group:
        """The table, and what should not go on like that."""
        assert self._now is not None
        ratio = self._hit_ratio()
        asked = "nothing was asked for" if ratio is None else f"{ratio:.1%} of the tokens asked for were there"
        title = f"pool in {self._run_dir}, epoch {self._now.state.epoch}: {asked}"
        warnings = [Text(f"! {alarm}", style="yellow") for alarm in self._alarms()]
        return Group(_table(title, self.rates(), self._now), *warnings)

    def plain(self) -> dict[str, object]:
        assert self._now is not None
        return {
            "epoch": self._now.state.epoch,
            "seconds": self._times_s[1] - self._times_s[0],
            "hit_ratio": self._hit_ratio(),
            "ranks": [asdict(one) for one in self.rates()],
            "silent": [rank.rank for rank in self._now.ranks if rank.answer is None],
            "alarms": self._alarms(),
        }

    def rates(self) -> list[RankRates]:
        assert self._now is not None
        before = {} if self._before is None else {r.rank: r.answer for r in self._before.ranks}
        seconds = self._times_s[1] - self._times_s[0]
        return [rates(before.get(r.rank), r.answer, seconds) for r in self._now.ranks if r.answer is not None]

    def _hit_ratio(self) -> float | None:
        assert self._now is not None
        now = [rank.answer for rank in self._now.ranks if rank.answer is not None]
        ranks = [] if self._before is None else self._before.ranks
        before = [rank.answer for rank in ranks if rank.answer is not None]
        recent = hit_ratio(before, now)
        return hit_ratio([], now) if recent is None else recent

    def _alarms(self) -> list[str]:
        assert self._now is not None
        return alarms(rank.answer for rank in self._now.ranks if rank.answer is not None)


COLUMNS = (
    "rank", "state", "clients", "DRAM", "files", "held", "in/s", "out/s", "evicted/s", "leases", "owed", "CPU",
    "policy",
)  # fmt: skip


def _table(title: str, lines: list[RankRates], found: PoolStatus) -> Table:
    rows = [_row(line) for line in lines]
    silent = [rank for rank in found.ranks if rank.answer is None]
    rows += [[str(rank.rank), "does not answer" if rank.runs else "dead", *["-"] * 11] for rank in silent]
    rows.sort(key=lambda row: int(row[0]))
    return console.table(title, COLUMNS, rows, right=range(2, 12))


def _row(line: RankRates) -> list[str]:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    def size(value: float | None) -> str:
        return "-" if value is None else show_size(int(value))

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}"

    return [
        str(line.rank), line.state, number(line.clients), share(line.dram_share), share(line.file_share),
        share(line.held_share), size(line.in_bytes_s), size(line.out_bytes_s),
        number(line.evictions_s), number(line.leases), number(line.owed), share(line.cpu_share), line.policy or "-",
    ]  # fmt: skip
