"""Gather and scatter between an engine's pages and packed blocks: random pieces, strides, tails and holes."""

from __future__ import annotations

from random import Random

import pytest

torch = pytest.importorskip("torch")

from kvtool.errors import EngineFailed  # noqa: E402
from kvtool.kv.layout import KVLayout  # noqa: E402
from kvtool.kv.reshard import page_runs  # noqa: E402
from kvtool_trtllm.copies import Mover, Piece, Table, gather, prepare, scatter  # noqa: E402

SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 48, 100, 256, 4096, 16384, 16400, 40000]


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Case:
    """Pieces in pools of their own, rows any distance apart, in shuffled places of a packed block, with gaps."""

    def __init__(self, seed: int, device: torch.device) -> None:
        rng = Random(seed)
        aligned = rng.random() < 0.4
        gap = (lambda: rng.choice([0, 16, 64])) if aligned else (lambda: rng.choice([0, 16, 8, 4, rng.randrange(40)]))
        self.slots = rng.randrange(1, 9)
        self.spans: list[tuple[int, int, int]] = []  # first byte of a row, size, place in the block
        self.pools, at = [], 0
        for _ in range(rng.randrange(1, 6)):
            size, before = rng.choice(SIZES), gap()
            self.pools.append(_bytes(rng.randrange(1 << 30), self.slots, before + size + gap()).to(device))
            at += gap()
            self.spans.append((before, size, at))
            at += size
        self.packed = at + gap()
        self.pages = rng.sample(range(self.slots), rng.randrange(self.slots + 1)) + [-1] * rng.randrange(3)
        rng.shuffle(self.pages)
        self.pieces = [
            Piece(pool[:, before : before + size], place)
            for pool, (before, size, place) in zip(self.pools, self.spans, strict=True)
        ]
        rng.shuffle(self.pieces)


