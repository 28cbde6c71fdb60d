"""Who may move bytes here: torch's operations, the kernels' source compiled for this CPU, the kernels on a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from kvtool_trtllm import build as building  # noqa: E402
from kvtool_trtllm.copies import Mover, mover_for  # noqa: E402
from kvtool_trtllm.kernel import Kernel  # noqa: E402
from kvtool_trtllm.twin import Twin  # noqa: E402

HERE = Path(__file__).parent
GPU = torch.cuda.is_available()
ON_CPU = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-fPIC", "-shared", "-x", "c++", "-DKVTOOL_HOST", f"-I{HERE}"]
STRICT = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-fsanitize=undefined",
    "-fsanitize-undefined-trap-on-error",
]


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """copies.cu as plain C++: the same index arithmetic, its threads in shuffled order, misaligned words a trap."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    library = tmp_path_factory.mktemp("kernels") / "host.so"
    done = subprocess.run(
        [compiler, *ON_CPU, *STRICT, str(building.SOURCE), "-o", str(library)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return Kernel(library)


@pytest.fixture(scope="session", params=["torch", "source on CPU", "kernel"])
def mover(request: pytest.FixtureRequest) -> Mover:
    if request.param == "torch":
        return Twin()
    if request.param == "source on CPU":
        kernel: Kernel = request.getfixturevalue("on_cpu")
        return kernel
    if not GPU:
        pytest.skip("no GPU")
    found = mover_for(torch.device("cuda"))
    assert isinstance(found, Kernel), found.name
    return found


@pytest.fixture(scope="session")
def device(mover: Mover, request: pytest.FixtureRequest) -> torch.device:
    """Where the engine's memory is: on the GPU for the kernels, and for torch's operations too where there is one."""
    on_cpu = isinstance(mover, Kernel) and "host.so" in mover.name
    return torch.device("cuda" if GPU and not on_cpu else "cpu")
