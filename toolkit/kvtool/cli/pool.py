"""`kvtool pool`: a KV pool of its own: start it, look at it, ask what is held there, stop it.

A deployment starts its own pool; this is for a pool that several deployments or batch jobs share, and for looking into
any pool by its run directory. `status` and `audit` exit 1 when a rank does not answer, or something is overdue.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli import console
from kvtool.cli.pool_bench import bench
from kvtool.cli.pool_tenants import COLUMNS, tenant_rows
from kvtool.cli.pool_top import top
from kvtool.cli.pool_verify import verify
from kvtool.config.spec import default_run_dir
from kvtool.engine.manifest import read_manifest
from kvtool.errors import SpecRefused
from kvtool.kv.layout import KVLayout
from kvtool.kv.policy import AUTO, CHOICES
from kvtool.pool.config import PoolConfig
from kvtool.pool.keeping import attach_keeper, keeper_status
from kvtool.pool.launch import PoolStatus, RankStatus, pool_status, start_pool, stop_pool
from kvtool.pool.metrics import text
from kvtool.pool.rates import alarms
from kvtool.pool.resize import Draining
from kvtool.pool.resize import drain as drain_ranks
from kvtool.pool.resize import resize as resize_pool
from kvtool.pool.rundir import pool_runs
from kvtool.units import parse_seconds, parse_size, show_size

app = typer.Typer(no_args_is_help=True)
for command in (verify, top, bench):
    app.command()(command)

RunDir = Annotated[Path | None, typer.Option("--run-dir", help="Run directory of the pool.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]
_LAYOUT_HELP = "Layout of a block, such as layers=30,kv_heads=3,head_dim=64,block_tokens=32,dtype=bfloat16."


@app.command()
def up(
    engine: Annotated[
        Path | None, typer.Option("--engine", help="Engine directory whose blocks it holds.", show_default=False)
    ] = None,
    layout: Annotated[str | None, typer.Option("--layout", help=_LAYOUT_HELP, show_default=False)] = None,
    ranks: Annotated[int, typer.Option("--ranks", help="How many ranks.")] = 2,
    dram_size: Annotated[str, typer.Option("--dram-size", help="Memory of each rank.")] = "256MiB",
    file_size: Annotated[str, typer.Option("--file-size", help="Block file of each rank; 0 for none.")] = "1GiB",
    file_dir: Annotated[
        Path | None, typer.Option("--file-dir", help="Where block files are; else the run directory.")
    ] = None,
    remote: Annotated[
        str, typer.Option("--remote", help="Store below the files: a directory, or a URL such as s3://BUCKET.")
    ] = "",
    remote_size: Annotated[str, typer.Option("--remote-size", help="Room there for each rank.")] = "0",
    file_key: Annotated[
        Path | None, typer.Option("--file-key", help="File of mode 0600: the key that block files are encrypted with.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option("--key-file", help="File of mode 0600: the pool's key; else a new one each time.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address that ranks listen on; other than loopback only with --key-file.")
    ] = "127.0.0.1",
    tenants: Annotated[
        Path | None, typer.Option("--tenants", help="YAML list of tenants: name, key_file and quotas.")
    ] = None,
    write: Annotated[
        str, typer.Option("--write", help="back: to files when memory is wanted; through: before a put is answered.")
    ] = "back",
    evict: Annotated[
        str, typer.Option("--evict", help=f"Which blocks go first: {', '.join(CHOICES)}. auto tries them and chooses.")
    ] = AUTO,
    flush: Annotated[
        str, typer.Option("--flush", help="How long a stopping rank may write its memory to its file.")
    ] = "3s",
    lease_term: Annotated[str, typer.Option("--lease-term", help="How long a read may take.")] = "10s",
    copies: Annotated[int, typer.Option("--copies", help="How many ranks hold each block.")] = 1,
    namespace_copies: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace-copies", help="NAME=COPIES: how many hold those of one namespace.", show_default=False
        ),
    ] = None,
    copy_rate: Annotated[
        str, typer.Option("--copy-rate", help="Bytes a second that a rank may spend on copies to others.")
    ] = "1GiB",
    metrics_pages: Annotated[
        bool, typer.Option("--metrics/--no-metrics", help="Whether each rank serves /metrics on a loopback port.")
    ] = True,
    name: Annotated[str, typer.Option("--name", help="Name of the pool; its block files carry it.")] = "pool",
    run_dir: RunDir = None,
) -> None:
    """Start a pool, and a keeper that starts dead ranks again; returns when every rank answers."""
    folder = _folder(run_dir)
    if pool_runs(folder) and not _keeper_is_well(folder):
        attach_keeper(folder)
        console.done(f"a pool runs in {folder} already; it had no keeper that starts dead ranks again, and has one now")
        return
    config = PoolConfig(
        layout=_layout(engine, layout),
        ranks=ranks,
        dram_size=_parsed("--dram-size", dram_size, parse_size),
        file_size=_parsed("--file-size", file_size, parse_size),
        file_dir=file_dir.absolute() if file_dir else None,
        remote=remote,
        remote_size=_parsed("--remote-size", remote_size, parse_size),
        file_key=file_key.absolute() if file_key else None,
        key_file=key_file.absolute() if key_file else None,
        tenants=tenants.absolute() if tenants else None,
        host=host,
        write=write,
        evict=evict,
        flush_s=_parsed("--flush", flush, parse_seconds),
        lease_term_s=_parsed("--lease-term", lease_term, parse_seconds),
        copies=copies,
        metrics=metrics_pages,
        namespaces=dict(_copies_of(text) for text in namespace_copies or []),
        copy_rate=_parsed("--copy-rate", copy_rate, parse_size),
        name=name,
    )
    console.step(f"starting {ranks} ranks in {folder}, blocks of {config.layout}")
    handle = start_pool(config, folder)
    console.done(f"{ranks} ranks answer; clients find them by {handle.state_file}")


@app.command()
def down(
    run_dir: RunDir = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove its block files too.")] = False,
) -> None:
    """Stop a pool and remove what it left behind. Nothing to stop is fine.

    Block files stay: the next pool of that name finds their blocks again."""
    folder = _folder(run_dir)
    found = stop_pool(folder, purge=purge)
    console.done(f"no rank runs any more in {folder}" if found else f"no pool runs in {folder}")


@app.command()
def status(run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Every rank, its room and what happened there. Exits 1 unless all ranks answer."""
    found = pool_status(_folder(run_dir))
    if as_json:
        console.print_json(_plain(found))
    else:
        title = f"pool in {found.run_dir}, epoch {found.state.epoch}, blocks of {found.state.kv_layout}"
        columns = ["rank", "pid", "state", "DRAM", "files", "leases", "blocks since the start"]
        rows = [_row(rank) for rank in found.ranks]
        console.out().print(console.table(title, columns, rows, right=range(3, 6)))
        tenants_found = tenant_rows(rank.answer for rank in found.ranks if rank.answer is not None)
        if tenants_found:
            console.out().print(console.table("tenants", COLUMNS, tenants_found, right=range(1, len(COLUMNS))))
        for sentence in [rank.why for rank in found.ranks if rank.why] + _alarms(found):
            console.warn(sentence)
        _say_keeper(found)
    if not found.whole:
        raise typer.Exit(1)


