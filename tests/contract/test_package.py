"""The generated package says what the record says of each version, and refuses everything else by name."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64,
    "vocab_size": 500, "model_type": "llama", "torch_dtype": "bfloat16",
}  # fmt: skip
PROMPT = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def llm_of(package, model, **more):
    cache = {"tokens_per_block": 4, "max_tokens": 2048}
    return package.LLM(model, skip_tokenizer_init=True, kv_cache_config=cache, max_seq_len=256, **more)


@pytest.mark.parametrize(("version", "engine", "fields"), [
    ("1.1.0", True, 4), ("1.2.1", True, 5), ("1.3.0rc27", False, 9), ("1.4.0rc1", False, 9),
])  # fmt: skip
def test_a_version_has_its_modules_its_fields_and_its_requirements(trtllm, version, engine, fields):
    package = trtllm(version)
    assert importlib.metadata.version("tensorrt_llm") == package.__version__ == version
    assert any(line.startswith("tensorrt~") for line in importlib.metadata.requires("tensorrt_llm")) is engine
    assert hasattr(package, "BuildConfig") is engine
    new = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
    old = "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
    module = importlib.import_module(old if engine else new)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(new if engine else old)
    assert len(inspect.signature(module.RequestData).parameters) == fields
    assert hasattr(module.KvCacheConnectorWorker, "register_kv_cache_layout") is not engine
    assert hasattr(module.KvCacheConnectorScheduler, "supports_attention_dp") is (version == "1.4.0rc1")
    with pytest.raises(TypeError, match="abstract"):
        module.KvCacheConnectorScheduler(None)


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
def test_keywords_that_a_version_does_not_have_are_refused(trtllm, model, version):
    package = trtllm(version)
    args = importlib.import_module("tensorrt_llm.llmapi.llm_args")
    with pytest.raises(ValueError, match="disk_cache_sizes"):
        args.KvCacheConfig(disk_cache_sizes=1)
    later = {"disk_cache_size": 1 << 30, "disk_cache_path": "/tmp"}
    if version == "1.2.1":
        with pytest.raises(ValueError, match="disk_cache_size"):
            args.KvCacheConfig(**later)
    else:
        assert args.KvCacheConfig(**later).disk_cache_size == 1 << 30
    with pytest.raises(ValueError, match="ucx"):
        args.CacheTransceiverConfig(backend="ucx")
    with pytest.raises(ValueError, match="no_such_thing"):
        llm_of(package, model, no_such_thing=1)
    with pytest.raises(TypeError, match="top_q"):
        package.SamplingParams(top_q=1)


@pytest.mark.parametrize("version", ["1.2.1", "1.4.0rc1"])
def test_the_same_tokens_alone_streamed_split_over_ranks_and_handed_over(trtllm, model, version):
    package = trtllm(version)
    sampling = package.SamplingParams(max_tokens=20)
    with llm_of(package, model) as llm:
        alone = llm.generate(PROMPT, sampling).outputs[0].token_ids
        assert len(alone) == 20

        async def streamed():
            steps = [
                list(out.outputs[0].token_ids_diff)
                async for out in llm.generate_async(PROMPT, sampling, streaming=True)
            ]
            assert len(steps) > 1
            return [token for step in steps for token in step]

        assert asyncio.run(streamed()) == alone
        running = llm.generate_async(PROMPT, package.SamplingParams(max_tokens=200))
        running.abort()
        assert running.result(10).outputs[0].finish_reason == "cancelled"
    with llm_of(package, model, tensor_parallel_size=2) as llm:
        assert llm.generate(PROMPT, sampling).outputs[0].token_ids == alone
    own = {"cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 64}}
    other = {"cache_transceiver_config": {"backend": "NIXL", "max_tokens_in_buffer": 64}}
    with llm_of(package, model, **own) as context, llm_of(package, model, **own) as generation:
        asked = package.DisaggregatedParams(request_type="context_only")
        first = context.generate(PROMPT, sampling, disaggregated_params=asked).outputs[0]
        assert (first.token_ids, first.finish_reason) == (alone[:1], "not_finished")
        handed = first.disaggregated_params
        handed.request_type = "generation_only"
        with (
            llm_of(package, model, **other) as stranger,
            pytest.raises(RuntimeError, match="backend is 'UCX', ours is"),
        ):
            stranger.generate(PROMPT, sampling, disaggregated_params=handed)
        assert generation.generate(PROMPT, sampling, disaggregated_params=handed).outputs[0].token_ids == alone
        with pytest.raises(RuntimeError, match="holds nothing"):
            generation.generate(PROMPT, sampling, disaggregated_params=handed)
        assert not context._executor.wrong and not generation._executor.wrong


def test_another_process_has_it_by_its_path(tmp_path):
    made = [sys.executable, "-m", "tests.contract.generate", "--version", "1.2.1", str(tmp_path)]
    subprocess.run(made, cwd=ROOT, check=True, timeout=60)
    code = "import tensorrt_llm, importlib.metadata as m; print(m.version('tensorrt_llm'), tensorrt_llm.__file__)"
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert out.stdout.startswith("1.2.1 " + str(tmp_path)), out.stderr
