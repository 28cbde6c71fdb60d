"""`kvtool batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli import batch_show, console
from kvtool.cli.where import RunDirOption, SpecOption, run_dir_of
from kvtool.errors import Refused
from kvtool.units import parse_seconds, parse_size

if TYPE_CHECKING:
    from kvtool.batch.submit import Made, Wanted

HELP = """Run a file of requests, each answered once.

A file has one request a line, as in OpenAI's batch files (or is a table,
Parquet or CSV; see --columns of `run`):

\b
{"custom_id": "q-1", "url": "/v1/completions",
 "body": {"prompt": "Once upon a time", "max_tokens": 16}}

Chats have the url /v1/chat/completions and "messages" in the body.

A job runs on an engine here, without servers (--engine DIRECTORY, which
`kvtool build` made), or on a running deployment beside its online traffic
(--spec FILE or --run-dir DIRECTORY). In this order:

\b
kvtool batch run in.jsonl --engine ENGINE --plan   what it would take
kvtool batch run in.jsonl --engine ENGINE          Ctrl-C stops it
kvtool batch status in.results.jsonl.job           from any terminal
kvtool batch resume in.results.jsonl.job           after a stop or a crash

Answers are in in.results.jsonl, in the order of the input; lines without
one, and why, in in.results.errors.jsonl.

Exit codes: 0 all was answered; 1 stopped before the end; 2 refused; 3 done,
but some lines have no answer.
"""
UNANSWERED = 3
"""Exit code of a job that is done, where some lines have no answer."""

app = typer.Typer(no_args_is_help=True, help=HELP)

Input = Annotated[Path, typer.Argument(help="Requests: OpenAI batch JSON lines, Parquet, or CSV.", show_default=False)]
Job = Annotated[Path, typer.Argument(help="The job's directory: OUTPUT.job.", show_default=False)]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File of answers; errors go beside it.", show_default="INPUT.results.jsonl"),
]
Engine = Annotated[
    Path | None,
    typer.Option("--engine", "-e", help="Engine directory: run here, in this process.", show_default=False),
]
Url = Annotated[str | None, typer.Option("--url", help="gRPC address of a front; needs --engine for its tokenizer.")]
Format = Annotated[str | None, typer.Option("--format", help="jsonl, parquet or csv.", show_default="by the suffix")]
Columns = Annotated[
    str | None,
    typer.Option("--columns", help="Of a table: custom_id=ID,prompt=TEXT,max_tokens=N, ...", show_default=False),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="For requests that do not say.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first bad line instead of going on without it.")]
Concurrent = Annotated[int, typer.Option("--concurrent", min=1, max=4096, help="Most requests at once.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Compute threads, on an engine here.")]
PoolSize = Annotated[str, typer.Option("--pool-size", help="Memory for KV blocks, on an engine here; 0: keep none.")]
FileSize = Annotated[str, typer.Option("--file-size", help="Files below that memory; 0: none.")]
Attempts = Annotated[int, typer.Option("--attempts", min=1, help="Tries of a request that fails for passing reasons.")]
RequestDeadline = Annotated[str, typer.Option("--request-deadline", help="Longest time of one try.")]
Deadline = Annotated[str | None, typer.Option("--deadline", help="Longest time of the job; then it stops, resumable.")]
Tokens = Annotated[
    int | None, typer.Option("--token-budget", min=1, help="Tokens to generate in all; then it stops, resumable.")
]
Arrival = Annotated[bool, typer.Option("--arrival-order", help="Keep the order of the input.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that is there.")]
JobOption = Annotated[Path | None, typer.Option("--job", help="The job's directory.", show_default="OUTPUT.job")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def _wanted(given: dict[str, Any]) -> Wanted:
    from kvtool.batch.source import read_mapping
    from kvtool.batch.submit import Wanted

    source: Path = given["source"]
    output: Path = given["output"] or source.with_name(f"{source.stem}.results.jsonl")
    run_dir, engine = _where(given["engine"], given["url"], given["spec"], given["run_dir"])
    return Wanted(
        source=source,
        output=output,
        engine=engine,
        job=given["job"],
        kind=given["format"],
        columns=read_mapping(given["columns"]),
        run_dir=run_dir,
        url=given["url"],
        max_tokens=given["max_tokens"],
        strict=given["strict"],
        attempts=given["attempts"],
        request_s=parse_seconds(given["request_deadline"]),
        job_s=parse_seconds(given["deadline"]) if given["deadline"] else None,
        tokens=given["tokens"],
        ordered=not given["arrival"],
        pool_size=parse_size(given["pool_size"]),
        file_size=parse_size(given["file_size"]),
        concurrent=given["concurrent"],
        threads=given["threads"],
        overwrite=given["overwrite"],
    )


def _where(engine: Path | None, url: str | None, spec: Path | None, run_dir: Path | None) -> tuple[Path | None, Path]:
    """The deployment's run directory, or None for an engine here; and the engine directory."""
    live = spec is not None or run_dir is not None
    if engine is not None and live:
        raise Refused("--engine runs the job here, --spec and --run-dir on a deployment; give one of them")
    if url is not None and engine is None:
        raise Refused("--url needs --engine too: requests are put in order by that model's tokenizer")
    if engine is not None:
        return None, engine
    if not live:
        raise Refused(
            "say where to run: --engine DIRECTORY (here), or --spec FILE / --run-dir DIRECTORY (a deployment)"
        )
    folder = run_dir_of(spec, run_dir)
    from kvtool.triton.state import engine_of

    return folder, engine_of(folder)


