"""Blocks of one tensor-parallel width read under another: every pair, against a reference that moves single heads."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtool.errors import BlockCorrupt, EngineRefused
from kvtool.kv.layout import DTYPE_SIZE, KVLayout
from kvtool.kv.reshard import Cut, Scales, page_runs, plan
from kvtool.kv.shard import rank_shards, shard_count, stored_layout

Bytes = npt.NDArray[np.uint8]
WIDTHS = [1, 2, 4, 8, 16]
PAIRS = list(product(WIDTHS, WIDTHS))
SCALES = [None, Scales("block"), Scales("head"), Scales("token", "float16"), Scales("group", "uint8", group=2)]


def _bytes(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def _parts(kv: KVLayout, cut: Cut, whole: Bytes, scales: Scales | None, scale_bytes: Bytes) -> list[Bytes]:
    """The reference: the whole model's arrays, indexed by layer and head, in the plainest numpy there is.

    `whole`: [layers, factor, heads, tokens, dims, bytes]. `scale_bytes`: [layers, factor, heads, n, bytes], or without
    heads [layers, factor, 1, 1, bytes] for scales of blocks.
    """
    shards = shard_count(kv, cut.width)
    each = kv.kv_heads // shards
    parts = []
    for group in cut.groups or (tuple(range(kv.layers)),):
        for shard in range(shards):
            heads = list(range(shard * each, (shard + 1) * each))
            part = b"".join(
                whole[layer, factor, head].tobytes()
                for layer in group for factor in range(kv.kv_factor) for head in heads
            )  # fmt: skip
            if scales is not None:
                part += bytes(-len(part) % 16)
                part += b"".join(
                    scale_bytes[layer, factor, head].tobytes()
                    for layer in group
                    for factor in range(kv.kv_factor)
                    for head in ([0] if scales.per == "block" else heads)
                )
            parts.append(np.frombuffer(part, np.uint8))
    return parts


def _model(kv: KVLayout, scales: Scales | None, seed: int = 0) -> tuple[Bytes, Bytes]:
    whole = _bytes(seed, kv.block_size).reshape(*kv.shape, DTYPE_SIZE[kv.dtype])
    if scales is None:
        return whole, np.empty(0, np.uint8)
    size = DTYPE_SIZE[scales.dtype]
    heads = 1 if scales.per == "block" else kv.kv_heads
    count = {"block": 1, "head": 1, "token": kv.block_tokens, "group": kv.block_tokens * kv.head_dim // scales.group}
    shape = (kv.layers, kv.kv_factor, heads, count[scales.per], size)
    return whole, _bytes(seed + 1, int(np.prod(shape))).reshape(shape)


def _check(kv: KVLayout, source: Cut, target: Cut, scales: Scales | None, seed: int = 0) -> None:
    """There gives the reference's parts and back gives the first ones; parts start as garbage."""
    whole, scale_bytes = _model(kv, scales, seed)
    have, want = (_parts(kv, cut, whole, scales, scale_bytes) for cut in (source, target))
    there, back = plan(kv, source, target, scales), plan(kv, target, source, scales)
    got = [_bytes(seed + 2, size) for size in there.target_sizes]
    there.apply(have, got)
    assert [part.tobytes() for part in got] == [part.tobytes() for part in want]
    again = [_bytes(seed + 3, size) for size in back.target_sizes]
    back.apply(got, again)
    assert [part.tobytes() for part in again] == [part.tobytes() for part in have]


def test_two_ranks_halves_become_four_quarters_and_one_whole() -> None:
    kv = KVLayout(layers=1, kv_heads=4, head_dim=1, block_tokens=1, dtype="uint8")
    halves = [np.array([10, 11, 20, 21], np.uint8), np.array([12, 13, 22, 23], np.uint8)]  # K of 2 heads, V of 2 heads
    quarters = [np.zeros(2, np.uint8) for _ in range(4)]
    plan(kv, Cut(2), Cut(4)).apply(halves, quarters)
    assert [part.tolist() for part in quarters] == [[10, 20], [11, 21], [12, 22], [13, 23]]
    whole = [np.zeros(8, np.uint8)]
    plan(kv, Cut(2), Cut(1)).apply(halves, whole)
    assert whole[0].tolist() == [10, 11, 12, 13, 20, 21, 22, 23]


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 32])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair_of_widths_is_byte_exact_there_and_back(a: int, b: int, heads: int) -> None:
    kv = KVLayout(layers=3, kv_heads=heads, head_dim=4, block_tokens=2, dtype="bfloat16")
    _check(kv, Cut(a), Cut(b), None, seed=a * 100 + b)


@pytest.mark.parametrize(("a", "b"), list(product([2, 3, 4, 6, 12, 24], repeat=2)))
def test_widths_that_are_no_multiples_of_each_other_cut_across_parts(a: int, b: int) -> None:
    kv = KVLayout(layers=2, kv_heads=12, head_dim=2, block_tokens=2)
    _check(kv, Cut(a), Cut(b), Scales("head"), seed=a * 100 + b)


