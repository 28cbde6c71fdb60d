"""The environment of a process that imports tensorrt_llm: without what an MPI job left in it.

Importing tensorrt_llm starts MPI. Under mpiexec, srun or a server that they started, the inherited job variables make
it join or wait for a job that is not its own, and it hangs. The variables are those that TensorRT-LLM's own Triton
model removes.
"""

from __future__ import annotations

from collections.abc import Mapping

REMOVED = frozenset(
    {
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_NODE_RANK",
        "OMPI_UNIVERSE_SIZE",
        "OMPI_FIRST_RANKS",
        "OMPI_APP_CTX_NUM_PROCS",
        "PMI_RANK",
        "PMI_SIZE",
        "PMI_FD",
        "PMI_SPAWNED",
        "PMI_APPNUM",
    }
)
REMOVED_PREFIXES = ("PMIX_", "PRTE_", "OMPI_MCA_orte_", "ORTE_")


def without_mpi_job(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables of an MPI job; what configures MPI (other OMPI_MCA_*) stays."""
    return {
        name: value
        for name, value in environment.items()
        if name not in REMOVED and not name.startswith(REMOVED_PREFIXES)
    }
