"""What a seed makes of a run: how large a pool, which clients, and which faults are on.

Not all at once: runs that leave out some kinds of fault find what all kinds together hide. After Groce et al., "Swarm
Testing" (ISSTA 2012).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from kvtool.kv.layout import KVLayout
from kvtool.sim.blocks import BLOCK_TOKENS
from kvtool.sim.net import Delays

FAULTS = (
    "rank dies", "rank hangs", "client dies", "client hangs", "path cut", "stream breaks", "half open", "slow network",
    "power cut", "disk slow", "disk fails", "disk full", "disk rots", "disk lies",
)  # fmt: skip
CALM_SHARE, CALM_SLOTS = 0.1, 256
"""Runs without any fault, and with room for all: what is put must be found."""


@dataclass(frozen=True)
class Shape:
    ranks: int
    hosts: int
    clients: int
    threads: int
    layout: KVLayout
    slots: int
    file_slots: int
    lease_term_s: float
    reserve_term_s: float
    lasting_s: float
    think_s: float
    delays: Delays
    faults: frozenset[str]
    write: str
    copies: int
    restarts: bool
    """Whether a keeper starts dead ranks again."""

    @property
    def calm(self) -> bool:
        return not self.faults


def shape_of(rng: Random, steps: int | None = None) -> Shape:
    """`steps`: about how many calls clients make altogether; None: as the seed has it."""
    calm = rng.random() < CALM_SHARE
    faults = frozenset() if calm else frozenset(fault for fault in FAULTS if rng.random() < 0.5)
    head_dim, dtype = rng.choice([(16, "float32"), (125, "uint8"), (512, "uint8")])
    clients, threads = rng.randint(1, 3), rng.choice([1, 1, 2])
    think_s = rng.choice([0.002, 0.02, 0.1])
    calls = steps or rng.randint(80, 240)
    file_slots = rng.choice([0, 8, 24, 64])
    shape = Shape(
        ranks=rng.randint(1, 4),
        hosts=rng.randint(1, 3),
        clients=clients,
        threads=threads,
        layout=KVLayout(1, 1, head_dim, BLOCK_TOKENS, dtype),
        slots=CALM_SLOTS if calm else rng.choice([2, 4, 8, 16, 32]),
        file_slots=2 * CALM_SLOTS if calm and file_slots else file_slots,
        lease_term_s=rng.choice([0.2, 1.0, 5.0]),
        reserve_term_s=rng.choice([0.2, 1.0, 5.0]),
        lasting_s=max(2.0, calls * think_s / (clients * threads)),
        think_s=think_s,
        delays=Delays(
            spike_share=0.05 if "slow network" in faults else 0.002, spike_s=0.3 if "slow network" in faults else 0.005
        ),
        faults=faults,
        write=rng.choice(["back", "through"]),
        copies=rng.choice([1, 1, 2, 3]),
        restarts=rng.random() < 0.8,
    )
    return shape if shape.file_slots else replace(shape, write="back")
