"""Bundles for the PyTorch backend are written here for real: they need neither a GPU nor tensorrt_llm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from trtllm_samples import asked, checkpoint, request

from kvtool.engine.build import verify
from kvtool.engine.load import load_engine
from kvtool.engine.manifest import FILE, read_manifest
from kvtool.engine.trtllm.build import build
from kvtool.engine.trtllm.bundle import CONNECTOR_FILE, LLM_FILE, read_bundle
from kvtool.engine.trtllm.digest import digest
from kvtool.engine.trtllm.request import prepare
from kvtool.errors import CheckpointRefused, EngineRefused, Missing


def test_bundle_holds_arguments_settings_and_tokenizer_but_no_weights(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "Tiny Llama")
    result = build(request(source, "tensor_parallel=2", "kv_dtype=fp8"), tmp_path / "out")
    assert result.built and result.manifest.name == "tiny-llama"
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", CONNECTOR_FILE, FILE, LLM_FILE, "tokenizer.json"]
    bundle = read_bundle(tmp_path / "out")
    assert verify(tmp_path / "out") == bundle.manifest == result.manifest
    assert bundle.llm["model"] == str(source) and bundle.llm["tensor_parallel_size"] == 2
    assert bundle.llm["kv_cache_config"]["dtype"] == "fp8"
    layout = bundle.manifest.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (3, 2, 16, "float8_e4m3fn")
    assert bundle.connector.kv == bundle.manifest.kv and bundle.connector.model_digest == bundle.manifest.model_digest
    assert bundle.connector.numerics == "pytorch-1.2/sm_90/none/fp8"
    fields = bundle.fields
    assert (fields.adapter, fields.version, fields.gpu_arch, fields.world_size) == ("pytorch-1.2", "1.2.1", "sm_90", 2)
    assert fields.tensorrt_version is None and fields.checkpoint.digest == digest(source)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )


def test_latent_attention_has_one_head_and_one_part(tmp_path: Path) -> None:
    manifest = build(
        request(checkpoint(tmp_path / "m", "DeepseekV3ForCausalLM"), "tensor_parallel=4"), tmp_path / "o"
    ).manifest
    assert (manifest.kv.kv_heads, manifest.kv.kv_factor, manifest.kv.head_dim) == (1, 1, 32 + 8)
    assert manifest.tensorrt_llm is not None and manifest.tensorrt_llm.moe_expert_parallel == 1


def test_roles_share_blocks_and_say_under_which_width(tmp_path: Path) -> None:
    """Prefill on two ranks and decode on four: equal model digests, and blocks stored for four."""
    source = checkpoint(tmp_path / "m")
    want = asked(source, "prefill.tensor_parallel=2", "decode.tensor_parallel=4")
    made = {role: build(prepare(want, role), tmp_path / role).manifest for role in ("prefill", "decode")}
    settings = {role: read_bundle(tmp_path / role).connector for role in made}
    assert made["prefill"].model_digest == made["decode"].model_digest
    assert made["prefill"].source_digest != made["decode"].source_digest
    assert {one.stored_parallel for one in settings.values()} == {4}
    assert [settings[role].tensor_parallel for role in made] == [2, 4]
    assert [made[role].name for role in made] == ["m-prefill", "m-decode"]


def test_second_build_does_nothing_and_a_changed_setting_is_another_engine(tmp_path: Path) -> None:
    source, out = checkpoint(tmp_path / "m"), tmp_path / "out"
    build(request(source), out)
    before = (out / FILE).stat().st_mtime_ns
    assert not build(request(source), out).built and (out / FILE).stat().st_mtime_ns == before
    for change in ("max_batch_size=4", "kv_dtype=fp8", "block_reuse=false"):
        with pytest.raises(EngineRefused, match=r"holds another engine \(m, tensorrt_llm, .*--force"):
            build(request(source, change), out)
    with pytest.raises(EngineRefused, match="holds another engine"):
        build(request(source, version="1.4.0rc1"), out)
    assert build(request(source, version="1.4.0rc1"), out, force=True).built
    assert read_bundle(out).fields.adapter == "pytorch-1.3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "out"], "leftovers"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(request(checkpoint(tmp_path / "m")), tmp_path / "out", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_digest_sees_another_model_and_not_another_folder(tmp_path: Path) -> None:
    one, other = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "other")
    assert digest(one) == digest(other) != digest(one, "bytes") == digest(other, "bytes")
    tensors = load_file(other / "model.safetensors")
    save_file({name: t * 1.001 for name, t in tensors.items()}, other / "model.safetensors", metadata={"format": "pt"})
    assert digest(one) != digest(other), "every weight changed a little"
    tensors["model.layers.1.mlp.up_proj.weight"] += tensors["model.layers.1.mlp.up_proj.weight"].mean()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert digest(one) != digest(other), "one matrix changed, as a merged adapter does"
    checkpoint(other)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("w9", "w0"))
    assert digest(one) != digest(other), "another tokenizer"


def test_damaged_and_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "m")
    weights = source / "model.safetensors"
    whole = weights.read_bytes()
    for raw in (whole[: len(whole) // 2], b"\xff" * 64, b""):
        weights.write_bytes(raw)
        with pytest.raises(CheckpointRefused, match=r"model\.safetensors: wanted a safetensors file, found a damaged"):
            request(source)
    weights.unlink()
    with pytest.raises(CheckpointRefused, match="no weights here"):
        request(source)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x1.safetensors", "b": "x2"}}))
    with pytest.raises(CheckpointRefused, match=r"x1\.safetensors \(2 of 2 files\) is missing"):
        request(source)
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointRefused, match=r"tokenizer\.json is missing; copy it"):
        request(source)
    with pytest.raises(CheckpointRefused, match="found a file; GGUF is for --target torch"):
        (tmp_path / "m.gguf").touch()
        request(tmp_path / "m.gguf")


def test_recipe_is_built_from_a_checkpoint_that_is_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(Missing, match=r"hf download nvidia/Llama-3\.1-8B-Instruct-FP8"):
        prepare(asked("llama-3.1-8b-h100"), "decode")
    rehearsed = prepare(asked("llama-3.1-8b-h100"), "decode", rehearse=True)
    with pytest.raises(Missing, match="not on this machine; name it with --checkpoint"):
        build(rehearsed, tmp_path / "out")
    with pytest.raises(CheckpointRefused, match="layers: the recipe says 32, this checkpoint has 3"):
        prepare(asked("llama-3.1-8b-h100", checkpoint=checkpoint(tmp_path / "m")), "decode")


def test_bundle_is_not_loaded_here_nor_another_engine_as_a_bundle(tmp_path: Path) -> None:
    out = build(request(checkpoint(tmp_path / "m")), tmp_path / "out").directory
    with pytest.raises(EngineRefused, match="loaded by TensorRT-LLM on a GPU host, not in this process"):
        load_engine(out, threads=1, blocks=4)
    text = (out / LLM_FILE).read_text()
    (out / LLM_FILE).write_text("x" * len(text))
    with pytest.raises(EngineRefused, match=r"llm\.yaml: wanted LLM arguments, found str"):
        read_bundle(out)
    (out / LLM_FILE).write_text(text)
    assert yaml.safe_load(text) == read_bundle(out).llm
    from kvtool.engine.build import build as build_torch

    with pytest.raises(EngineRefused, match=r"wanted a bundle .* found an engine for torch"):
        read_bundle(build_torch(tmp_path / "m", tmp_path / "torch").directory)
    assert read_manifest(out).tensorrt_llm is not None
