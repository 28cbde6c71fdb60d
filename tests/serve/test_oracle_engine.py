"""The oracle engine keeps the promises of `engine.base`, so that what it proves holds for engines that do."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from serving import BLOCK, LAYOUT, oracle, prompt

from kvtool.engine.base import DecodeStep, LayerHooks
from kvtool.engine.oracle import OracleEngine
from kvtool.errors import EngineFull
from kvtool.kv.layout import KVLayout


def blocks_of(engine, sequence, count):
    out = []
    for index in range(count):
        out.append(bytearray(engine.layout.block_size))
        engine.export_block(sequence, index, memoryview(out[-1]))
    return [bytes(block) for block in out]


@pytest.mark.parametrize("seed", range(20))
def test_kv_and_logits_do_not_depend_on_chunks_memory_or_company(seed):
    random, tokens = Random(seed), prompt(seed, 70)
    one, other = oracle(64), oracle(64)
    whole = one.open(80)
    one.prefill(whole, tokens, 0, 70)
    for waste in range(random.randrange(4)):
        other.open(8 * waste + 1)
    chunked, at = other.open(80), 0
    while at < 70:
        end = min(70, at + random.randrange(1, 30))
        other.prefill(chunked, tokens, at, end)
        at = end
    assert blocks_of(one, whole, 9) == blocks_of(other, chunked, 9)
    company = other.open(30)
    other.prefill(company, tokens, 0, 20)
    alone = one.decode([DecodeStep(whole, tokens[-1], 69)])[0]
    together = other.decode([DecodeStep(company, 3, 20), DecodeStep(chunked, tokens[-1], 69)])[1]
    assert np.array_equal(alone, together)


def test_every_block_that_is_imported_is_read_and_a_wrong_prefix_taints_what_is_computed_behind_it():
    tokens, engine = prompt(1, 40), oracle(64)
    right = engine.open(48)
    engine.prefill(right, tokens, 0, 40)
    exported = blocks_of(engine, right, 5)
    wrong = engine.open(48)
    for index in range(2):
        data = bytearray(exported[index])
        data[7] ^= index  # the second one has a flipped bit
        engine.import_block(wrong, index, memoryview(data))
    wrong.length = 2 * BLOCK
    engine.prefill(wrong, tokens, 2 * BLOCK, 40)
    assert blocks_of(engine, wrong, 5)[2:] != exported[2:]
    for index in range(2):
        engine.import_block(wrong, index, memoryview(exported[index]))
    wrong.length = 2 * BLOCK
    engine.prefill(wrong, tokens, 2 * BLOCK, 40)
    assert blocks_of(engine, wrong, 5) == exported


def test_kv_that_decode_makes_is_not_canonical():
    tokens, engine = prompt(1, 16), oracle(64)
    canonical, decoded = engine.open(16), engine.open(16)
    engine.prefill(canonical, tokens, 0, 16)
    engine.prefill(decoded, tokens, 0, 15)
    engine.decode([DecodeStep(decoded, tokens[15], 15)])
    first, second = blocks_of(engine, canonical, 2), blocks_of(engine, decoded, 2)
    assert first[0] == second[0] and first[1] != second[1]


def test_positions_without_kv_are_exported_as_zero():
    engine = oracle(8)
    sequence = engine.open(8)
    engine.prefill(sequence, prompt(1, 3), 0, 3)
    block = np.frombuffer(blocks_of(engine, sequence, 1)[0], np.uint8).reshape(3, 2, 2, 8, -1)
    assert block[:, :, :, :3].any(axis=(0, 1, 2, 4)).all() and not block[:, :, :, 3:].any()


def test_memory_is_a_cap_and_comes_back_once():
    engine = oracle(4)
    first = engine.open(3 * BLOCK)
    with pytest.raises(EngineFull, match="wanted 2 KV blocks for 9 tokens, 1 of 4 are free"):
        engine.open(BLOCK + 1)
    engine.close(first)
    engine.close(first)
    assert engine.blocks_free == 4


def test_hooks_go_round_every_layer_in_order():
    engine, calls = oracle(4), []
    hooks = LayerHooks(lambda layer: calls.append(("before", layer)), lambda layer: calls.append(("after", layer)))
    engine.prefill(engine.open(8), prompt(1, 8), 0, 8, hooks)
    assert calls == [(when, layer) for layer in range(LAYOUT.layers) for when in ("before", "after")]


def test_layouts_of_other_dtypes_and_sizes_work_and_odd_ones_are_refused():
    engine = OracleEngine(KVLayout(2, 1, 8, 4, "uint8"), blocks=4)
    sequence = engine.open(8)
    engine.prefill(sequence, prompt(1, 8), 0, 8)
    assert engine.decode([DecodeStep(sequence, 1, 7)]).shape == (1, 512)
    with pytest.raises(ValueError, match="8-byte words"):
        OracleEngine(KVLayout(1, 1, 1, 4, "uint8"))
