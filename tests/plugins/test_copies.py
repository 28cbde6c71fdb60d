"""Gather and scatter between an engine's pages and packed blocks: random pieces, strides, tails and holes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

torch = pytest.importorskip("torch")

from kvtool.errors import EngineFailed  # noqa: E402
from kvtool_trtllm.copies import Piece, gather, scatter  # noqa: E402


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """Pieces over `pools`, in shuffled places of a packed block, with gaps that belong to nobody."""

    pools: list[torch.Tensor]
    pieces: list[Piece]
    packed: int
    slots: int


def _case(rng: Random, sizes: Sequence[int]) -> Case:
    slots = rng.randrange(1, 9)
    pools, pieces, at = [], [], 0
    for size in rng.sample(list(sizes), len(sizes)):
        before, after = rng.choice([0, 16, rng.randrange(40)]), rng.choice([0, 16, rng.randrange(40)])
        pool = _bytes(rng.randrange(1 << 30), slots, before + size + after)
        pools.append(pool)
        at += rng.choice([0, 16, rng.randrange(30)])
        pieces.append(Piece(pool[:, before : before + size], at))
        at += size
    rng.shuffle(pieces)
    return Case(pools, pieces, at + rng.choice([0, 16, rng.randrange(30)]), slots)


def _pages(rng: Random, slots: int) -> list[int]:
    chosen = rng.sample(range(slots), rng.randrange(slots + 1)) + [-1] * rng.randrange(3)
    rng.shuffle(chosen)
    return chosen


@pytest.mark.parametrize("seed", range(60))
def test_gather_and_scatter_move_the_bytes_of_their_pieces_and_no_others(seed: int) -> None:
    """Against loops over single bytes: what is covered is moved or zeroed, everything else stays."""
    rng = Random(seed)
    case = _case(rng, [rng.choice([1, 3, 16, 64, 100, 256]) for _ in range(rng.randrange(1, 6))])
    pages = _pages(rng, case.slots)
    out = _bytes(seed + 1, len(pages), case.packed)
    expected = out.clone()
    for block, page in enumerate(pages):
        for piece in case.pieces:
            for byte in range(piece.size):
                expected[block, piece.at + byte] = piece.memory[page, byte] if page >= 0 else 0
    gather(case.pieces, pages, out)
    assert torch.equal(out, expected)

    source = _bytes(seed + 2, len(pages), case.packed)
    after = [pool.clone() for pool in case.pools]
    spread = [
        Piece(clone[:, lead : lead + piece.size], piece.at)
        for piece in case.pieces
        for pool, clone in zip(case.pools, after, strict=True)
        if pool.untyped_storage().data_ptr() == piece.memory.untyped_storage().data_ptr()
        for lead in [piece.memory.storage_offset()]
    ]
    for block, page in enumerate(pages):
        for piece in spread if page >= 0 else []:
            for byte in range(piece.size):
                piece.memory[page, byte] = source[block, piece.at + byte]
    scatter(case.pieces, torch.tensor(pages, dtype=torch.int32), source)
    assert all(torch.equal(pool, want) for pool, want in zip(case.pools, after, strict=True))


def test_one_layer_of_a_block_is_a_subset_of_its_pieces() -> None:
    pool = _bytes(1, 5, 4 * 64)  # pages of 4 layers
    pieces = [Piece(pool[:, layer * 64 : layer * 64 + 64], layer * 64) for layer in range(4)]
    source = _bytes(2, 2, 256)
    before = pool.clone()
    scatter(pieces[2:3], [4, 0], source)
    assert torch.equal(pool[[4, 0], 128:192], source[:, 128:192])
    pool[:, 128:192] = before[:, 128:192]
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ([0, 5], r"pages \[0, 5\] reach outside the engine's pool of 5"),
        ([-2, 0], "reach outside"),
        ([0], "1 pages for 2 packed blocks"),
        ([0.5, 1.0], "whole numbers in one dimension"),
        (list(range(5, 15)), "10 pages for 2"),
    ],
)
def test_pages_that_do_not_fit_are_refused_before_anything_is_copied(pages: list[int], words: str) -> None:
    pool = _bytes(1, 5, 64)
    before, out = pool.clone(), torch.zeros(2, 64, dtype=torch.uint8)
    for move in (gather, scatter):
        with pytest.raises(EngineFailed, match=words):
            move([Piece(pool, 0)], pages, out)
    assert torch.equal(pool, before) and not out.any()


def test_a_page_that_two_blocks_would_fill_is_refused() -> None:
    with pytest.raises(EngineFailed, match=r"named twice in \[3, 1, 3\]"):
        scatter([Piece(_bytes(1, 5, 64), 0)], [3, 1, 3], _bytes(2, 3, 64))
    scatter([Piece(_bytes(1, 5, 64), 0)], [3, -1, -1], _bytes(2, 3, 64))  # holes may


@pytest.mark.parametrize(
    ("piece", "packed", "words"),
    [
        (Piece(_bytes(1, 5, 64), 1), _bytes(2, 1, 64), "piece 0 lies at bytes 1..65 of packed blocks of 64"),
        (Piece(_bytes(1, 5, 64), -1), _bytes(2, 1, 64), "lies at bytes -1..63"),
        (Piece(_bytes(1, 5, 64).float(), 0), _bytes(2, 1, 64), "piece 0: memory must be uint8"),
        (Piece(_bytes(1, 64, 5).T, 0), _bytes(2, 1, 64), r"contiguous rows.*strides \[1, 5\]"),
        (Piece(_bytes(1, 5, 64), 0), _bytes(2, 64), r"must be uint8 \[blocks, size\]"),
        (Piece(_bytes(1, 5, 64), 0), _bytes(2, 64, 2).T[:1], "their stride is 2"),
    ],
)
def test_memory_that_does_not_fit_is_refused(piece: Piece, packed: torch.Tensor, words: str) -> None:
    with pytest.raises(EngineFailed, match=words):
        gather([piece], [0], packed)


def test_nothing_to_do_is_done() -> None:
    out = _bytes(1, 0, 64)
    gather([Piece(_bytes(1, 5, 64), 0)], [], out)
    scatter([], [0, 1], _bytes(1, 2, 64))
