"""The KV of a position and the logits of a step are the same bits, however they came about.

The real model on this machine's own kernels, at the thread count that deployments use. Nothing here has a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch

from kvtool.engine.base import DecodeStep, LayerHooks
from kvtool.engine.torch.engine import TorchEngine
from kvtool.engine.torch.memory import TorchSequence
from kvtool.errors import EngineFull

COUNT = 200
TOKENS = [Random(11).randrange(49152) for _ in range(COUNT)]


def kv(engine: TorchEngine, sequence: TorchSequence, count: int) -> list[torch.Tensor]:
    return [engine.memory.read(layer, sequence, count).clone() for layer in range(engine.layout.layers)]


def same(a: list[torch.Tensor], b: list[torch.Tensor], count: int) -> bool:
    views = ((x[:, :, :count].view(torch.int16), y[:, :, :count].view(torch.int16)) for x, y in zip(a, b, strict=True))
    return all(torch.equal(x, y) for x, y in views)


def blocks(engine: TorchEngine, sequence: TorchSequence, count: int) -> list[bytes]:
    out = []
    for index in range(count):
        raw = bytearray(engine.layout.block_size)
        engine.export_block(sequence, index, memoryview(raw))
        out.append(bytes(raw))
    return out


@pytest.fixture(scope="module")
def cold(smollm2: TorchEngine) -> list[torch.Tensor]:
    """KV of the prompt computed in one call."""
    sequence = smollm2.open(COUNT)
    smollm2.prefill(sequence, TOKENS, 0, COUNT)
    found = kv(smollm2, sequence, COUNT)
    smollm2.close(sequence)
    return found


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 64, 100])
def test_chunks_do_not_change_kv(smollm2: TorchEngine, cold: list[torch.Tensor], chunk: int) -> None:
    """From 58, so that tiny chunks soon cross the edge of a tile, at 64."""
    start, count = (58, 70) if chunk == 1 else (58, 100) if chunk == 7 else (0, COUNT)
    sequence = smollm2.open(count)
    if start:
        smollm2.prefill(sequence, TOKENS, 0, start)
    for at in range(start, count, chunk):
        smollm2.prefill(sequence, TOKENS, at, min(at + chunk, count))
    assert sequence.length == count
    found = kv(smollm2, sequence, count)
    smollm2.close(sequence)
    assert same(found, cold, count)


def test_random_chunks_do_not_change_kv(smollm2: TorchEngine, cold: list[torch.Tensor]) -> None:
    cuts = [0, *sorted(Random(5).sample(range(1, COUNT), 5)), COUNT]
    sequence = smollm2.open(COUNT)
    for start, end in pairwise(cuts):
        smollm2.prefill(sequence, TOKENS, start, end)
    found = kv(smollm2, sequence, COUNT)
    smollm2.close(sequence)
    assert same(found, cold, COUNT), cuts


def test_long_prompt_is_the_same_in_one_call_and_in_chunks(smollm2: TorchEngine) -> None:
    """Past 512 rows a call is cut inside, and attention's key splits begin."""
    count = 600
    tokens = [Random(3).randrange(49152) for _ in range(count)]
    whole, parts = smollm2.open(count), smollm2.open(count)
    smollm2.prefill(whole, tokens, 0, count)
    for start, end in ((0, 90), (90, 531), (531, 600)):
        smollm2.prefill(parts, tokens, start, end)
    alike = same(kv(smollm2, whole, count), kv(smollm2, parts, count), count)
    smollm2.close(whole)
    smollm2.close(parts)
    assert alike


