"""Step `gds`: GPU memory to a file and back by GPUDirect Storage, where the driver for it is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from kvtool.transfer.nixl import installed, load
from kvtool_trtllm.gpucheck.account import Context, Evidence, Skip, Wrong, gpu
from kvtool_trtllm.gpucheck.nixl import pattern, transfer

DRIVER = Path("/proc/driver/nvidia-fs/stats")
SIZE = 16 << 20


def show_gds(context: Context) -> tuple[str, Evidence]:
    """cuFile's compatibility mode, which goes through the host, is forbidden: with it this would show nothing."""
    torch = gpu()
    if not DRIVER.exists():
        raise Skip("the nvidia-fs driver is not loaded")
    if not installed():
        raise Skip("NIXL, which drives GDS, is not installed (pip install nixl-cu13)")
    os.environ["CUFILE_ALLOW_COMPAT_MODE"] = "false"
    api = load()
    agent = api.nixl_agent("gpu-check-gds", api.nixl_agent_config(backends=[]))
    if "GDS" not in agent.get_plugin_list():
        raise Skip("NIXL is installed without its GDS plugin")
    try:
        agent.create_backend("GDS")
    except api.nixlBind.nixlBackendError as error:
        raise Skip(f"NIXL's GDS backend does not start here: {error}") from None
    out = pattern(SIZE).to("cuda:0")
    back = torch.zeros_like(out)
    torch.cuda.synchronize()
    path = context.work / "gds.bin"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.ftruncate(file, SIZE)
        agent.register_memory([out, back], backends=["GDS"])
        place = agent.register_memory([(0, SIZE, file, "")], "FILE", backends=["GDS"]).trim()
        for verb, memory in (("WRITE", out), ("READ", back)):
            transfer(agent, verb, agent.get_xfer_descs([memory]), place, "gpu-check-gds")
        torch.cuda.synchronize()
        if not torch.equal(out.cpu(), back.cpu()):
            raise Wrong("what came back from the file are other bytes")
    finally:
        os.close(file)
    return f"{SIZE >> 20} MiB out and back", {"bytes": SIZE}
