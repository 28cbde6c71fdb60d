"""An owner of memory in a process of its own: `python ucx_owner.py NAME SIZE SEED`, prints its metadata in hex.

Byte i is (i * 31 + i // 257 + SEED) % 256. It serves until stdin closes.
"""

from __future__ import annotations

import select
import sys

import numpy as np

from kvtool.transfer.ucx import UcxOwner


def pattern(size: int, seed: int) -> np.ndarray:
    at = np.arange(size, dtype=np.int64)
    return ((at * 31 + at // 257 + seed) % 256).astype(np.uint8)


def main() -> None:
    name, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    memory = pattern(size, seed)
    owner = UcxOwner(name, memoryview(memory))
    print(owner.metadata().hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        owner.progress()
    owner.close()


if __name__ == "__main__":
    main()
