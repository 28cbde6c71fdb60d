"""The mpirun line of the one server that TensorRT engines are served by.

Rank 0 is the orchestrator: the whole repository, the ports, no GPU. The others run the executors, one rank for each GPU
of `context` and `generation`, and load nothing else. The C++ backend starts no processes by itself then
(TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES=0): MPI_Comm_spawn fails under OpenMPI 5, and context and generation requests are
not supported with it. TensorRT-LLM's own script would start the same and return at once, so that nobody waits for it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from kvtool.errors import Missing

MODELS = ("context", "generation")
ENVIRONMENT = {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "0"}


def mpirun_line(server: Sequence[str], world_size: int) -> list[str]:
    """`server`: the tritonserver line of rank 0.

    Raises:
        Missing: no mpirun on the PATH.
    """
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise Missing("no mpirun on the PATH; TensorRT engines are served in NVIDIA's container, which has one")
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    executors = [*server, "--model-control-mode=explicit", *(f"--load-model={model}" for model in MODELS)]
    # Slots as we count them, or mpirun counts cores; no binding, or a server and all its models share one core.
    here = ["--host", f"localhost:{world_size}", "--bind-to", "none"]
    return [mpirun, *root, *here, "-n", "1", *server, ":", "-n", str(world_size - 1), *executors]
