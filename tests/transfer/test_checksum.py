"""Checksums: golden values hold on every machine, and a copy's checksum is that of what was copied."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest

from kvtool.transfer.checksum import STEP, checksum, copy_checksum, copy_checksums

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
SIZES = [0, 1, 2, 7, 241, 4095, STEP - 1, STEP, STEP + 1, 3 * STEP, 5 * STEP + 13]


def some_bytes(size: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(size)


@pytest.mark.parametrize(
    ("data", "key", "golden"),
    [
        (b"", KEY, 0x28217112654C42F2),
        (b"a", KEY, 0xAFE2FF70445ABBC8),
        (b"kv", OTHER, 0x01C909EF8ADA1CFC),
        (bytes(range(256)) * 4, KEY, 0xB78E75C43E49393F),
        (bytes(range(256)) * 4, bytes(32), 0xA870F92984398D22),
        (bytes(range(256)) * 8192, KEY, 0xA7D3C1B68AA52379),
    ],
)
def test_golden_checksums_hold_on_every_machine(data, key, golden):
    assert checksum(data, key) == golden


@pytest.mark.parametrize("size", SIZES)
def test_a_copy_is_whole_and_its_checksum_is_that_of_the_bytes(size):
    source, target = some_bytes(size), bytearray(size)
    assert copy_checksum(target, source, KEY) == checksum(source, KEY)
    assert target == source


@pytest.mark.parametrize("size", [1, 241, STEP + 1])
def test_a_flipped_bit_or_another_key_gives_another_checksum(size):
    data = bytearray(some_bytes(size))
    right = checksum(data, KEY)
    assert checksum(data, OTHER) != right
    data[size // 2] ^= 1
    assert checksum(data, KEY) != right


def test_only_the_first_eight_bytes_of_the_key_are_the_seed():
    assert checksum(b"x", KEY) == checksum(b"x", KEY[:8]) != checksum(b"x", KEY[1:9])
    with pytest.raises(ValueError, match="first 8 bytes of a block key, got 7"):
        checksum(b"x", KEY[:7])


def test_typed_and_shaped_buffers_are_their_bytes():
    array = np.arange(2 * 3 * 5, dtype=np.float32).reshape(2, 3, 5)
    copy = np.zeros_like(array)
    assert copy_checksum(copy, array, KEY) == checksum(array.tobytes(), KEY)
    assert np.array_equal(copy, array)
    with pytest.raises(ValueError, match="C-contiguous"):
        checksum(array[:, ::2], KEY)


def test_a_copy_is_refused_whole_when_the_target_is_readonly_or_of_another_size():
    with pytest.raises(ValueError, match="must be writable, got a read-only"):
        copy_checksum(bytes(4), b"abcd", KEY)
    with pytest.raises(ValueError, match="must be writable"):
        copy_checksum(memoryview(bytearray(4)).toreadonly(), b"abcd", KEY)
    target = bytearray(5)
    with pytest.raises(ValueError, match="cannot copy 4 bytes into a buffer of 5"):
        copy_checksum(target, b"abcd", KEY)
    assert target == bytes(5)


def test_no_export_of_either_buffer_outlives_the_copy():
    source, target = bytearray(some_bytes(2 * STEP)), bytearray(2 * STEP)
    copy_checksum(target, source, KEY)
    source.clear()  # BufferError if somebody still held a view
    target.clear()


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_batch_over_threads_gives_the_same_in_the_same_order(count):
    sources = [some_bytes(STEP + 17 * n, n) for n in range(count)]
    targets = [bytearray(len(source)) for source in sources]
    copies = [(targets[n], sources[n], n.to_bytes(8, "big")) for n in range(count)]
    with ThreadPoolExecutor(1) as threads:
        sums = copy_checksums(copies, threads)
    assert sums == [checksum(s, n.to_bytes(8, "big")) for n, s in enumerate(sources)]
    assert targets == sources
