"""GPUs that recipes are written for: what they hold and how fast they move it.

Memory is what CUDA reports to a process (ECC on), the smallest commonly seen, which is below what the name says.
Bandwidths are the maker's, in one direction; `bf16_flops` and `fp8_flops` without sparsity. They decide estimates only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.errors import EngineRefused

MIB = 1 << 20
GB = 10**9


@dataclass(frozen=True)
class Gpu:
    """Bandwidths in bytes/s, one way; `nvlink` 0 where there is none."""

    name: str
    title: str
    arch: str
    """As nvcc names it, such as sm_90."""
    memory: int
    hbm: int
    nvlink: int
    pcie: int
    bf16_flops: float
    fp8_flops: float
    """0 where the GPU does not multiply FP8."""
    nvfp4: bool = False
    """Whether the GPU multiplies NVFP4."""

    @property
    def sm(self) -> int:
        return int(self.arch.removeprefix("sm_"))

    @property
    def link(self) -> int:
        """Between two GPUs of one node."""
        return self.nvlink or self.pcie


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40gb", "A100 40 GB SXM", "sm_80", 40_327 * MIB, 1_555 * GB, 300 * GB, 32 * GB, 312e12, 0),
        Gpu("a100-80gb", "A100 80 GB SXM", "sm_80", 81_038 * MIB, 2_039 * GB, 300 * GB, 32 * GB, 312e12, 0),
        Gpu("l40s", "L40S 48 GB", "sm_89", 45_456 * MIB, 864 * GB, 0, 32 * GB, 362e12, 733e12),
        Gpu("h100-80gb", "H100 80 GB SXM", "sm_90", 80_994 * MIB, 3_350 * GB, 450 * GB, 64 * GB, 989e12, 1979e12),
        Gpu("h200", "H200 141 GB SXM", "sm_90", 143_156 * MIB, 4_800 * GB, 450 * GB, 64 * GB, 989e12, 1979e12),
        Gpu("b200", "B200 180 GB SXM", "sm_100", 182_630 * MIB, 7_700 * GB, 900 * GB, 64 * GB, 2250e12, 4500e12, True),
    )
}


def gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        EngineRefused: not in the table.
    """
    if name not in GPUS:
        raise EngineRefused(f"gpu: wanted one of {', '.join(GPUS)}, found {name!r}")
    return GPUS[name]