@pytest.mark.parametrize("scales", SCALES[1:], ids=lambda s: s.per)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_scales_of_fp8_and_int8_follow_their_heads(a: int, b: int, dtype: str, scales: Scales) -> None:
    kv = KVLayout(layers=3, kv_heads=8, head_dim=4, block_tokens=3, dtype=dtype)
    _check(kv, Cut(a), Cut(b), scales, seed=a * 100 + b)


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_the_latent_of_mla_is_the_same_bytes_at_every_width(a: int, b: int) -> None:
    kv = KVLayout(layers=2, kv_heads=1, head_dim=18, block_tokens=4, kv_factor=1)
    _check(kv, Cut(a), Cut(b), None)
    moved = plan(kv, Cut(a), Cut(b))
    assert [(run.source_at, run.target_at, run.size) for run in moved.runs] == [(0, 0, kv.block_size)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_into_any_other(data: st.DataObject) -> None:
    """Random layouts, widths that are no multiples of each other, shuffled layer groups, scales."""
    heads = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    fit = [width for width in range(1, 25) if heads % width == 0 or width % heads == 0]
    kv = KVLayout(
        layers=data.draw(st.integers(1, 5)),
        kv_heads=heads,
        head_dim=2 * data.draw(st.integers(1, 3)),
        block_tokens=data.draw(st.integers(1, 4)),
        dtype=data.draw(st.sampled_from(sorted(DTYPE_SIZE))),
        kv_factor=data.draw(st.sampled_from([1, 2])),
    )
    rng = Random(data.draw(st.integers(0, 1 << 20)))
    _check(kv, *(Cut(rng.choice(fit), _groups(rng, kv.layers)) for _ in range(2)), rng.choice(SCALES))


def _groups(rng: Random, layers: int) -> tuple[tuple[int, ...], ...]:
    order = rng.sample(range(layers), layers)
    ends = sorted({rng.randrange(1, layers + 1) for _ in range(rng.randrange(3))} | {layers})
    return tuple(tuple(order[start:end]) for start, end in zip([0, *ends], ends, strict=False))


def test_many_blocks_are_converted_at_once() -> None:
    kv = KVLayout(layers=2, kv_heads=4, head_dim=2, block_tokens=2)
    moved = plan(kv, Cut(4), Cut(2))
    have = [_bytes(part, 5 * size).reshape(5, size) for part, size in enumerate(moved.source_sizes)]
    got = [np.zeros((5, size), np.uint8) for size in moved.target_sizes]
    moved.apply(have, got)
    for block in range(5):
        one = [np.zeros(size, np.uint8) for size in moved.target_sizes]
        moved.apply([part[block] for part in have], one)
        assert all(np.array_equal(part[block], single) for part, single in zip(got, one, strict=True))


def test_parts_under_different_block_scales_are_not_made_one_block() -> None:
    kv = KVLayout(layers=2, kv_heads=4, head_dim=2, block_tokens=2, dtype="int8")
    moved = plan(kv, Cut(2), Cut(1), Scales("block"))
    have = [np.zeros(size, np.uint8) for size in moved.source_sizes]
    target = [np.full(size, 7, np.uint8) for size in moved.target_sizes]
    have[1][-1] = 1
    with pytest.raises(BlockCorrupt, match="parts 0 and 1 of a block have different scales"):
        moved.apply(have, target)
    assert all((part == 7).all() for part in target)


def test_what_does_not_fit_is_refused_with_both_sides() -> None:
    kv = KVLayout(layers=2, kv_heads=8, head_dim=2, block_tokens=2)
    with pytest.raises(EngineRefused, match="tensor parallel 3 does not fit 8 KV heads"):
        plan(kv, Cut(1), Cut(3))
    for groups in [((0,),), ((0, 1), (1,)), ((0, 1), ())]:
        with pytest.raises(EngineRefused, match="do not hold each of 2 layers once"):
            plan(kv, Cut(1, groups), Cut(1))
    with pytest.raises(EngineRefused, match="scales of 3 dims do not divide heads of 2"):
        plan(kv, Cut(1), Cut(2), Scales("group", group=3))
    with pytest.raises(EngineRefused, match=r"source parts have \[4\] bytes, the plan wants \[256\]"):
        plan(kv, Cut(1), Cut(1)).apply([np.zeros(4, np.uint8)], [np.zeros(256, np.uint8)])


@pytest.mark.parametrize("kv_factor", [1, 2])
@pytest.mark.parametrize(("stored", "width"), [(s, w) for s, w in PAIRS if s % w == 0])
def test_page_runs_pack_a_rank_s_page_into_its_stored_shards(stored: int, width: int, kv_factor: int) -> None:
    kv = KVLayout(layers=3, kv_heads=8, head_dim=2, block_tokens=2, kv_factor=kv_factor)
    whole, none = _model(kv, None)
    pages, shards = (_parts(kv, Cut(w), whole, None, none) for w in (width, stored))
    for rank in range(width):
        touched = rank_shards(kv, stored, width, rank)
        layout = stored_layout(kv, width)
        page = pages[touched.heads.start // layout.kv_heads]
        packed = np.full(layout.block_size, 9, np.uint8)
        covered = np.zeros(layout.block_size, np.int64)
        for run in page_runs(layout, len(touched.reads)):
            packed[run.at : run.at + run.size] = page[run.page_at : run.page_at + run.size]
            covered[run.at : run.at + run.size] += 1
            assert run.layer == run.page_at // (layout.block_size // layout.layers)
        assert (covered == 1).all()
        assert packed.tobytes() == b"".join(shards[index].tobytes() for index in touched.reads)
    with pytest.raises(EngineRefused, match="3 stored shards do not divide the 8 KV heads"):
        page_runs(kv, 3)
