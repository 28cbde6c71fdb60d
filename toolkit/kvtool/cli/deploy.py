"""`kvtool deploy`: start a deployment, look at it, stop it.

`up` starts a supervisor that outlives the command, and waits until every server answered a real inference. `down`
also ends what a killed supervisor left behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli import console
from kvtool.cli.where import RunDirOption, SetOption, SpecArgument, SpecOption, read_spec, run_dir_of
from kvtool.config.spec import Spec
from kvtool.errors import KvtoolError, Refused, Unavailable
from kvtool.triton import process, state
from kvtool.triton.peers import write_whole
from kvtool.units import show_size

app = typer.Typer(no_args_is_help=True)


@app.command()
def up(
    spec: SpecArgument,
    settings: SetOption = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Supervise in this process; Ctrl-C stops all.")
    ] = False,
) -> None:
    """Start pool and servers; returns when every server has answered a canary inference."""
    read = read_spec(spec, settings)
    _check(read)
    run_dir = read.state_dir
    state.make_run_dir(run_dir)
    if state.supervised(state.read_state_or_nothing(run_dir)):
        raise Refused(f"a deployment runs in {run_dir} already; end it with: kvtool deploy down --run-dir {run_dir}")
    write_whole(run_dir / "spec.json", read.model_dump(mode="json"))
    console.step(f"starting {read.name} in {run_dir}")
    if foreground:
        _foreground(read, run_dir)
        return
    supervisor = _spawn(run_dir)
    try:
        _wait(supervisor, run_dir, read)
    except BaseException as error:
        if not isinstance(error, KvtoolError):
            console.warn("interrupted: stopping what was started")
        supervisor.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(state.STOP_TIMEOUT_S)
        state.stop(run_dir)
        raise
    _explain(run_dir)


@app.command()
def down(
    spec: SpecOption = None,
    run_dir: RunDirOption = None,
    purge: Annotated[bool, typer.Option("--purge", help="Remove the pool's block files too.")] = False,
) -> None:
    """Stop a deployment and remove what it left behind, its supervisor alive or not. Nothing to stop is fine.

    The pool's block files stay: the next start finds their blocks again."""
    folder = run_dir_of(spec, run_dir)
    said = state.stop(folder, purge=purge)
    for line in said:
        console.step(line)
    console.done(f"nothing of it runs any more in {folder}" if said else f"nothing runs in {folder}")


