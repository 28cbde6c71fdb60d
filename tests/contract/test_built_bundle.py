"""What `kvtool build` and `llm_args` write is taken by TensorRT-LLM's recorded classes, in every role, and serves."""

from __future__ import annotations

import json

import pytest

from kvtool.engine.trtllm.build import build
from kvtool.engine.trtllm.bundle import CONNECTOR_FILE, read_bundle
from kvtool.engine.trtllm.connector import SETTINGS_ENV
from kvtool.engine.trtllm.llm_args import Transceiver, llm_args
from kvtool.engine.trtllm.request import Asked, prepare

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 997,
    "max_position_embeddings": 512, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
PROMPT = list(range(3, 60))


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def bundle_of(checkpoint, version, *changes):
    sizes = ("gpu=h100-80gb", "max_seq_len=256", "max_num_tokens=128", "max_batch_size=8")
    asked = Asked(str(checkpoint), version=version, block_tokens=16, changes=(*sizes, *changes))
    return read_bundle(build(prepare(asked, None), checkpoint.parent / f"bundle{len(changes)}").directory)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("version", ["1.1.0", "1.2.1", "1.3.0rc27", "1.4.0rc1"])
def test_a_bundle_serves_alone_handed_over_and_with_the_connector(trtllm, checkpoint, monkeypatch, version, tp):
    """The same tokens in all three: one engine, a context and a generation server, and one with kvtool's connector,
    whose bundle names no pool yet."""
    package, bundle = trtllm(version), bundle_of(checkpoint, version, f"tensor_parallel={tp}", "kv_dtype=fp8")
    sampling = package.SamplingParams(max_tokens=20, end_id=2, pad_id=2, detokenize=False)
    with package.LLM(**llm_args(bundle, role="both", connector=False, memory_fraction=0.5)) as llm:
        assert llm.args.kv_cache_config.tokens_per_block == 16 and llm.args.max_num_tokens == 128
        alone = list(llm.generate(PROMPT, sampling).outputs[0].token_ids)
    if tp == 1:
        handed_over(package, bundle, sampling, alone)
    monkeypatch.setenv(SETTINGS_ENV, str(bundle.directory / CONNECTOR_FILE))
    with package.LLM(**llm_args(bundle, role="both", cuda_graphs=version > "1.2")) as llm:
        assert llm.args.kv_connector_config.connector_module == "kvtool_trtllm.connector"
        for _ in range(2):
            assert list(llm.generate(PROMPT, sampling).outputs[0].token_ids) == alone


def handed_over(package, bundle, sampling, alone):
    between = Transceiver("NIXL", buffer_tokens=256, timeout_s=5.0)
    sides = [llm_args(bundle, role=role, connector=False, transceiver=between) for role in ("prefill", "decode")]
    with package.LLM(**sides[0]) as context, package.LLM(**sides[1]) as generation:
        assert context.args.disable_overlap_scheduler and not generation.args.disable_overlap_scheduler
        asked = package.DisaggregatedParams(request_type="context_only")
        handed = context.generate(PROMPT, sampling, disaggregated_params=asked).outputs[0].disaggregated_params
        handed.request_type = "generation_only"
        there = generation.generate(PROMPT, sampling, disaggregated_params=handed).outputs[0]
        assert list(there.token_ids) == alone
