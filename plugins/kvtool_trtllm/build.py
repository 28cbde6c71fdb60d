"""The kernels' library: compiled by nvcc where the GPU is, once, and kept.

It is kept in $KVTOOL_CACHE, else $XDG_CACHE_HOME/kvtool, else ~/.cache/kvtool, under a name made of the source, the
flags, the compiler's version and the architectures, so that a library is never older than what it was made of. Ranks
that start together wait for the one that compiles. nvcc is $KVTOOL_NVCC, else of $CUDA_HOME, the PATH or
/usr/local/cuda; the host compiler is its own choice.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from kvtool.errors import EngineFailed, Missing

SOURCE = Path(__file__).parent / "copies.cu"
FLAGS = ("-std=c++17", "-O3", "--shared", "--cudart=static", "-Xcompiler=-fPIC")
COMPILE_S = 300.0


def build(
    architectures: Sequence[str], cache: Path | None = None, nvcc: Path | None = None, more: Sequence[str] = ()
) -> Path:
    """The library for `architectures` ("80", "90", "100"), compiled if it is not there. Seconds each, the first time.
    `more`: flags besides FLAGS.

    Raises:
        Missing: there is no nvcc.
        EngineFailed: it does not compile, the cache cannot be written, or another process took too long.
    """
    compiler = nvcc or find_nvcc()
    flags = [*FLAGS, *more, *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures)]
    version = _run([str(compiler), "--version"], 30.0)
    digest = blake3("\0".join([*flags, version]).encode() + SOURCE.read_bytes()).hexdigest()[:24]
    folder = cache or cache_folder()
    library = folder / f"copies-{'-'.join(architectures)}-{digest}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(library.with_suffix(".lock")):
            if not library.exists():
                _compile([str(compiler), *flags], library)
    except OSError as error:
        raise EngineFailed(f"{folder}: cannot keep the kernels: {error}; set KVTOOL_CACHE to another folder") from None
    return library


def find_nvcc() -> Path:
    """Raises Missing where there is none."""
    named = os.environ.get("KVTOOL_NVCC")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    tried = [named] if named else [f"{home}/bin/nvcc" if home else None, "nvcc", "/usr/local/cuda/bin/nvcc"]
    for path in tried:
        found = shutil.which(path) if path else None
        if found:
            return Path(found)
    where = f"KVTOOL_NVCC names {named}" if named else "looked in CUDA_HOME, the PATH and /usr/local/cuda"
    raise Missing(f"no nvcc: {where}; install the CUDA toolkit (cuda-nvcc) or set KVTOOL_NVCC")


def cache_folder() -> Path:
    given = os.environ.get("KVTOOL_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtool"


def _compile(command: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as scratch:
        made = Path(scratch) / library.name
        _run([*command, "-o", str(made), str(SOURCE)], COMPILE_S)
        made.replace(library)


def _run(command: list[str], within_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"{command[0]}: not done after {within_s:.0f} s") from None
    except OSError as error:
        raise Missing(f"{command[0]}: does not start: {error.strerror}; set KVTOOL_NVCC") from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise EngineFailed(f"{command[0]}: exit {done.returncode}: {' | '.join(said[:6]) or 'no words'}")
    return done.stdout


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; a dead one's lock is gone with it."""
    until_s = time.monotonic() + COMPILE_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise EngineFailed(f"{path}: another process has compiled for {COMPILE_S:.0f} s") from None
                time.sleep(0.1)
        yield
