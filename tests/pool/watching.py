"""Looking at a real pool from a test: waiting for what must come true, and who holds what."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from blocks import KEYS, LAYOUT, room_for

from kvtool.pool.client import PoolClient
from kvtool.pool.config import PoolConfig
from kvtool.pool.launch import pool_status
from kvtool.pool.memory import SlotMemory
from kvtool.transfer.segment import Segment

SLOTS, FILE_SIZE = 48, 8 * 2**20
CONFIG = PoolConfig(LAYOUT, ranks=2, dram_size=room_for(SLOTS), file_size=FILE_SIZE, lease_term_s=2, reserve_term_s=2)


def until(true, within_s: float, what: str):
    deadline_s = time.monotonic() + within_s
    while not (value := true()):
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        time.sleep(0.01)
    return value


@contextlib.contextmanager
def stopped(pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def found(client: PoolClient, keys: list[bytes]) -> int:
    return found_by(client, keys, 2.0)


def found_by(client: PoolClient, keys: list[bytes], budget_s: float) -> int:
    with client.read(keys, budget_s) as read:
        return len(read.blocks)


def held(run_dir: Path) -> list[tuple[int, str]]:
    return [(rank.rank, line["kind"]) for rank in pool_status(run_dir, audit=True).ranks for line in rank.audit]


def clean(run_dir: Path) -> bool:
    return held(run_dir) == []


def left_in(run_dir: Path) -> list[str]:
    """Names in the run directory of a pool that is over, but for the audit logs, which stay as pool.log does."""
    return sorted(path.name for path in run_dir.iterdir() if not path.name.startswith("audit-"))


def keys_of(client: PoolClient, rank: int, keys=KEYS) -> list[bytes]:
    parts = {access.state.rank: positions for access, positions in client._ranks.split(keys)}
    return [keys[position] for position in parts.get(rank, [])]


def slot_of(state, rank: int, key: bytes):
    """(segment, memory, slot) where the key is in the DRAM of `rank`, mapped writable."""
    segment = Segment.attach(state.ranks[rank].segment, writable=True)
    memory = SlotMemory(segment.view, state.ranks[rank].slots, LAYOUT.block_size)
    slots = [slot for slot in range(memory.slots) if memory.header(slot)[0] == key]
    return memory, slots[0] if slots else None
