"""Settings that do not fit are refused by name before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trtllm_samples import asked, checkpoint, distribution, request

from kvtool.engine.trtllm.build import build
from kvtool.engine.trtllm.check import check_gpu_arch, check_installed, check_paged_reuse
from kvtool.engine.trtllm.gpus import GPUS
from kvtool.engine.trtllm.request import prepare, roles_of
from kvtool.engine.trtllm.settings import TrtllmSettings
from kvtool.engine.trtllm.source import read_source
from kvtool.errors import CheckpointRefused, EngineRefused, SpecRefused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["max_num_tokens=250"], r"max_num_tokens: wanted a multiple of block_tokens \(32\)"),
        (["max_num_tokens=32", "max_batch_size=64"], r"max_num_tokens: wanted at least max_batch_size \(64\)"),
        (
            ["max_num_tokens=512", "max_batch_size=2", "max_seq_len=128"],
            r"at most max_seq_len x max_batch_size \(256\)",
        ),
        (["max_seq_len=513"], r"max_seq_len: wanted at most the model's context \(512\), found 513"),
        (["tensor_parallel=3"], "tensor_parallel: wanted a divisor of the 4 attention heads, found 3"),
        (["expert_parallel=2"], "expert_parallel: LlamaForCausalLM has no experts"),
        (["pipeline_parallel=4"], "pipeline_parallel: wanted at most the 3 layers"),
        (["kv_dtype=float16"], "kv_dtype: wanted the model's bfloat16 or fp8, found float16"),
        (["kv_dtype=int8"], r"kv_dtype: found 'int8', this version takes fp8; 1\.1\.0 can \(engine-1\.2\)"),
        (
            ["kv_dtype=fp8", "gpu=a100-80gb"],
            r"fp8 needs a GPU from Ada on \(sm_89\), A100 80 GB SXM is sm_80",
        ),
        (["quantisation=fp8"], "quantisation: the settings say fp8, the checkpoint has none"),
        (["quantisation=nvfp4"], "quantisation: nvfp4 needs a GPU from Blackwell"),
        (["plugins=[libx.so]"], "plugins: libx.so: TensorRT plugins are for TensorRT engines"),
        (["backend=tensorrt", "plugins=[my_plugin.py]"], "my_plugin.py: wanted a compiled library"),
        (["backend=tensorrt", "quantisation=fp8_block_scales"], "fp8_block_scales is for the PyTorch backend"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(tmp_path: Path, changes: list[str], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        request(checkpoint(tmp_path / "m"), *changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["tensor_paralel=2"], "tensor_paralel: Extra inputs are not permitted"),
        (["tensor_parallel=0"], "tensor_parallel: Input should be greater than or equal to 1, found 0"),
        (["quantisation=fp9"], "quantisation: Input should be 'none', 'fp8'"),
        (["gpu"], r"--set: wanted KEY=VALUE, such as tensor_parallel=4, found 'gpu'"),
        (["prefill.gpu=h200"], r"prefill\.gpu: Extra inputs"),
    ],
)
def test_settings_that_there_are_not_are_refused_by_name(tmp_path: Path, changes: list[str], words: str) -> None:
    with pytest.raises(SpecRefused, match=words):
        request(checkpoint(tmp_path / "m"), *changes)


@pytest.mark.parametrize("tokens", [1, 3, 48, 100])
def test_blocks_have_a_power_of_two_of_tokens(tmp_path: Path, tokens: int) -> None:
    with pytest.raises(EngineRefused, match=f"block_tokens: wanted a power of two above 1 .* found {tokens}"):
        request(checkpoint(tmp_path / "m"), block_tokens=tokens)


def test_model_decides_what_may_be_split(tmp_path: Path) -> None:
    moe = checkpoint(tmp_path / "moe", "MixtralForCausalLM")
    assert request(moe, "tensor_parallel=4", "expert_parallel=4").settings.world_size == 4
    with pytest.raises(EngineRefused, match=r"expert_parallel: wanted a divisor of tensor_parallel \(2\)"):
        request(moe, "tensor_parallel=2", "expert_parallel=4")
    grouped = checkpoint(tmp_path / "g", num_attention_heads=12, num_key_value_heads=6, intermediate_size=96)
    assert request(grouped, "tensor_parallel=3").settings.tensor_parallel == 3
    assert request(grouped, "tensor_parallel=12").settings.tensor_parallel == 12
    with pytest.raises(EngineRefused, match="a divisor or a multiple of the 6 KV heads, found 4"):
        request(grouped, "tensor_parallel=4")
    with pytest.raises(EngineRefused, match=r"builds no TensorRT engines of DeepseekV3ForCausalLM .* backend: pytorch"):
        request(checkpoint(tmp_path / "d", "DeepseekV3ForCausalLM"), "backend=tensorrt")


def test_what_the_checkpoint_carries_decides(tmp_path: Path) -> None:
    """ModelOpt's file says FP8 weights and KV: under kv dtype auto TensorRT-LLM would take its word, so kvtool does."""
    source = checkpoint(tmp_path / "m")
    table = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (source / "hf_quant_config.json").write_text(json.dumps(table))
    made = request(source, "quantisation=fp8", "kv_dtype=fp8")
    assert (made.source.quantisation, made.source.kv_dtype) == ("fp8", "fp8")
    with pytest.raises(EngineRefused, match="carries scales for fp8 KV, which TensorRT-LLM then uses; set"):
        request(source, "quantisation=fp8")
    with pytest.raises(EngineRefused, match="quantised already"):
        request(source, "backend=tensorrt", "kv_dtype=fp8")
    table["quantization"]["quant_algo"] = "W4A8_QSERVE"
    (source / "hf_quant_config.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointRefused, match="quant_algo: found 'W4A8_QSERVE'"):
        request(source)


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block_scales"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "w4a16_awq"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    ],
)
def test_quantisation_is_read_from_config(tmp_path: Path, table: dict[str, object], word: str) -> None:
    source = checkpoint(tmp_path / "m", quantization_config=table)
    assert read_source(source).quantisation == word
    with pytest.raises(EngineRefused, match=f"the checkpoint has {word}"):
        request(source)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float32"}, "dtype: wanted bfloat16 or float16, found float32"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method 'bitsandbytes'"),
        ({"architectures": ["GemmaForCausalLM"]}, "architectures: wanted one of DeepseekV3"),
    ],
)
def test_checkpoints_that_are_not_known_are_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointRefused, match=words):
        request(checkpoint(tmp_path / "m", **changes))