@app.command()
def run(
    source: Input,
    output: Output = None,
    engine: Engine = None,
    spec: SpecOption = None,
    run_dir: RunDirOption = None,
    url: Url = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what it would take, and stop.")] = False,
    format: Format = None,
    columns: Columns = None,
    max_tokens: MaxTokens = 256,
    strict: Strict = False,
    concurrent: Concurrent = 16,
    threads: Threads = 2,
    pool_size: PoolSize = "1GiB",
    file_size: FileSize = "0",
    attempts: Attempts = 3,
    request_deadline: RequestDeadline = "600s",
    deadline: Deadline = None,
    tokens: Tokens = None,
    arrival: Arrival = False,
    overwrite: Overwrite = False,
    job: JobOption = None,
    as_json: AsJson = False,
) -> None:
    """Check the input, run every request, write the answers. Ctrl-C stops it in order; `resume` goes on."""
    made = _make(_wanted(locals()), plan)
    if plan:
        _show_plan(made, as_json)
        return
    if not as_json:
        _show_plan(made, False)
    _work(made.folder, None, None, as_json)


@app.command()
def submit(
    source: Input,
    output: Output = None,
    engine: Engine = None,
    spec: SpecOption = None,
    run_dir: RunDirOption = None,
    url: Url = None,
    format: Format = None,
    columns: Columns = None,
    max_tokens: MaxTokens = 256,
    strict: Strict = False,
    concurrent: Concurrent = 16,
    threads: Threads = 2,
    pool_size: PoolSize = "1GiB",
    file_size: FileSize = "0",
    attempts: Attempts = 3,
    request_deadline: RequestDeadline = "600s",
    deadline: Deadline = None,
    tokens: Tokens = None,
    arrival: Arrival = False,
    overwrite: Overwrite = False,
    job: JobOption = None,
) -> None:
    """As `run`, in a process of its own that outlives this command. Prints the job's directory."""
    made = _make(_wanted(locals()), False)
    _show_plan(made, False)
    _spawn(made.folder)
    console.done(f"runs in the background; look with: kvtool batch status {made.folder}")
    typer.echo(str(made.folder))


