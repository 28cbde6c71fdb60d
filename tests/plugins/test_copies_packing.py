"""Lossy packing to 8 bits: every device gives the same bytes, errors stay in their bound, and it is never silent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtool.errors import BlockCorrupt, EngineFailed  # noqa: E402
from kvtool.kv.layout import KVLayout  # noqa: E402
from kvtool.kv.reshard import Cut, plan  # noqa: E402
from kvtool_trtllm.copies import Mover  # noqa: E402
from kvtool_trtllm.packing import Packing, pack, unpack  # noqa: E402
from kvtool_trtllm.twin import Twin  # noqa: E402

LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=5, block_tokens=4)
PACKINGS = [Packing(kind, per) for kind in ("float8_e4m3fn", "int8") for per in ("head", "block")]
DTYPES = ["float32", "bfloat16", "float16"]


def _numbers(seed: int, count: int, layout: KVLayout) -> torch.Tensor:
    """Many magnitudes, zeros of both signs, and rows of nothing but zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, *layout.shape, generator=generator)
    values *= torch.exp2(torch.randint(-12, 6, values.shape, generator=generator).float())
    values[torch.rand(values.shape, generator=generator) < 0.05] = -0.0
    values[:, 0, 0, 0] = 0.0
    return values.to(getattr(torch, layout.dtype))


def _raw(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(values.shape[0], -1).contiguous().view(torch.uint8)


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_device_packs_and_unpacks_to_the_same_bytes(
    dtype: str, packing: Packing, mover: Mover, device: torch.device
) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    for seed in range(8):
        blocks = _raw(_numbers(seed, 4, layout))
        want = pack(blocks, layout, packing, mover=Twin())
        got = pack(blocks.to(device), layout, packing, mover=mover)
        assert torch.equal(got.cpu(), want)
        assert torch.equal(unpack(got, layout, packing, mover=mover).cpu(), unpack(want, layout, packing, mover=Twin()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_256_bytes_mean_the_same_everywhere(dtype: str, mover: Mover, device: torch.device) -> None:
    """Each byte under scales that make subnormals and infinities of the wide dtype too."""
    layout = KVLayout(layers=1, kv_heads=1, head_dim=256, block_tokens=1, dtype=dtype, kv_factor=1)
    scales = torch.tensor([1.0, 0.37, 2.0**-20, 3e-8, 1e-40, 1000.0, 3e38]).view(-1, 1)
    payload = torch.arange(256, dtype=torch.uint8).repeat(len(scales), 1)
    packed = torch.cat([payload, scales.view(torch.uint8)], dim=1)
    for kind in ("float8_e4m3fn", "int8"):
        want = unpack(packed, layout, Packing(kind), mover=Twin()).view(getattr(torch, dtype))
        got = unpack(packed.to(device), layout, Packing(kind), mover=mover).cpu().view(getattr(torch, dtype))
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(0.5), want.nan_to_num(0.5))


def test_every_half_way_case_of_e4m3_rounds_to_even(mover: Mover, device: torch.device) -> None:
    """All 126 magnitudes, the middles between neighbours, and the floats just beside these."""
    steps = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (steps[1:] + steps[:-1]) / 2
    values = torch.cat([steps, middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(999.0))])
    values = torch.cat([values, -values, torch.tensor([448.0])])  # 448: the scale is 1
    layout = KVLayout(layers=1, kv_heads=1, head_dim=len(values), block_tokens=1, dtype="float32", kv_factor=1)
    packed = pack(_raw(values.view(1, -1)).to(device), layout, Packing(), mover=mover).cpu()
    assert torch.equal(packed[0, : len(values)], values.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.label)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_stay_within_the_bound_of_the_format(
    dtype: str, packing: Packing, mover: Mover, device: torch.device
) -> None:
    """e4m3: 1/16 of the number, or half the smallest step under its scale. int8: half a step of its scale."""
    layout = replace(LAYOUT, dtype=dtype)
    values = _numbers(5, 6, layout)
    there = pack(_raw(values).to(device), layout, packing, mover=mover)
    back = unpack(there, layout, packing, mover=mover).cpu().view(values.dtype).view(values.shape).double()
    exact = values.double()
    dims = (3, 4, 5) if packing.per == "block" else (4, 5)
    scale = exact.abs().amax(dim=dims, keepdim=True) / packing.largest
    bound = scale / 2 if packing.kind == "int8" else torch.maximum(exact.abs() / 16, scale / 1024)
    slack = exact.abs() * 2.0**-7  # the wide dtype's own rounding
    assert ((back - exact).abs() <= bound * 1.001 + slack).all()


def test_what_is_not_finite_saturates_or_stays_no_number(mover: Mover, device: torch.device) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=1, dtype="float32", kv_factor=1)
    values = torch.tensor([[1.0, -2.0, float("inf"), -float("inf"), float("nan"), 0.0, 0.5, 2.0]])
    for kind, third, fifth in (("float8_e4m3fn", 2.0, None), ("int8", 2.0, 0.0)):
        packed = pack(_raw(values).to(device), layout, Packing(kind), mover=mover)
        got = unpack(packed, layout, Packing(kind), mover=mover).cpu().view(torch.float32)[0].tolist()
        assert got[2] == pytest.approx(third) and got[3] == pytest.approx(-third)
        assert got[4] == fifth if fifth is not None else got[4] != got[4]
        assert got[7] == pytest.approx(2.0)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("width", [2, 4])
