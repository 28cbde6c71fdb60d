"""Which stored shards a rank reads and owns, at every pair of widths that fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvtool.errors import EngineRefused
from kvtool.kv.layout import KVLayout
from kvtool.kv.shard import rank_shards, shard_count, shard_key, shared_width, stored_layout

LLAMA = KVLayout(layers=32, kv_heads=8, head_dim=128, block_tokens=32)
MLA = KVLayout(layers=4, kv_heads=1, head_dim=576, block_tokens=64, kv_factor=1)
WIDTHS = [1, 2, 4, 8, 16]
FIT = [(stored, width) for stored, width in product(WIDTHS, WIDTHS) if stored % width == 0]


def test_a_rank_of_two_reads_two_of_four_stored_shards_and_owns_them() -> None:
    got = rank_shards(LLAMA, stored_parallel=4, tensor_parallel=2, rank=1)
    assert (got.heads, got.reads, got.writes) == (range(4, 8), range(2, 4), range(2, 4))
    assert stored_layout(LLAMA, 4).shape == (32, 2, 2, 32, 128)


def test_replicated_heads_are_owned_by_the_lowest_rank_that_holds_them() -> None:
    got = [rank_shards(LLAMA, 16, 16, rank) for rank in range(16)]
    assert [r.reads.start for r in got] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert [len(r.writes) for r in got] == [1, 0] * 8
    assert shard_count(LLAMA, 16) == 8


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 32])
@pytest.mark.parametrize(("stored", "width"), FIT)
def test_each_stored_shard_has_one_owner_and_readers_cover_their_heads(heads: int, stored: int, width: int) -> None:
    kv = replace(LLAMA, kv_heads=heads)
    count, each = shard_count(kv, stored), stored_layout(kv, stored).kv_heads
    ranks = [rank_shards(kv, stored, width, rank) for rank in range(width)]
    assert sorted(shard for r in ranks for shard in r.writes) == list(range(count))
    for r in ranks:
        assert range(r.reads.start * each, r.reads.stop * each) == r.heads
        assert len(r.heads) == stored_layout(kv, width).kv_heads
        assert r.writes in (r.reads, range(0))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_latent_of_mla_is_one_shard_that_all_read_and_rank_0_owns(width: int) -> None:
    ranks = [rank_shards(MLA, 16, width, rank) for rank in range(width)]
    assert all(r.reads == range(1) and r.heads == range(1) for r in ranks)
    assert [len(r.writes) for r in ranks] == [1] + [0] * (width - 1)
    assert stored_layout(MLA, 16) == MLA


@pytest.mark.parametrize(
    ("stored", "width", "rank", "words"),
    [
        (3, 1, 0, "tensor parallel 3 does not fit 8 KV heads"),
        (12, 1, 0, "must divide them or be a multiple"),
        (4, 8, 0, "set stored_parallel to 8, the least common multiple"),
        (0, 1, 0, "tensor parallel 0: must be at least 1"),
        (2, 2, 2, "rank 2 is outside tensor parallel 2"),
        (2, 2, -1, "rank -1 is outside"),
    ],
)
def test_widths_that_do_not_fit_are_refused(stored: int, width: int, rank: int, words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        rank_shards(LLAMA, stored, width, rank)


def test_the_shared_width_fits_every_engine_that_fits_the_heads() -> None:
    kv = replace(LLAMA, kv_heads=12)
    fit = [width for width in range(1, 49) if kv.kv_heads % width == 0 or width % kv.kv_heads == 0]
    for a, b in product(fit, fit):
        for width in (a, b):
            rank_shards(kv, shared_width([a, b]), width, 0)
    assert shared_width([2, 3]) == 6


def test_shard_keys_differ_by_block_count_index_and_layer_group() -> None:
    keys = {
        shard_key(bytes([block]) * 32, count, index, group)
        for block in range(3)
        for count in (1, 2, 4, 8)
        for index in range(count)
        for group in range(2)
    }
    assert len(keys) == 3 * 15 * 2
    assert shard_key(bytes(32), 4, 1).hex() == "b366d606cd16c067ea8d9093c0b7d33e281f7534c89406302f27c7819c64e196"


def test_one_layer_group_has_its_own_layers() -> None:
    assert stored_layout(LLAMA, 2, layers=5).shape == (5, 2, 4, 32, 128)