@app.command()
def resume(
    job: Job,
    deadline: Deadline = None,
    tokens: Tokens = None,
    background: Annotated[bool, typer.Option("--background", help="In a process of its own.")] = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a job that was stopped, cancelled or killed; each request is still answered once.

    --deadline and --token-budget replace those that the job was given."""
    from kvtool.batch.job import is_worked_on, read_job

    read_job(job)
    if is_worked_on(job):
        raise Refused(f"{job}: a process works on this job already; look with: kvtool batch status {job}")
    if background:
        _spawn(job)
        console.done(f"runs in the background; look with: kvtool batch status {job}")
        return
    _work(job, parse_seconds(deadline) if deadline else None, tokens, as_json)


@app.command()
def status(job: Job, as_json: AsJson = False) -> None:
    """How far a job is, from any terminal."""
    from kvtool.batch.look import look, look_rows

    found = look(job)
    if as_json:
        console.print_json(found)
        return
    console.out().print(console.table("", ("what", ""), look_rows(found)))


@app.command()
def cancel(job: Job) -> None:
    """Stop a job; what is answered stays, and `resume` goes on with the rest."""
    from kvtool.batch.job import CANCEL, is_worked_on, read_job

    read_job(job)
    if not is_worked_on(job):
        console.done(f"nothing works on {job}; its results: kvtool batch results {job}")
        return
    (job / CANCEL).touch()
    until_s = time.monotonic() + 60
    while is_worked_on(job) and time.monotonic() < until_s:
        (job / CANCEL).touch()  # again: one that begins just now takes the first for an old one
        time.sleep(0.1)
    if is_worked_on(job):
        console.warn("it was told to stop, and has not yet; it ends what it is at")
        raise typer.Exit(1)
    console.done(f"stopped; what was answered is in its output, the rest waits for: kvtool batch resume {job}")


@app.command()
def results(
    job: Job,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write them here.", show_default="the job's own output")
    ] = None,
) -> None:
    """Write what is answered so far, in input order, while the job runs or after."""
    from kvtool.batch.look import write_so_far
    from kvtool.batch.results import errors_path

    written = write_so_far(job, output)
    console.done(f"{written.answered} answered: {written.output}")
    if written.failed:
        console.done(f"{written.failed} without an answer so far: {errors_path(written.output)}")
    typer.echo(str(written.output))


def _make(wanted: Wanted, plan: bool) -> Made:
    from kvtool.batch.submit import make, planned

    with batch_show.checking() as tell:
        return (planned if plan else make)(wanted, tell)


def _show_plan(made: Made, as_json: bool) -> None:
    from kvtool.batch.look import plan_fields, plan_rows

    if as_json:
        console.print_json(plan_fields(made))
        return
    for line in made.taken.first:
        console.warn(line)
    more = made.taken.rejected - len(made.taken.first)
    if more > 0:
        console.warn(f"and {more} more lines that are no requests")
    console.err().print(console.table("", ("plan", ""), plan_rows(made)))


def _work(folder: Path, job_s: float | None, tokens: int | None, as_json: bool) -> None:
    from kvtool.batch.job import read_job
    from kvtool.batch.look import summary, summary_rows, unanswered
    from kvtool.batch.work import interrupts, limits_of, raised, work

    limits = raised(limits_of(read_job(folder)), job_s, tokens)
    with interrupts() as stop, batch_show.working(as_json) as tell:
        worked = work(folder, tell=tell, stop=stop, limits=limits)
    found = summary(worked)
    if as_json:
        console.print_json({"job": str(folder), **found})
    else:
        console.err().print(console.table("", ("summary", ""), summary_rows(worked)))
        typer.echo(str(worked.output))
    if worked.why:
        console.warn(f"stopped: {worked.why}; the rest waits for: kvtool batch resume {folder}")
        raise typer.Exit(1)
    if worked.failed:
        console.warn(unanswered(worked))
        raise typer.Exit(UNANSWERED)


def _spawn(folder: Path) -> None:
    """Go on with the job in a session of its own; what it says goes to the job's log."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtool.cli.main", "batch", "resume", str(folder.absolute()), "--json"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    from kvtool.batch.job import is_worked_on

    until_s = time.monotonic() + 30
    while not is_worked_on(folder) and time.monotonic() < until_s:
        if process.poll() is not None:
            break
        time.sleep(0.05)
    if process.poll() not in (None, 0, UNANSWERED):
        said = (folder / "log").read_text(errors="replace").strip().splitlines()
        raise Refused(said[-1] if said else f"the job's process ended at once; see {folder / 'log'}")
