"""Step `kernels`: gather and scatter of the GPU's kernels beside their CPU twin, byte for byte, in many shapes."""

from __future__ import annotations

from random import Random
from typing import Any

from kvtool_trtllm.copies import Piece, gather, scatter
from kvtool_trtllm.gpucheck.account import Context, Evidence, Wrong, gpu

CASES = 60


def show_kernels(context: Context) -> tuple[str, Evidence]:
    """Packed blocks on the GPU and in pinned host memory in turn, as saves and loads have them."""
    torch = gpu()
    from kvtool_trtllm.build import build
    from kvtool_trtllm.kernel import Kernel

    major, minor = torch.cuda.get_device_capability(0)
    kernel = Kernel(build([f"{major}{minor}"]))
    moved = sum(compare(seed, "cuda:0", seed % 2 == 1, kernel) for seed in range(CASES))
    return f"{CASES} shapes on sm_{major}{minor}", {"cases": CASES, "kernel_cases": CASES, "bytes": moved}


def compare(seed: int, device: str, pinned: bool, mover: Any) -> int:
    """One random shape, both ways; bytes that were moved. `pinned`: packed blocks lie on the host.

    Raises:
        Wrong: `mover` gives other bytes on `device` than the twin on the CPU.
    """
    import torch

    rng, random = Random(seed), torch.Generator().manual_seed(seed)
    slots, blocks = rng.randrange(4, 40), rng.randrange(1, 4)
    runs = [rng.choice([16, 64, 256, 1024, 4096, 24, 10]) for _ in range(rng.randrange(1, 12))]
    gap = rng.choice([0, 16, 128])
    memory = torch.randint(0, 256, (slots, sum(runs) + gap), generator=random, dtype=torch.uint8)
    pages = rng.sample(range(slots), blocks)
    if rng.random() < 0.4:
        pages[rng.randrange(blocks)] = -1
    order = list(range(len(runs)))
    rng.shuffle(order)
    there = memory.to(device)
    packed = torch.randint(0, 256, (blocks, sum(runs)), generator=random, dtype=torch.uint8)
    wanted, got = packed.clone(), packed.pin_memory() if pinned else packed.to(device)
    ours, theirs = _pieces(memory, runs, order), _pieces(there, runs, order)
    gather(ours, pages, wanted)
    gather(theirs, pages, got, mover=mover)
    _synchronize(device)
    _same(f"gather of shape {seed}", got.cpu(), wanted)
    fresh = torch.randint(0, 256, wanted.shape, generator=random, dtype=torch.uint8)
    scatter(ours, pages, fresh)
    scatter(theirs, pages, fresh.pin_memory() if pinned else fresh.to(device), mover=mover)
    _synchronize(device)
    _same(f"scatter of shape {seed}", there.cpu(), memory)
    return 2 * int(wanted.numel())


def _pieces(memory: Any, runs: list[int], order: list[int]) -> list[Piece]:
    """Runs that follow each other in memory, in another order in the packed block."""
    starts = [sum(runs[:index]) for index in range(len(runs))]
    places = {index: sum(runs[before] for before in order[:at]) for at, index in enumerate(order)}
    return [
        Piece(memory[:, start : start + size], places[index])
        for index, (start, size) in enumerate(zip(starts, runs, strict=True))
    ]


def _synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _same(what: str, got: Any, wanted: Any) -> None:
    import torch

    if not torch.equal(got, wanted):
        at = torch.nonzero(got != wanted)[0].tolist()
        raise Wrong(
            f"{what}: byte {at[1]} of row {at[0]} is {int(got[tuple(at)])}, the twin's is {int(wanted[tuple(at)])}"
        )