@pytest.mark.parametrize("seed", range(80))
def test_gather_and_scatter_move_the_bytes_of_their_pieces_and_no_others(
    seed: int, mover: Mover, device: torch.device
) -> None:
    """Against slices of numpy: what is covered is moved or zeroed, everything else stays."""
    case = Case(seed, device)
    out = _bytes(seed + 1, len(case.pages), case.packed)
    expected = out.numpy().copy()
    for block, page in enumerate(case.pages):
        for pool, (before, size, at) in zip(case.pools, case.spans, strict=True):
            row = pool[page, before : before + size].cpu().numpy()
            expected[block, at : at + size] = row if page >= 0 else 0
    out = out.to(device)
    gather(case.pieces, case.pages, out, mover=mover)
    assert (out.cpu().numpy() == expected).all()

    source = _bytes(seed + 2, len(case.pages), case.packed)
    after = [pool.cpu().numpy().copy() for pool in case.pools]
    for block, page in enumerate(case.pages):
        for pool, (before, size, at) in zip(after, case.spans, strict=True):
            if page >= 0:
                pool[page, before : before + size] = source.numpy()[block, at : at + size]
    pages = torch.tensor(case.pages, dtype=torch.int32)
    scatter(Table(case.pieces), pages, source.to(device), mover=mover)
    assert all((pool.cpu().numpy() == want).all() for pool, want in zip(case.pools, after, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_packed_blocks_may_lie_in_pinned_host_memory(seed: int, mover: Mover, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("no GPU")
    case = Case(seed, device)
    near = _bytes(seed + 1, len(case.pages), case.packed)
    far = near.clone().pin_memory()
    near = near.to(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    gather(case.pieces, case.pages, near, mover=mover)
    gather(case.pieces, case.pages, far, stream=stream, mover=mover)
    torch.cuda.synchronize()
    assert torch.equal(near.cpu(), far)
    wanted = [pool.clone() for pool in case.pools]
    for pool in case.pools:
        pool.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    scatter(case.pieces, case.pages, far, stream=stream, mover=mover)
    torch.cuda.synchronize()
    for pool, want, (before, size, _) in zip(case.pools, wanted, case.spans, strict=True):
        for page in set(case.pages) - {-1}:
            assert torch.equal(pool[page, before : before + size], want[page, before : before + size])


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_page_of_an_engine_goes_out_as_stored_shards_and_comes_back(
    shards: int, mover: Mover, device: torch.device
) -> None:
    """The pool tensor of the V1 cache manager, whole and layer by layer."""
    page = KVLayout(layers=3, kv_heads=4, head_dim=16, block_tokens=8)
    pool = _bytes(shards, 6, page.block_size).to(device)
    runs = page_runs(page, shards)
    pieces = [Piece(pool[:, run.page_at : run.page_at + run.size], run.at) for run in runs]
    out = torch.zeros(2, page.block_size, dtype=torch.uint8, device=device)
    gather(pieces, [5, 2], out, mover=mover)
    heads = pool[[5, 2]].view(2, 3, 2, shards, -1)  # [n, layers, K and V, shards, bytes]
    assert torch.equal(out, heads.permute(0, 3, 1, 2, 4).reshape(2, -1))
    before = pool.clone()
    for layer in range(3):
        some = [piece for piece, run in zip(pieces, runs, strict=True) if run.layer == layer]
        scatter(some, [0, 3], out, mover=mover)
        size = page.block_size // 3
        assert torch.equal(pool[[0, 3], : (layer + 1) * size], before[[5, 2], : (layer + 1) * size])
        assert torch.equal(pool[[0, 3], (layer + 1) * size :], before[[0, 3], (layer + 1) * size :])


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ([0, 5], r"pages \[0, 5\] reach outside the engine's pool of 5"),
        ([-2, 0], "reach outside"),
        ([1 << 40, 0], "reach outside"),
        ([0], "1 pages for 2 packed blocks"),
        ([0.5, 1.0], "whole numbers in one dimension"),
        ([True, False], "whole numbers"),
        (list(range(5, 15)), "10 pages for 2"),
    ],
)
def test_pages_that_do_not_fit_are_refused_before_anything_is_copied(
    pages: list[int], words: str, mover: Mover
) -> None:
    pool = _bytes(1, 5, 64)
    before, out = pool.clone(), torch.zeros(2, 64, dtype=torch.uint8)
    for move in (gather, scatter):
        with pytest.raises(EngineFailed, match=words):
            move([Piece(pool, 0)], pages, out, mover=mover)
    assert torch.equal(pool, before) and not out.any()


def test_the_shortest_piece_bounds_the_pages() -> None:
    with pytest.raises(EngineFailed, match="outside the engine's pool of 3"):
        gather([Piece(_bytes(1, 9, 8), 0), Piece(_bytes(1, 3, 8), 8)], [4], _bytes(1, 1, 16))


def test_a_page_that_two_blocks_would_fill_is_refused(mover: Mover, device: torch.device) -> None:
    pool, blocks = _bytes(1, 12, 64).to(device), _bytes(2, 3, 64).to(device)
    with pytest.raises(EngineFailed, match=r"named twice in \[3, 1, 3\]"):
        scatter([Piece(pool, 0)], [3, 1, 3], blocks)
    with pytest.raises(EngineFailed, match=r"named twice in \[0, 0, .*, ... 9 in all\]"):
        scatter([Piece(pool, 0)], [0] * 9, _bytes(2, 9, 64).to(device))
    scatter([Piece(pool, 0)], [3, -1, -1], blocks, mover=mover)  # holes may
    gather([Piece(pool, 0)], [3, 3, 3], blocks, mover=mover)  # and reading may


@pytest.mark.parametrize(
    ("pieces", "packed", "words"),
    [
        ([Piece(_bytes(1, 5, 64), 1)], _bytes(2, 1, 64), "reach to byte 65 of packed blocks of 64"),
        ([Piece(_bytes(1, 5, 64), -1)], _bytes(2, 1, 64), "piece 0 lies at byte -1"),
        ([Piece(_bytes(1, 5, 64).float(), 0)], _bytes(2, 1, 64), "piece 0: memory must be uint8"),
        ([Piece(_bytes(1, 64, 5).T, 0)], _bytes(2, 1, 64), r"contiguous rows.*strides \[1, 5\]"),
        ([Piece(_bytes(1, 5, 64), 0)], _bytes(2, 64), r"must be uint8 \[blocks, size\]"),
        ([Piece(_bytes(1, 5, 64), 0)], _bytes(2, 1, 64).float(), r"must be uint8 \[blocks, size\]"),
        ([Piece(_bytes(1, 5, 64), 0)], _bytes(2, 64, 2).T[:1], "their stride is 2"),
        ([Piece(_bytes(1, 5, 8), 0), Piece(_bytes(1, 5, 8), 7)], _bytes(2, 1, 16), "two pieces hold byte 7"),
        ([Piece(_bytes(1, 5, 8), 0), Piece(_bytes(1, 5, 8).to("meta"), 8)], _bytes(2, 1, 16), "piece 1 lies on meta"),
        ([Piece(_bytes(1, 5, 8).to("meta"), 0)], _bytes(2, 1, 16), "not pinned, and pages on meta"),
    ],
)
def test_memory_that_does_not_fit_is_refused(pieces: list[Piece], packed: torch.Tensor, words: str) -> None:
    with pytest.raises(EngineFailed, match=words):
        gather(pieces, [0], packed)


def test_pages_on_the_device_are_refused() -> None:
    with pytest.raises(EngineFailed, match="give them on the host"):
        gather([Piece(_bytes(1, 5, 8), 0)], torch.zeros(1, dtype=torch.int64, device="meta"), _bytes(2, 1, 8))


def test_nothing_to_do_is_done(mover: Mover, device: torch.device) -> None:
    gather([Piece(_bytes(1, 5, 64).to(device), 0)], [], _bytes(1, 0, 64).to(device), mover=mover)
    scatter([], [0, 1], _bytes(1, 2, 64), mover=mover)
    scatter([Piece(_bytes(1, 5, 64).to(device), 0)], [-1], _bytes(1, 1, 64).to(device), mover=mover)
    out = _bytes(1, 2, 64).to(device)
    gather([Piece(_bytes(1, 0, 64).to(device), 0)], [-1, -1], out, mover=mover)  # a pool without pages
    assert not out.any()


def test_a_table_is_its_pieces() -> None:
    pieces = [Piece(_bytes(1, 5, 8), 8), Piece(_bytes(2, 5, 8), 0), Piece(_bytes(2, 5, 0), 0)]
    table = Table(pieces)
    assert list(table) == pieces[:2] and table[1] is pieces[1] and table[:1] == pieces[:1]
    assert table.runs == [(0, 16)] and table.slots == 5 and table.largest == 8


def test_where_there_is_no_gpu_torch_moves_the_bytes() -> None:
    assert prepare(torch.device("cpu")) == "torch operations"
