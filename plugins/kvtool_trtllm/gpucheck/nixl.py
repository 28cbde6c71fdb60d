"""Step `nixl`: one process reads another's GPU memory by NIXL, as a rank's blocks would be read without the host."""

from __future__ import annotations

import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from kvtool.transfer.nixl import installed, make_agent
from kvtool_trtllm.gpucheck.account import Context, Evidence, Skip, Wrong, gpu

SIZE = 64 << 20
LIMIT_S = 60.0


def show_nixl(context: Context) -> tuple[str, Evidence]:
    gpu()
    if not installed():
        raise Skip("NIXL is not installed (pip install nixl-cu13)")
    seconds = read_from_another("cuda:0", "VRAM", SIZE)
    return f"{SIZE / seconds / 1e9:.1f} GB/s, one read of {SIZE >> 20} MiB", {"bytes": SIZE, "seconds": seconds}


def read_from_another(device: str, kind: str, size: int) -> float:
    """Read `size` bytes that another process wrote to its memory on `device`; the transfer's seconds.

    Raises:
        Wrong: it failed, took too long, or brought other bytes.
    """
    import torch

    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    owner = spawn.Process(target=own, args=(theirs, device, kind, size), daemon=True)
    owner.start()
    try:
        if not ours.poll(LIMIT_S):
            raise Wrong(f"the owning process registered nothing within {LIMIT_S:g} s")
        metadata, address, index = ours.recv()
        agent = make_agent("gpu-check-reader")
        memory = torch.zeros(size, dtype=torch.uint8, device=device)
        agent.register_memory([memory], backends=["UCX"])
        name = agent.add_remote_agent(metadata)
        there = agent.get_xfer_descs([(address, size, index)], kind)
        began_s = time.perf_counter()
        transfer(agent, "READ", agent.get_xfer_descs([memory]), there, name)
        seconds = time.perf_counter() - began_s
        if not torch.equal(memory.cpu(), pattern(size)):
            raise Wrong("the transfer reported success and brought other bytes")
        ours.send("done")
        return seconds
    finally:
        owner.terminate()
        owner.join(5)


def own(pipe: Connection, device: str, kind: str, size: int) -> None:
    """The other process: registers memory, and lets NIXL make progress until it is told to end."""
    import torch

    agent = make_agent("gpu-check-owner")
    memory = pattern(size).to(device)
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)
    agent.register_memory([memory], backends=["UCX"])
    pipe.send((agent.get_agent_metadata(), memory.data_ptr(), max(memory.get_device(), 0)))
    until_s = time.monotonic() + LIMIT_S
    while not pipe.poll(0.001) and time.monotonic() < until_s:
        agent.get_new_notifs()


def transfer(agent: Any, verb: str, here: Any, there: Any, name: str) -> None:
    """One transfer to its end.

    Raises:
        Wrong: it failed or took too long.
    """
    handle = agent.initialize_xfer(verb, here, there, name)
    state, until_s = agent.transfer(handle), time.monotonic() + LIMIT_S
    while state == "PROC" and time.monotonic() < until_s:
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise Wrong(f"NIXL {verb}: state {state} after {LIMIT_S:g} s" if state == "PROC" else f"NIXL {verb}: {state}")
    agent.release_xfer_handle(handle)


def pattern(size: int) -> Any:
    """Bytes in which no two places nearby are alike."""
    import torch

    return torch.arange(size, dtype=torch.int64).mul_(2654435761).bitwise_right_shift_(13).to(torch.uint8)