def test_version_is_named_or_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint(tmp_path / "m")
    distribution(monkeypatch, {}, [])
    with pytest.raises(EngineRefused, match=r"not installed here, so name .*--tensorrt-llm-version 1\.2\.1"):
        prepare(asked(source, version=None), None)
    assert prepare(asked(source, "version=1.3.0rc22", version=None), None).able.layer_groups
    distribution(monkeypatch, {"tensorrt_llm": "1.4.0rc1"}, [])
    assert prepare(asked(source, version=None), None).version == "1.4.0rc1"
    with pytest.raises(EngineRefused, match=r"TensorRT-LLM 1\.4\.0rc1: TensorRT engines .* were removed in 1\.3"):
        prepare(asked(source, "backend=tensorrt", version=None), None)
    assert roles_of(asked(source)) == [None]
    assert roles_of(asked(source, "decode.max_batch_size=4")) == ["prefill", "decode"]


def test_manifest_is_compared_with_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = build(request(checkpoint(tmp_path / "m")), tmp_path / "out").manifest
    distribution(monkeypatch, {}, [])
    with pytest.raises(EngineRefused, match="none is installed here"):
        check_installed(manifest, "here")
    for version in ("1.2.0", "1.2.1"):
        check_installed(manifest, "here", version)
    with pytest.raises(EngineRefused, match=r"1\.2\.1 \(pytorch-1\.2\), found 1\.4\.0rc1 \(pytorch-1\.3\)"):
        check_installed(manifest, "here", "1.4.0rc1")
    check_gpu_arch(manifest, "here", "sm_90")
    with pytest.raises(EngineRefused, match="built for sm_90, this GPU is sm_80"):
        check_gpu_arch(manifest, "here", "sm_80")


def test_gpus_are_named_where_they_are_asked_for() -> None:
    said = TrtllmSettings.model_fields["gpu"].description
    assert said is not None and all(name in said for name in GPUS)


def test_reuse_needs_paged_context_fmha() -> None:
    check_paged_reuse(False, {})
    check_paged_reuse(True, {"use_paged_context_fmha": True, "paged_kv_cache": True})
    with pytest.raises(EngineRefused, match=r"use_paged_context_fmha: found False, block reuse needs it"):
        check_paged_reuse(True, {"use_paged_context_fmha": False, "paged_kv_cache": True})
