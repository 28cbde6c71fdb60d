"""The checksum of device copies: one number for the same bytes on every device, another for any others."""

from __future__ import annotations

from random import Random

import pytest

torch = pytest.importorskip("torch")

from kvtool.errors import EngineFailed  # noqa: E402
from kvtool_trtllm.copies import Mover, checksum  # noqa: E402

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def _reference(block: bytes, seed: int) -> int:
    """From its definition, in whole numbers, last word first: the order is free."""
    total = _mix(len(block) ^ _mix(seed))
    words = [int.from_bytes(block[at : at + 8], "little") for at in range(0, len(block), 8)]
    for index, word in reversed(list(enumerate(words))):
        total += _mix(word ^ _mix((seed + (index + 1) * GOLDEN) % WORD))
    return total % WORD


def _unsigned(sums: torch.Tensor) -> list[int]:
    return [value % WORD for value in sums.tolist()]


def _blocks(seed: int, count: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1000, 4096, 131072, 131080, 300001])
@pytest.mark.parametrize("lead", [0, 8, 3])
def test_every_device_gives_the_number_of_the_definition(
    size: int, lead: int, mover: Mover, device: torch.device
) -> None:
    """`lead`: rows that begin at other alignments, with other bytes around them."""
    wide = _blocks(size, 3, lead + size + 5).to(device)
    seed = Random(size).choice([0, 1, WORD - 1, 1 << 63])
    got = checksum(wide[:, lead : lead + size], seed, mover=mover)
    assert got.device.type == device.type
    want = [_reference(bytes(row[lead : lead + size].tolist()), seed) for row in wide]
    assert _unsigned(got) == want


def test_golden_numbers() -> None:
    blocks = torch.arange(32, dtype=torch.uint8).reshape(2, 16)
    assert [f"{value:016x}" for value in _unsigned(checksum(blocks, 7))] == ["13dbe0d9b4293ca1", "d6f8023df047528a"]


def test_any_flipped_bit_moved_word_or_cut_end_changes_it(mover: Mover, device: torch.device) -> None:
    block = _blocks(1, 1, 96).to(device)
    seen = {int(checksum(block, mover=mover)[0])}
    changed = []
    for bit in range(96 * 8):
        other = block.clone()
        other[0, bit // 8] ^= 1 << bit % 8
        changed.append(other)
    words = block.view(1, 12, 8)
    changed += [torch.roll(words, by, dims=1).reshape(1, 96) for by in range(1, 12)]
    changed.append(words[:, [1, 0, *range(2, 12)]].reshape(1, 96))
    seen |= set(checksum(torch.cat(changed), mover=mover).tolist())
    seen.add(int(checksum(block[:, :88], mover=mover)[0]))
    seen.add(int(checksum(block, 1, mover=mover)[0]))
    assert len(seen) == 1 + len(changed) + 2


def test_blocks_of_zeros_differ_by_their_length(mover: Mover, device: torch.device) -> None:
    sums = {
        int(checksum(torch.zeros(1, size, dtype=torch.uint8, device=device), mover=mover)[0]) for size in range(1, 40)
    }
    assert len(sums) == 39


def test_no_blocks_have_no_sums(mover: Mover, device: torch.device) -> None:
    assert checksum(_blocks(1, 0, 64).to(device), mover=mover).shape == (0,)


def test_other_tensors_are_refused() -> None:
    for wrong in (torch.zeros(4, 4), torch.zeros(4, dtype=torch.uint8), torch.tensor(1, dtype=torch.uint8)):
        with pytest.raises(EngineFailed, match=r"must be uint8 \[blocks, size\]"):
            checksum(wrong)