@app.command()
def metrics(run_dir: RunDir = None) -> None:
    """What all ranks count, as Prometheus reads it; each also serves its own at /metrics."""
    found = pool_status(_folder(run_dir))
    console.out().print(text([rank.answer for rank in found.ranks if rank.answer is not None]), end="", markup=False)
    if not found.whole:
        raise typer.Exit(1)


@app.command()
def audit(run_dir: RunDir = None, as_json: AsJson = False) -> None:
    """Everything that anybody holds: how many of each kind, and the oldest. Exits 1 when one is overdue."""
    found = pool_status(_folder(run_dir), audit=True)
    lines = [(rank.rank, line) for rank in found.ranks for line in rank.audit]
    if as_json:
        console.print_json(_plain(found))
    elif lines:
        columns = ["rank", "what", "how many", "oldest held by", "for", "ends in"]
        rows = [_audit_row(rank, line) for rank, line in lines]
        console.out().print(console.table(f"held in the pool of {found.run_dir}", columns, rows, right=[2, 4, 5]))
    else:
        console.done("nothing is held")
    for alarm in _alarms(found):
        console.warn(alarm)
    overdue = any(_overdue(line) for _, line in lines)
    if overdue or not found.whole:
        raise typer.Exit(1)


@app.command()
def drain(
    rank: Annotated[int, typer.Argument(help="Its number.")],
    leave: Annotated[bool, typer.Option("--leave", help="End it when its blocks are elsewhere.")] = False,
    timeout: Annotated[str, typer.Option("--timeout", help="How long its blocks may take to move.")] = "60s",
    run_dir: RunDir = None,
) -> None:
    """Have one rank take nothing new and move its blocks to the others. Exits 1 when that takes too long."""
    folder = _folder(run_dir)
    budget_s = _parsed("--timeout", timeout, parse_seconds)
    found = drain_ranks(folder, [rank], leave=leave, budget_s=budget_s, progress=_Moving())
    lost = sum(one.homeless for one in found)
    if lost:
        console.warn(f"{lost} blocks have no room elsewhere" + (" and are gone" if leave else ""))
    console.done(f"rank {rank} " + ("has left" if leave else "takes nothing new, and can leave: --leave"))


@app.command()
def resize(
    ranks: Annotated[int, typer.Option("--ranks", help="How many ranks there shall be.")],
    timeout: Annotated[str, typer.Option("--timeout", help="How long it may take.")] = "60s",
    run_dir: RunDir = None,
) -> None:
    """Start further ranks in a running pool, or drain the highest ones and end them."""
    folder = _folder(run_dir)
    budget_s = _parsed("--timeout", timeout, parse_seconds)
    started, gone = resize_pool(folder, ranks, budget_s=budget_s, progress=_Moving())
    for what, which in (("started", started), ("drained and ended", gone)):
        if which:
            console.step(f"{what}: rank {', '.join(map(str, which))}")
    console.done(f"{ranks} ranks in {folder}")


