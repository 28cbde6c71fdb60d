"""What a build of a TensorRT engine needs on this machine, looked at before it begins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from kvtool.engine.trtllm.commands import EXAMPLES_ENV, Command
from kvtool.engine.trtllm.gpus import gpu
from kvtool.engine.trtllm.request import Request
from kvtool.engine.trtllm.version import engine_builder_here
from kvtool.errors import EngineRefused, Missing


def check_tools(request: Request, commands: list[Command]) -> None:
    """Refuse before anything is written.

    Raises:
        EngineRefused: no TensorRT-LLM that builds engines, another version, no trtllm-build, another GPU.
        Missing: no example scripts, which convert and quantise.
    """
    here = engine_builder_here()
    if here != request.version:
        raise EngineRefused(
            f"version: asked for {request.version}, tensorrt_llm {here} is installed; an engine runs only in the "
            f"release that built it: ask for {here}, or build in the container of {request.version}"
        )
    for command in commands:
        program = command.argv[1] if command.argv[0] == "python3" else command.argv[0]
        if shutil.which(command.argv[0]) is None:
            raise EngineRefused(
                f"{command.title}: {command.argv[0]} is not on the PATH, though tensorrt_llm {here} is installed; run "
                "kvtool in the environment that it was installed to"
            )
        if program != command.argv[0] and not Path(program).is_file():
            raise Missing(
                f"{command.title}: {program} is not there; it comes with TensorRT-LLM's examples: set {EXAMPLES_ENV} "
                f"to the folder examples/ of release {here}"
            )
    card, found = gpu(request.settings.gpu), gpu_arch_here()
    if found is not None and found != card.arch:
        raise EngineRefused(
            f"gpu: {card.title} is {card.arch}, the GPU here is {found}; an engine runs only on the architecture that "
            "built it: build it on such a GPU, or set gpu to what is here"
        )


def gpu_arch_here() -> str | None:
    """Such as sm_90, of the first GPU, as nvidia-smi says; None without one."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    first = said.strip().splitlines()[0].strip() if said.strip() else ""
    return f"sm_{first.replace('.', '')}" if first.replace(".", "").isdigit() else None
