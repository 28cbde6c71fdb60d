"""Whether device copies give the right bytes on this machine's GPU: `python -m kvtool_trtllm.selfcheck`.

For a host that has kvtool installed and not its tests. Random pools, pieces, pages and holes are copied on the GPU,
into its own memory and into pinned host memory, by the kernels and by torch's operations; each result is compared with
the same copy of the same bytes on the CPU. Exit 0: all equal; 1: something was not, or failed; 3: something was
skipped, and why stands there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import torch

from kvtool.errors import KvtoolError
from kvtool.kv.layout import KVLayout
from kvtool_trtllm.copies import Mover, Piece, checksum, gather, mover_for, scatter
from kvtool_trtllm.kernel import Kernel
from kvtool_trtllm.packing import Packing, pack, unpack
from kvtool_trtllm.twin import Twin

LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=64, block_tokens=16)
CASES = 40


@dataclass(frozen=True)
class Result:
    """`failed`: the first case that differed or raised, in words; None: all `cases` were equal."""

    what: str
    cases: int
    failed: str | None

    def __str__(self) -> str:
        return f"{'FAILED ' + self.failed if self.failed else 'ok'}: {self.what}, {self.cases} cases"


def check(device: torch.device, mover: Mover, cases: int = CASES) -> Iterator[Result]:
    """Each kind of copy by `mover`, with the engine's memory on `device`."""
    pinned = device.type == "cuda"
    yield _all("gather, packed on the device", cases, lambda seed: _copy(seed, device, mover, True, False))
    yield _all("scatter, packed on the device", cases, lambda seed: _copy(seed, device, mover, False, False))
    if pinned:
        yield _all("gather to pinned host memory", cases, lambda seed: _copy(seed, device, mover, True, True))
        yield _all("scatter from pinned host memory", cases, lambda seed: _copy(seed, device, mover, False, True))
    yield _all("checksum", cases, lambda seed: _checksum(seed, device, mover))
    yield _all("lossy packing", cases, lambda seed: _packing(seed, device, mover))


def _all(what: str, cases: int, equal: Callable[[int], bool]) -> Result:
    for seed in range(cases):
        try:
            if not equal(seed):
                return Result(what, cases, f"in case {seed}, the bytes differ")
        except (KvtoolError, RuntimeError) as error:
            return Result(what, cases, f"in case {seed}, {str(error).splitlines()[0]}")
    return Result(what, cases, None)


def _copy(seed: int, device: torch.device, mover: Mover, gathering: bool, pinned: bool) -> bool:
    rng = Random(seed)
    slots, spans, at = rng.randrange(2, 40), [], 0
    for _ in range(rng.randrange(1, 12)):
        before, size = rng.choice([0, 16, 8, rng.randrange(64)]), rng.choice([16, 4096, 16384, rng.randrange(1, 70000)])
        at += rng.choice([0, 16, rng.randrange(32)])
        spans.append((before, size, at))
        at += size
    pools = [_bytes(seed + index, slots, before + size + 5) for index, (before, size, _) in enumerate(spans)]
    pages = [*rng.sample(range(slots), rng.randrange(1, slots)), -1]
    rng.shuffle(pages)
    packed = _bytes(seed + 100, len(pages), at)
    there = [pool.clone().to(device) for pool in pools]
    held = packed.clone().pin_memory() if pinned else packed.clone().to(device)
    move = gather if gathering else scatter
    move(_pieces(pools, spans), pages, packed, mover=Twin())
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
    move(_pieces(there, spans), pages, held, stream, mover)
    if stream is not None:
        stream.synchronize()
    pairs = zip([packed, *pools], [held, *there], strict=True)
    return all(torch.equal(one, other.cpu()) for one, other in pairs)


def _pieces(pools: list[torch.Tensor], spans: list[tuple[int, int, int]]) -> list[Piece]:
    pairs = zip(pools, spans, strict=True)
    return [Piece(pool[:, before : before + size], at) for pool, (before, size, at) in pairs]


def _checksum(seed: int, device: torch.device, mover: Mover) -> bool:
    rng = Random(seed)
    blocks = _bytes(seed, rng.randrange(1, 6), rng.choice([8, 4096, 1 << 20, rng.randrange(1, 300000)]))
    want = checksum(blocks, seed, mover=Twin())
    return torch.equal(checksum(blocks.to(device), seed, mover=mover).cpu(), want)


def _packing(seed: int, device: torch.device, mover: Mover) -> bool:
    packing = (Packing(), Packing("int8"), Packing("float8_e4m3fn", "block"), Packing("int8", "block"))[seed % 4]
    values = torch.randn(2, *LAYOUT.shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    blocks = values.reshape(2, -1).view(torch.uint8)
    want = pack(blocks, LAYOUT, packing, mover=Twin())
    got = pack(blocks.to(device), LAYOUT, packing, mover=mover)
    back = unpack(got, LAYOUT, packing, mover=mover).cpu()
    return torch.equal(got.cpu(), want) and torch.equal(back, unpack(want, LAYOUT, packing, mover=Twin()))


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def main() -> int:
    """Prints a line for each kind of copy and each mover."""
    if not torch.cuda.is_available():
        print("skipped: no GPU; device copies were not checked")
        return 3
    device = torch.device("cuda", torch.cuda.current_device())
    ours, wrong = mover_for(device), 0
    movers: list[Mover] = [ours, Twin()] if isinstance(ours, Kernel) else [ours]
    if len(movers) == 1:
        print("skipped: the kernels; they were not built, the log says why")
    for mover in movers:
        for result in check(device, mover):
            print(f"{torch.cuda.get_device_name(device)}, {mover.name}: {result}", flush=True)
            wrong += result.failed is not None
    return 1 if wrong else 0 if len(movers) == 2 else 3


if __name__ == "__main__":
    sys.exit(main())