def test_hit_that_ends_at_any_block_gives_the_cold_kv(smollm2: TorchEngine, cold: list[torch.Tensor]) -> None:
    """Blocks of one sequence are imported into another, the rest is computed: every block boundary."""
    step = smollm2.layout.block_tokens
    donor = smollm2.open(COUNT)
    smollm2.prefill(donor, TOKENS, 0, COUNT)
    wire = blocks(smollm2, donor, COUNT // step)
    smollm2.close(donor)
    for hit in range(1, COUNT // step + 1):
        sequence = smollm2.open(COUNT)
        for index in range(hit):
            smollm2.import_block(sequence, index, memoryview(wire[index]))
        sequence.length = hit * step
        smollm2.prefill(sequence, TOKENS, hit * step, COUNT)
        found = kv(smollm2, sequence, COUNT)
        smollm2.close(sequence)
        assert same(found, cold, COUNT), f"a hit of {hit} blocks changed the rest"


def test_scattered_blocks_give_the_bits_of_neighbouring_ones(smollm2: TorchEngine, cold: list[torch.Tensor]) -> None:
    step = smollm2.layout.block_tokens
    whole = smollm2.open(COUNT)
    smollm2.prefill(whole, TOKENS, 0, COUNT)
    free = smollm2.blocks_free
    singles = [smollm2.open(step) for _ in range(free)]
    for single in singles[::2]:
        smollm2.close(single)
    scattered = smollm2.open(COUNT)
    try:
        assert not scattered.contiguous and whole.contiguous
        smollm2.prefill(scattered, TOKENS, 0, COUNT)
        assert same(kv(smollm2, scattered, COUNT), cold, COUNT)
        assert blocks(smollm2, scattered, 7) == blocks(smollm2, whole, 7)
        one = smollm2.decode([DecodeStep(whole, TOKENS[-1], COUNT - 1)])
        other = smollm2.decode([DecodeStep(scattered, TOKENS[-1], COUNT - 1)])
        assert np.array_equal(one, other)
    finally:
        for sequence in (*singles, scattered, whole):
            smollm2.close(sequence)


@pytest.fixture
def of_threads(smollm2: TorchEngine) -> Iterator[Callable[[int], None]]:
    """Have decode and prefill run on so many threads, for one test."""
    before = smollm2.decode_threads, smollm2.prompt_threads

    def use(count: int) -> None:
        smollm2.decode_threads = smollm2.prompt_threads = count

    yield use
    smollm2.decode_threads, smollm2.prompt_threads = before


@pytest.mark.parametrize("threads", [1, 2])
def test_logits_do_not_depend_on_who_shares_the_batch(
    smollm2: TorchEngine, of_threads: Callable[[int], None], threads: int
) -> None:
    """Sixteen sequences of different lengths, one by one and in ragged batches of several sizes."""
    of_threads(threads)
    rng = Random(2)
    lengths = [rng.randrange(1, 60) for _ in range(14)] + [130, COUNT - 1]
    sequences = [smollm2.open(length + 1) for length in lengths]
    try:
        for sequence, length in zip(sequences, lengths, strict=True):
            smollm2.prefill(sequence, TOKENS, 0, length)
        steps = [DecodeStep(s, TOKENS[n - 1], n) for s, n in zip(sequences, lengths, strict=True)]
        alone = np.concatenate([smollm2.decode([step]) for step in steps])
        assert np.isfinite(alone).all()
        for size in (2, 3, 7, 16):
            order = rng.sample(range(16), size)
            found = smollm2.decode([steps[index] for index in order])
            assert np.array_equal(found, alone[order]), f"a batch of {size} changed an answer"
    finally:
        for sequence in sequences:
            smollm2.close(sequence)


def test_batch_larger_than_the_probed_is_cut(smollm2: TorchEngine) -> None:
    sequences = [smollm2.open(2) for _ in range(19)]
    try:
        steps = [DecodeStep(s, 100 + index, 0) for index, s in enumerate(sequences)]
        found = smollm2.decode(steps)
        assert np.array_equal(found[17], smollm2.decode([steps[17]])[0])
    finally:
        for sequence in sequences:
            smollm2.close(sequence)


def test_decode_leaves_the_kv_before_it_alone(smollm2: TorchEngine, cold: list[torch.Tensor]) -> None:
    """Decode writes its own position only: the canonical KV of the prompt before it still goes to the pool."""
    sequence = smollm2.open(COUNT)
    smollm2.prefill(sequence, TOKENS, 0, COUNT)
    smollm2.decode([DecodeStep(sequence, TOKENS[-1], COUNT - 1)])
    found = kv(smollm2, sequence, COUNT)
    smollm2.close(sequence)
    assert same(found, cold, COUNT - 1) and sequence.length == COUNT


def test_hooks_see_each_layer_once_before_and_after(smollm2: TorchEngine) -> None:
    """After a layer's hook its K and V are in memory; that is what makes layer-wise stores possible."""
    seen: list[tuple[str, int]] = []
    sequence = smollm2.open(40)

    def after(layer: int) -> None:
        assert smollm2.memory.read(layer, sequence, 40).any()
        seen.append(("after", layer))

    smollm2.prefill(
        sequence, TOKENS, 0, 40, LayerHooks(before=lambda layer: seen.append(("before", layer)), after=after)
    )
    smollm2.close(sequence)
    assert seen == [(kind, layer) for layer in range(30) for kind in ("before", "after")]


def test_numerics_name_this_machine_and_every_process_agrees(smollm2: TorchEngine) -> None:
    assert smollm2._probe() == smollm2.numerics and len(smollm2.numerics) == 64


def test_one_thread_and_two_compute_the_same_kv_and_numerics(
    smollm2: TorchEngine, cold: list[torch.Tensor], of_threads: Callable[[int], None]
) -> None:
    """Prefill and decode instances may have other thread counts, and must find each other's blocks."""
    of_threads(1)
    sequence = smollm2.open(COUNT)
    smollm2.prefill(sequence, TOKENS, 0, COUNT)
    found = kv(smollm2, sequence, COUNT)
    smollm2.close(sequence)
    assert same(found, cold, COUNT)
    assert smollm2._probe() == smollm2.numerics


def test_engine_without_room_says_so(smollm2: TorchEngine) -> None:
    with pytest.raises(EngineFull, match="wanted 1000 KV blocks, 160 of 160 are free"):
        smollm2.open(32 * 1000)
    assert smollm2.blocks_free == 160


@pytest.mark.slow
def test_whole_chunk_sizes_up_to_a_long_prompt(smollm2: TorchEngine) -> None:
    """Every chunk size that a scheduler may choose, over a prompt that crosses several 512-row calls."""
    count = 1500
    tokens = [Random(9).randrange(49152) for _ in range(count)]
    whole = smollm2.open(count)
    smollm2.prefill(whole, tokens, 0, count)
    wanted = kv(smollm2, whole, count)
    smollm2.close(whole)
    for chunk in (96, 128, 256, 500, 512, 1024):
        sequence = smollm2.open(count)
        for start in range(0, count, chunk):
            smollm2.prefill(sequence, tokens, start, min(start + chunk, count))
        found = kv(smollm2, sequence, count)
        smollm2.close(sequence)
        assert same(found, wanted, count), chunk