class _Moving:
    """Says how many blocks are left, when that has halved."""

    def __init__(self) -> None:
        self._said: dict[int, int] = {}

    def __call__(self, draining: Draining) -> None:
        said = self._said.get(draining.rank)
        if draining.left and (said is None or draining.left <= said // 2):
            self._said[draining.rank] = draining.left
            console.step(f"rank {draining.rank}: {draining.left} blocks to move")


def _keeper_is_well(folder: Path) -> bool:
    keeper = keeper_status(folder)
    return keeper.runs and not keeper.given_up


def _say_keeper(found: PoolStatus) -> None:
    keeper = found.keeper
    if not keeper.runs:
        console.warn("no keeper runs: a rank that dies stays dead; leave one behind with: kvtool pool up")
    for rank in keeper.given_up:
        console.warn(f"rank {rank} ended too often and is not started again; see pool.log, then: kvtool pool up")
    if any(keeper.starts.values()):
        again = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(keeper.starts.items()))
        console.step(f"started by the keeper, pid {keeper.pid}: {again}")


def _alarms(found: PoolStatus) -> list[str]:
    return alarms(rank.answer for rank in found.ranks if rank.answer is not None)


def _folder(run_dir: Path | None) -> Path:
    return run_dir.absolute() if run_dir is not None else default_run_dir("pool")


def _layout(engine: Path | None, text: str | None) -> KVLayout:
    if (engine is None) == (text is None):
        raise SpecRefused("a pool holds blocks of one layout: give either --engine DIRECTORY or --layout FIELDS")
    if engine is not None:
        return read_manifest(engine).layout
    fields: dict[str, Any] = {}
    for field in (text or "").split(","):
        name, equals, value = field.partition("=")
        if not equals:
            raise SpecRefused(f"--layout {text}: wanted name=value, found {field!r}; {_LAYOUT_HELP}")
        fields[name.strip()] = int(value) if value.strip().isdigit() else value.strip()
    try:
        return KVLayout(**fields)
    except (TypeError, ValueError) as error:
        raise SpecRefused(f"--layout {text}: {error}; {_LAYOUT_HELP}") from None


def _copies_of(text: str) -> tuple[str, int]:
    name, equals, copies = text.rpartition("=")
    if not (equals and name and copies.isdigit()):
        raise SpecRefused(f"--namespace-copies {text}: wanted NAME=COPIES, such as chat=2")
    return name, int(copies)


def _parsed(flag: str, text: str, parse: Any) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise SpecRefused(f"{flag} {text}: {error}") from None


def _row(rank: RankStatus) -> list[str]:
    if rank.answer is None:
        return [str(rank.rank), str(rank.pid), "does not answer" if rank.runs else "dead", *["-"] * 4]
    answer, counts = rank.answer, rank.answer["counts"]
    size = answer["slot_size"]
    room = [
        f"{show_size(answer[used] * size)} of {show_size(answer[total] * size)}"
        for used, total in (("slots_used", "slots"), ("file_slots_used", "file_slots"))
    ]
    happened = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    return [str(rank.rank), str(rank.pid), _state(answer), *room, str(answer["leases"]), happened or "none"]


def _state(answer: dict[str, Any]) -> str:
    state = "serves" if answer["status"] == "live" else str(answer["status"])
    if answer["status"] == "joining":
        state += f", {answer['weight']:.0%} of its share"
    copying = answer.get("copying", {})
    if copying.get("leaving"):
        state += ", empty" if copying["empty"] else f", {copying['left']} blocks left"
    elif copying.get("owed") or copying.get("flying"):
        state += f", owes {copying['owed'] + copying['flying']} copies"
    hung = answer["hung"]
    return state + (f"; does not hear rank {', '.join(map(str, hung))}" if hung else "")


def _audit_row(rank: int, line: dict[str, Any]) -> list[str]:
    ends = "by an event" if line["deadline_s"] is None else f"{line['deadline_s']:.1f} s"
    owner = line["name"] or f"client {line['owner']}"
    return [str(rank), line["kind"], str(line["count"]), owner, f"{line['age_s']:.1f} s", ends]


def _overdue(line: dict[str, Any]) -> bool:
    return line["kind"] == "lost slot" or (line["deadline_s"] is not None and line["deadline_s"] < -1.0)


def _plain(found: PoolStatus) -> dict[str, Any]:
    return {
        "run_dir": str(found.run_dir),
        "epoch": found.state.epoch,
        "layout": found.state.layout,
        "alarms": _alarms(found),
        "launcher_runs": found.launcher_runs,
        "keeper": asdict(found.keeper),
        "ranks": [asdict(rank) for rank in found.ranks],
    }
