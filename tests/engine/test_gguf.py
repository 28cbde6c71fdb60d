"""A checkpoint is a stranger's file: whatever its bytes, reading it ends in a model or in one sentence."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from engine_samples import gguf_bytes, quantise_q4, small_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtool.engine.gguf import GgufFile
from kvtool.engine.gguf_model import open_gguf
from kvtool.errors import CheckpointRefused

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return small_gguf(tmp_path_factory.mktemp("gguf")).read_bytes()


def _read_all(path: Path) -> None:
    checkpoint = open_gguf(path)
    for load in checkpoint.tensors.values():
        load()
    for codes in checkpoint.codes.values():
        codes()


def test_values_are_what_was_stored(tmp_path: Path) -> None:
    """Each type against its definition: exact for floats, and code * scale + offset for 4-bit blocks."""
    values = np.linspace(-2, 3, 4 * 64, dtype="<f4").reshape(4, 64)
    tensors = {
        "f32": (0, (4, 64), values.tobytes()),
        "f16": (1, (4, 64), values.astype("<f2").tobytes()),
        "bf16": (30, (4, 64), (values.view("<u4") >> 16).astype("<u2").tobytes()),
        "q4_0": (2, (4, 64), quantise_q4(values, with_offset=False)),
        "q4_1": (3, (4, 64), quantise_q4(values, with_offset=True)),
    }
    path = tmp_path / "types.gguf"
    path.write_bytes(gguf_bytes({"general.architecture": "llama"}, tensors))
    file = GgufFile(path)
    assert np.array_equal(file.values("f32"), values)
    assert np.array_equal(file.values("f16"), values.astype("<f2").astype("<f4"))
    assert np.abs(file.values("bf16") - values).max() < 0.02
    for name in ("q4_0", "q4_1"):
        codes = file.codes(name)
        spread = codes.codes.reshape(4, 2, 32) * codes.scale[:, :, None] + codes.offset[:, :, None]
        assert np.array_equal(spread.reshape(4, 64), file.values(name))
        assert np.abs(file.values(name) - values).max() < 0.5
    assert np.corrcoef(file.values("q4_1").ravel(), values.ravel())[0, 1] > 0.999


def test_q8_0_values(tmp_path: Path) -> None:
    raw = struct.pack("<e32b", 0.5, *range(-16, 16))
    path = tmp_path / "q8.gguf"
    path.write_bytes(gguf_bytes({}, {"w": (8, (1, 32), raw)}))
    assert GgufFile(path).values("w").tolist() == [[code * 0.5 for code in range(-16, 16)]]


def test_whole_file_is_a_checkpoint(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(whole)
    checkpoint = open_gguf(path)
    assert checkpoint.family.architecture == "LlamaForCausalLM"
    assert checkpoint.family.tied and checkpoint.eos_token_ids == [1]
    assert set(checkpoint.tensors) == set(checkpoint.family.tensors())
    assert len(checkpoint.codes) == 7 * checkpoint.family.layers


@FUZZ
@given(data=st.data())
def test_file_cut_short_is_refused(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 33))])
    with pytest.raises(CheckpointRefused, match=r"cut\.gguf: .*(wanted|wants).*"):
        open_gguf(path)


@FUZZ
@given(data=st.data())
def test_changed_bytes_give_a_model_or_a_sentence(tmp_path: Path, whole: bytes, data: st.DataObject) -> None:
    """Flips anywhere, most of them in the header; memory stays within a few sizes of the file."""
    header = 8000
    raw = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, header) | st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "flipped.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        _read_all(path)
    except CheckpointRefused as error:
        assert str(path) in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40 * len(raw) + 4_000_000


@pytest.mark.parametrize(
    ("at", "form", "value", "words"),
    [
        (0, "<4s", b"GGML", "wanted a GGUF file"),
        (4, "<I", 1, "wanted GGUF version 2 or 3, found 1"),
        (4, "<I", 0x03000000, "found 50331648"),
        (8, "<Q", 1 << 60, "tensor count"),
        (16, "<Q", 1 << 60, "metadata count"),
        (24, "<Q", 1 << 62, "length of metadata key"),
    ],
)
def test_header_that_cannot_be_is_refused(
    tmp_path: Path, whole: bytes, at: int, form: str, value: object, words: str
) -> None:
    raw = bytearray(whole)
    struct.pack_into(form, raw, at, value)
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(CheckpointRefused, match=words):
        open_gguf(path)


def test_unread_tensor_type_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "iq.gguf"
    path.write_bytes(gguf_bytes({}, {"w": (19, (1, 32), bytes(64))}))
    with pytest.raises(CheckpointRefused, match=r"tensor w has GGUF type 19; this kvtool reads F32, F16, Q4_0"):
        GgufFile(path)


def test_absurd_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.gguf"
    path.write_bytes(gguf_bytes({}, {"w": (0, (1 << 40, 1 << 40), bytes(32))}))
    with pytest.raises(CheckpointRefused, match="cut short"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, "'mamba'; this kvtool computes llama, qwen2, qwen3"),
        ({"tokenizer.ggml.model": "llama"}, "Hugging Face directory"),
        ({"tokenizer.ggml.pre": "novel"}, "pre-tokenizer 'novel'"),
        ({"llama.attention.head_count": 0}, "attention heads"),
        ({"llama.feed_forward_length": 160}, "wanted shape"),
        ({"llama.block_count": 2_000_000_000}, "num_hidden_layers: wanted at most 4096"),
        ({"llama.block_count": 3}, r"model\.layers\.2\.\S+ is missing"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of 16"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id: wanted 0 to 259"),
        ({"llama.rope.scaling.type": "yarn"}, "Hugging Face"),
    ],
)
def test_model_that_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointRefused, match=words):
        open_gguf(small_gguf(tmp_path, **changes))
