"""Steps `versions` and `import`: what is installed, whether a GPU computes, and tensorrt_llm imported for real."""

from __future__ import annotations

import os
from importlib import import_module

from kvtool.engine.trtllm.llm import clean_environment
from kvtool.engine.trtllm.version import can, installed
from kvtool_trtllm.gpucheck.account import Context, Evidence, Skip, Wrong, gpu


def show_versions(context: Context) -> tuple[str, Evidence]:
    """Each GPU multiplies two matrices; the product of whole numbers is exact."""
    torch = gpu()
    names = []
    for index in range(torch.cuda.device_count()):
        one = torch.arange(256, dtype=torch.float32, device=f"cuda:{index}").remainder(7).reshape(16, 16)
        if not torch.equal((one @ one).cpu(), one.cpu() @ one.cpu()):
            raise Wrong(f"GPU {index} ({torch.cuda.get_device_name(index)}) multiplies wrongly")
        major, minor = torch.cuda.get_device_capability(index)
        names.append(f"{torch.cuda.get_device_name(index)} sm_{major}{minor}")
    version = installed()
    adapter = can(version).adapter.value if version else "none"
    said = f"TensorRT-LLM {version} ({adapter})" if version else "no TensorRT-LLM"
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    evidence = {"gpus": len(names), "torch": torch.__version__, "cuda": torch.version.cuda, "adapter": adapter}
    return f"{said}, torch {torch.__version__}, {kinds}", evidence


def show_import(context: Context) -> tuple[str, Evidence]:
    """The names that kvtool uses are there, under the module path of this version's adapter."""
    version = installed()
    if version is None:
        raise Skip("tensorrt_llm is not installed")
    able = can(version)
    gone = clean_environment(os.environ)
    package = import_module("tensorrt_llm")
    found = str(getattr(package, "__version__", "none"))
    if found != version:
        raise Wrong(f"its metadata says {version}, the package says {found}: two installations are mixed")
    wanted = [("tensorrt_llm", "LLM"), ("tensorrt_llm", "SamplingParams"), ("tensorrt_llm", "DisaggregatedParams")]
    wanted += [(str(able.connector_module), f"KvCacheConnector{side}") for side in ("Scheduler", "Worker")]
    lacks = [f"{module}.{name}" for module, name in wanted if not hasattr(import_module(module), name)]
    if lacks:
        raise Wrong(f"TensorRT-LLM {version} has no {', '.join(lacks)}, which its adapter {able.adapter.value} uses")
    cleaned = ", ".join(gone) or "none"
    return f"TensorRT-LLM {version}", {"names": len(wanted), "mpi_variables_removed": cleaned}