def test_packed_blocks_are_resharded_as_exact_ones_are(kind: str, width: int) -> None:
    """Packing the parts, then merging them, is packing the merged block."""
    whole = KVLayout(layers=2, kv_heads=4, head_dim=6, block_tokens=3)
    packing = Packing(kind, "head")  # type: ignore[arg-type]
    values = _raw(_numbers(3, 5, whole))
    cut = plan(whole, Cut(1), Cut(width))
    parts = [np.zeros((5, size), np.uint8) for size in cut.target_sizes]
    cut.apply([values.numpy()], parts)
    part_layout = Cut(width).parts(whole)[0]
    packed = [pack(torch.from_numpy(part), part_layout, packing).numpy() for part in parts]
    merged = [np.full((5, packing.size(whole)), 9, np.uint8)]
    plan(packing.layout(whole), Cut(width), Cut(1), packing.scales()).apply(packed, merged)
    assert (merged[0] == pack(values, whole, packing).numpy()).all()

    of_blocks = Packing(kind, "block")  # type: ignore[arg-type]
    packed = [pack(torch.from_numpy(part), part_layout, of_blocks).numpy() for part in parts]
    with pytest.raises(BlockCorrupt, match="use a scale for each head"):
        plan(of_blocks.layout(whole), Cut(width), Cut(1), of_blocks.scales()).apply(
            packed, [np.zeros((5, of_blocks.size(whole)), np.uint8)]
        )


def test_it_is_labelled_as_lossy() -> None:
    assert Packing().label == "lossy-float8_e4m3fn-per-head"
    assert len({packing.label for packing in PACKINGS}) == len(PACKINGS)
    assert Packing().size(LAYOUT) == 240 + 12 * 4  # 240 numbers, a scale for each of 2 x 2 x 3 heads


@pytest.mark.parametrize(
    ("blocks", "layout", "words"),
    [
        (torch.zeros(1, 480, dtype=torch.uint8), replace(LAYOUT, dtype="int8"), "blocks of int8 are not packed"),
        (torch.zeros(1, 479, dtype=torch.uint8), LAYOUT, "blocks of 479 bytes, the layout wants 480"),
        (torch.zeros(1, 482, dtype=torch.uint8)[:, 2:], LAYOUT, "align them to 4 bytes"),
        (torch.zeros(480, dtype=torch.uint8), LAYOUT, r"must be uint8 \[blocks, size\]"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(blocks: torch.Tensor, layout: KVLayout, words: str) -> None:
    with pytest.raises(EngineFailed, match=words):
        pack(blocks, layout, Packing())


def test_no_blocks_are_packed_to_none(mover: Mover, device: torch.device) -> None:
    none = torch.zeros(0, LAYOUT.block_size, dtype=torch.uint8, device=device)
    packed = pack(none, LAYOUT, Packing(), mover=mover)
    assert packed.shape == (0, Packing().size(LAYOUT))
    assert unpack(packed, LAYOUT, Packing(), mover=mover).shape == none.shape