@app.command()
def status(
    spec: SpecOption = None,
    run_dir: RunDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Servers, pool, and requests in flight. Exits 1 unless everything serves."""
    folder = run_dir_of(spec, run_dir)
    found = _status(folder)
    if as_json:
        console.print_json(found)
    else:
        _show(found)
    healthy = all(server["state"] == "serving" for server in found["servers"]) and found["phase"] == "running"
    if not healthy or found["pool"]["state"] == "down":
        raise typer.Exit(1)


@app.command()
def logs(
    name: Annotated[str, typer.Argument(help="Server such as decode-0, or supervisor; all when left out.")] = "",
    spec: SpecOption = None,
    run_dir: RunDirOption = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines from the end of each.")] = 20,
) -> None:
    """The last lines of the logs."""
    folder = run_dir_of(spec, run_dir) / "logs"
    found = sorted(folder.glob("*.log")) if folder.is_dir() else []
    names = [path.stem for path in found]
    if not found:
        raise Unavailable(f"no logs in {folder}; nothing was started there")
    if name and name not in names:
        raise Refused(f"no log of {name!r} in {folder}; there are: {', '.join(names) or 'none'}")
    for path in found:
        if name in ("", path.stem):
            console.step(str(path))
            for line in path.read_text(errors="replace").splitlines()[-lines:]:
                console.out().print(line, markup=False)


@app.command()
def render(
    spec: SpecArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for front/, prefill/ and decode/.")],
    settings: SetOption = None,
    launch: Annotated[
        str,
        typer.Option(
            "--launch", help="Launch files beside them: all, or some of mpirun,slurm,compose,kubernetes. For GPUs."
        ),
    ] = "",
) -> None:
    """Write the three Triton model repositories, for a Triton that you run yourself.

    A spec for GPUs is checked first, as by `kvtool check`; for others the engine need not be on this machine."""
    from kvtool.config.fault import refuse
    from kvtool.triton.check import faults
    from kvtool.triton.launch import parse_kinds, render_launch
    from kvtool.triton.render import render as render_repositories

    read = read_spec(spec, settings)
    kinds = parse_kinds(launch) if launch else ()
    if read.target == "tensorrt_llm" or read.engine.exists():
        refuse(faults(read))
    files = render_repositories(read, out)
    if kinds:
        files += render_launch(read, out, kinds)
    console.done(f"{len(files)} files in {out}; the same spec gives the same bytes")


def _check(spec: Spec) -> None:
    """What can be refused before anything starts, in the terminal that asked."""
    from kvtool.config.fault import refuse
    from kvtool.triton import install
    from kvtool.triton.check import faults
    from kvtool.triton.ports import choose

    refuse(faults(spec))
    if spec.target == "tensorrt_llm":
        _check_memory(spec)
    install.preflight(install.find(spec.tritonserver))
    choose(spec.front.host, spec.front.http_port, spec.front.grpc_port, spec.front.metrics_port)


def _check_memory(spec: Spec) -> None:
    """All of it runs here, so host caches and pool are held against what this host and its control groups have."""
    from kvtool.transfer.room import demand, rooms
    from kvtool.transfer.segment import SHM

    roles = ((spec.tensorrt_llm.prefill, spec.prefill.instances), (spec.tensorrt_llm.decode, spec.decode.instances))
    size = sum(role.host_cache_size * instances for role, instances in roles)
    if size:
        size += spec.pool.ranks * spec.pool.dram_size if spec.pool.enabled else 0
        _, *memory = rooms(SHM)
        demand(
            "host caches of all instances, and the pool",
            size,
            memory,
            "tensorrt_llm.*.host_cache_size or pool.dram_size",
        )


def _foreground(spec: Spec, run_dir: Path) -> None:
    from kvtool.triton.supervise import main

    told = _Teller(spec)

    def progress(now: dict[str, Any]) -> None:
        if told.tell(now):
            _explain(run_dir, now)

    main(run_dir, progress)
    console.done("stopped")


def _spawn(run_dir: Path) -> subprocess.Popen[bytes]:
    """The supervisor, in a session of its own: it outlives this command and its terminal."""
    (run_dir / "logs").mkdir(exist_ok=True)
    log = os.open(run_dir / "logs" / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "kvtool.triton.supervise", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(log)


def _wait(supervisor: subprocess.Popen[bytes], run_dir: Path, spec: Spec) -> None:
    """Raises Unavailable: it did not start; with the reason that the supervisor recorded."""
    told = _Teller(spec)
    until_s = time.monotonic() + 2 * spec.supervise.start_timeout + 10
    while True:
        found = state.read_state_or_nothing(run_dir)
        mine = bool(found) and found is not None and found.get("supervisor", {}).get("pid") == supervisor.pid
        if mine and found is not None and told.tell(found):
            return
        if supervisor.poll() is not None:
            found = state.read_state_or_nothing(run_dir) or {}
            log = run_dir / "logs" / "supervisor.log"
            raise Unavailable(found.get("error") or f"the supervisor ended: {_last_line(log)}; log: {log}")
        if time.monotonic() > until_s:
            raise Unavailable(f"the deployment did not start; logs: kvtool deploy logs --run-dir {run_dir}")
        time.sleep(0.1)


class _Teller:
    """Says each change once, as it comes."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._said, self._began_s = spec, set[str](), time.monotonic()
        self._running = False

    def tell(self, now: dict[str, Any]) -> bool:
        """True once: when the deployment first runs."""
        pool = now["pool"]
        if pool["state"] == "up":
            self._once("pool", f"pool is up: {pool['ranks_alive']} ranks of {show_size(self._spec.pool.dram_size)}")
        for server in now["servers"]:
            if server["pid"]:
                self._once(f"start {server['name']}", f"{server['name']} loads (pid {server['pid']})", quiet=True)
            if server["state"] == "serving":
                took = server["canary_took_s"] or 0.0
                self._once(server["name"], f"{server['name']} serves; its canary took {1e3 * took:.0f} ms")
        if now["phase"] == "running":
            self._once("running", f"ready after {time.monotonic() - self._began_s:.1f} s", mark=console.done)
            first, self._running = not self._running, True
            return first
        return False

    def _once(self, key: str, text: str, quiet: bool = False, mark: Any = console.step) -> None:
        if key not in self._said:
            self._said.add(key)
            (console.step if quiet else mark)(text)


def _explain(run_dir: Path, now: dict[str, Any] | None = None) -> None:
    """How to talk to it."""
    found = now or state.read_state(run_dir) or {}
    front = next(server for server in found["servers"] if server["role"] == "front")
    host, http, grpc = found["host"], front["http_port"], front["grpc_port"]
    out = console.out()
    lines = [
        "",
        f"  gRPC {host}:{grpc}   HTTP {host}:{http}   metrics http://{host}:{front['metrics_port']}/metrics",
        "",
        f"  kvtool generate --run-dir {run_dir} --prompt 'Why is the sky blue?'",
        f"  kvtool chat --run-dir {run_dir}",
        f"  curl -N http://{host}:{http}/v2/models/kvtool/generate_stream \\",
        """    -d '{"text_input": "Once upon a time", "max_tokens": 32}'""",
        "",
        "  from kvtool.triton.client import stream",
        f"""  for piece in stream("{host}:{grpc}", "Once upon a time", max_tokens=32):""",
        """      print(piece.text, end="", flush=True)""",
        "",
        f"  kvtool deploy status --run-dir {run_dir}",
        f"  kvtool deploy down --run-dir {run_dir}",
    ]
    for line in lines:
        out.print(line, markup=False)


def _status(run_dir: Path) -> dict[str, Any]:
    """The recorded state, with what the front says now. Raises Unavailable: nothing runs there."""
    found = state.read_state(run_dir)
    if found is None:
        raise Unavailable(f"no deployment runs in {run_dir}; start one with: kvtool deploy up SPEC")
    if not state.supervised(found):
        raise Unavailable(
            f"the supervisor of {run_dir} is gone{': ' + found['error'] if found.get('error') else ''}; "
            f"clean up with: kvtool deploy down --run-dir {run_dir}"
        )
    for server in found["servers"]:
        family = [server["pid"], *server["stubs"]] if server["pid"] else []
        server["rss_size"] = sum(look.rss_size for pid in family if (look := process.look(pid)))
        server["canary_age_s"] = round(time.time() - server["canary_at_s"], 1) if server["canary_at_s"] else None
    found["front"] = {}
    with contextlib.suppress(KvtoolError, ImportError):
        from kvtool.triton.client import operate

        found["front"] = operate(state.front_url(run_dir), "status", timeout_s=3.0)
    return found


def _show(found: dict[str, Any]) -> None:
    rows = [
        (
            server["name"],
            server["state"],
            str(server["pid"] or ""),
            f"{server['http_port']} / {server['grpc_port']} / {server['metrics_port']}",
            show_size(server["rss_size"]),
            f"{server['canary_age_s']:.1f} s ago, {1e3 * server['canary_took_s']:.0f} ms"
            if server["canary_at_s"]
            else "",
            str(server["restarts"]),
            server["last_error"],
        )
        for server in found["servers"]
    ]
    columns = ("server", "state", "pid", "HTTP / gRPC / metrics", "memory", "canary", "restarts", "last failure")
    out = console.out()
    out.print(console.table(f"{found['name']}: {found['phase']}", columns, rows, right=(2, 4, 6)))
    pool = found["pool"]
    said = {"off": "pool off: every prompt is computed", "down": "pool down: serving without it"}.get(pool["state"])
    out.print(said or f"pool up: {pool['ranks_alive']} of {pool['ranks']} ranks, {pool['restarts']} restarts")
    totals = found["front"].get("totals")
    if totals:
        prompt = totals["prompt_tokens"]
        ratio = f"{totals['hit_tokens'] / prompt:.0%}" if prompt else "none yet"
        out.print(
            f"{len(found['front']['in_flight'])} in flight, {totals['requests']} done, {totals['failed']} failed; "
            f"{totals['hit_tokens']} of {prompt} prompt tokens were hits ({ratio})",
            markup=False,
        )


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            return lines[-1]
    return "it wrote no log"
