"""Blocks on their way into slots: what every kind of put shares."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.kv.record import Commit, Grant, Granted
from kvtool.pool.base import Outcome, Path, Put, PutResult
from kvtool.pool.halves import in_halves
from kvtool.transfer.checksum import checksum, copy_checksum

BATCH = 32
"""Blocks reserved at a time: a put longer than the pool must not evict its own head before that is written."""


def fill_room(block: Put, room: memoryview) -> int:
    """Write a block into its slot, or into staging; its checksum. Raises what `fill` raises.

    Raises:
        ValueError: it has neither `data` of its size nor `fill`.
    """
    if block.data is not None:
        return copy_checksum(room, block.data, block.key)
    if block.fill is None:
        raise ValueError(f"put of {block.key.hex()[:16]}: wanted `fill` or `data`, found neither")
    block.fill(room)
    return checksum(room, block.key)


def fill_rooms(work: Sequence[tuple[Put, memoryview]]) -> list[int]:
    """`fill_room` of each; blocks that come as `data` by two threads where that pays."""
    if any(block.data is None for block, _ in work):
        return [fill_room(block, room) for block, room in work]
    sums = [0] * len(work)

    def some(positions: Sequence[int]) -> None:
        for at in positions:
            sums[at] = fill_room(*work[at])

    in_halves(range(len(work)), sum(block.size for block, _ in work), some)
    return sums


def refusal(answer: Granted, size: int, slot_size: int, why_full: str) -> PutResult:
    """What a put that needs no writing, or may not write, comes to."""
    if answer.grant is Grant.DUPLICATE:
        return PutResult(Outcome.DUPLICATE)
    if answer.grant is Grant.TOO_LARGE:
        return PutResult(
            Outcome.REFUSED, reason=f"too large: the block has {size} bytes, a slot holds 1 to {slot_size}"
        )
    return PutResult(Outcome.REFUSED, reason=f"pool full: {why_full}")


def outcome_of(commit: Commit, path: Path) -> PutResult:
    """What became of a block that was written."""
    if commit is Commit.LAPSED:
        return PutResult(Outcome.FAILED, reason="the reservation lapsed before the block was written")
    return PutResult(Outcome.STORED, path, durable=commit is Commit.DURABLE)
