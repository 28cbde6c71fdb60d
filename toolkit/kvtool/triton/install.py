"""Finding a tritonserver that can run kvtool's models, and saying what it lacks.

Order: the spec's `tritonserver`, else the one on PATH (a Triton container), else the one that the pip package
nvidia-pytriton carries. The last is found by path: importing pytriton would start its machinery. It carries the
Python backend and one stub for each Python, in separate folders; the server wants them in one.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from kvtool.errors import Missing

PIP_LINE = "pip install 'kvtool[serve]'"
STUB = "triton_python_backend_stub"
_GLIBC_MIN = (2, 35)
_WHEEL_VERSION = "2.51.0"
"""The Triton that nvidia-pytriton 0.7 carries; containers say theirs in TRITON_SERVER_VERSION."""


@dataclass(frozen=True)
class Installation:
    """One tritonserver. `wheel` is the folder of nvidia-pytriton's server, None for any other, which brings its own
    backends and libraries."""

    binary: Path
    wheel: Path | None = None

    @property
    def libraries(self) -> Path | None:
        return self.wheel.parents[1] / "nvidia_pytriton.libs" if self.wheel else None


def find(setting: str = "auto") -> Installation:
    """The tritonserver that `setting` names.

    Raises:
        Missing: none there, with the line that installs one.
    """
    if setting != "auto":
        named = shutil.which(setting)
        if named is None:
            raise Missing(f"tritonserver: {setting} is not an executable file; give its path, or auto")
        return _at(Path(named))
    on_path = shutil.which("tritonserver")
    if on_path:
        return _at(Path(on_path))
    wheel = _wheel()
    if wheel is None:
        raise Missing(f"no tritonserver: none on PATH, and nvidia-pytriton is not installed; run: {PIP_LINE}")
    binary = wheel / "bin" / "tritonserver"
    if not binary.is_file():
        raise Missing(f"no tritonserver: nvidia-pytriton is installed without {binary}; run: {PIP_LINE}")
    return Installation(binary, wheel)


def _at(binary: Path) -> Installation:
    """The wheel's own binary needs the wheel's backends, by whatever path it was named."""
    wheel = _wheel()
    inside = wheel is not None and binary.resolve().is_relative_to(wheel.resolve())
    return Installation(binary, wheel if inside else None)


def _wheel() -> Path | None:
    package = importlib.util.find_spec("pytriton")
    return Path(package.origin).parent / "tritonserver" if package is not None and package.origin else None


def preflight(installation: Installation) -> None:
    """What would otherwise fail late, or silently: each as one sentence.

    Raises:
        Missing: the first thing that is not as the server needs it.
    """
    numpy = importlib.metadata.version("numpy")
    if installation.wheel and int(numpy.partition(".")[0]) >= 2:
        raise Missing(
            f"numpy {numpy} is installed, and this Triton's Python stub silently corrupts tensors under numpy 2; "
            "run: pip install 'numpy>=1.26,<2'"
        )
    if installation.wheel is None:
        return
    if platform.machine() != "x86_64":
        raise Missing(f"nvidia-pytriton's server is built for x86_64, this machine is {platform.machine()}")
    glibc = _glibc()
    if glibc and glibc < _GLIBC_MIN:
        raise Missing(f"nvidia-pytriton's server needs glibc 2.35, found {glibc[0]}.{glibc[1]}; use a Triton container")
    if not _stub(installation.wheel).is_file():
        have = sorted(path.name for path in (installation.wheel / "python_backend_stubs").glob("3.*"))
        raise Missing(
            f"nvidia-pytriton has no Python stub for {platform.python_version()}, only for {', '.join(have)}; "
            "make the environment with one of those"
        )
    if not (Path(sys.prefix) / "bin" / "python3").exists():
        raise Missing(f"Triton's stub looks up python3 in {sys.prefix}/bin, and there is none; use a venv")
    library = _library_dir() / f"libpython{_python()}.so.1.0"
    if not library.exists():
        raise Missing(
            f"Triton's stub needs the shared library of this Python, and {library} is not there; "
            f"use a Python built with --enable-shared (Debian: apt-get install libpython{_python()})"
        )


def backend_dir(installation: Installation, run_dir: Path) -> Path | None:
    """Three links in RUN_DIR/backends, the folder for --backend-directory; None for a server that brings its own."""
    if installation.wheel is None:
        return None
    folder = run_dir / "backends" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    backend = installation.wheel / "backends" / "python"
    for source in (
        backend / "libtriton_python.so",
        backend / "triton_python_backend_utils.py",
        _stub(installation.wheel),
    ):
        link = folder / source.name
        if link.is_symlink() and link.readlink() == source:
            continue
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return folder.parent


def environment(installation: Installation) -> dict[str, str]:
    """The server's environment: its stubs embed the Python that PATH finds first, so that is this one.

    Without this Python's own library directory they would embed another libpython of the same minor version. What an
    MPI launcher left in the environment would make the stubs' children believe that they are ranks.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    env.pop("PYTHONHOME", None)
    env["PATH"] = f"{Path(sys.prefix) / 'bin'}:{env.get('PATH', '/usr/bin:/bin')}"
    if installation.libraries:
        env["TRITON_SERVER_VERSION"] = _WHEEL_VERSION
        given = [env["LD_LIBRARY_PATH"]] if env.get("LD_LIBRARY_PATH") else []
        env["LD_LIBRARY_PATH"] = ":".join([str(_library_dir()), str(installation.libraries), *given])
    return env


def _python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _stub(wheel: Path) -> Path:
    return wheel / "python_backend_stubs" / _python() / STUB


def _library_dir() -> Path:
    return Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")


def _glibc() -> tuple[int, int] | None:
    try:
        version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[1].split(".")
        return int(version[0]), int(version[1])
    except (IndexError, ValueError, OSError):
        return None
