"""KV blocks: handed out once, given back once, neighbours where they can be."""

from __future__ import annotations

from random import Random

import pytest
import torch

from kvtool.engine.torch.memory import BlockTable, KVMemory
from kvtool.errors import EngineFull
from kvtool.kv.layout import KVLayout

LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=4, block_tokens=8)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_held_by_one_sequence_at_a_time(seed: int) -> None:
    rng, table = Random(seed), BlockTable(40)
    held: list[list[int]] = []
    for _ in range(300):
        if held and rng.random() < 0.5:
            table.give_back(held.pop(rng.randrange(len(held))))
            continue
        count = rng.randint(1, 12)
        try:
            blocks = table.take(count)
        except EngineFull:
            assert count > 40 - sum(map(len, held)), "refused though there was room"
            continue
        assert len(blocks) == count
        held.append(blocks)
        every = [block for blocks in held for block in blocks]
        assert len(set(every)) == len(every) and table.free_count == 40 - len(every)


def test_a_run_of_neighbours_is_preferred_and_the_smallest_that_fits() -> None:
    table = BlockTable(20)
    first, hole, _, gap, _ = (table.take(n) for n in (2, 3, 2, 5, 8))
    table.give_back(hole)
    table.give_back(gap)
    assert table.take(3) == hole
    table.give_back(first)
    assert table.take(7) == [*gap, *first]  # no run of 7: the longest first


def test_full_table_says_how_many_are_free() -> None:
    table = BlockTable(4)
    table.take(3)
    with pytest.raises(EngineFull, match="wanted 2 KV blocks, 1 of 4 are free"):
        table.take(2)


def test_block_freed_twice_is_our_bug() -> None:
    table = BlockTable(4)
    blocks = table.take(2)
    table.give_back(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        table.give_back(blocks)


def test_sequence_closes_once_however_often_it_is_closed() -> None:
    memory = KVMemory(LAYOUT, 4)
    sequence = memory.open(17)
    assert sequence.capacity_tokens == 24 and memory.table.free_count == 1
    memory.close(sequence)
    memory.close(sequence)
    assert memory.table.free_count == 4


def test_blocks_travel_in_wire_order_and_zero_beyond_the_length() -> None:
    """Export of what was written by position equals [layers, 2, kv_heads, tokens, head_dim]; import puts it back."""
    memory = KVMemory(LAYOUT, 6)
    keep = [memory.open(8) for _ in range(6)]
    memory.close(keep[1])
    memory.close(keep[4])
    sequence = memory.open(16)
    assert not sequence.contiguous
    values = torch.randn(2, 2, 3, 12, 4).bfloat16()
    for layer in range(2):
        memory.write(layer, sequence.slots[:12], values[layer])
    sequence.length = 12
    raw = [bytearray(LAYOUT.block_size) for _ in range(2)]
    for index, out in enumerate(raw):
        memory.export_block(sequence, index, memoryview(out))
    blocks = [torch.frombuffer(out, dtype=torch.bfloat16).view(LAYOUT.shape) for out in raw]
    assert torch.equal(torch.cat(blocks, 3)[:, :, :, :12], values)
    assert not blocks[1][:, :, :, 4:].any()
    memory.close(keep[0])
    other = memory.open(8)
    memory.import_block(other, 0, memoryview(bytes(raw[1])))
    other.length = 8
    assert torch.equal(memory.read(1, other, 8), blocks[1][1])
