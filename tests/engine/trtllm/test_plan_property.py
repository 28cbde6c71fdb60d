"""Whatever is asked for is refused in one sentence, or planned so that files, commands and manifest agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trtllm_samples import checkpoint, request

from kvtool.engine.trtllm.build import describe, plan
from kvtool.engine.trtllm.bundle import CONNECTOR_FILE, LLM_FILE
from kvtool.engine.trtllm.files import BUILD_FILE
from kvtool.engine.trtllm.gpus import GPUS
from kvtool.engine.trtllm.version import KNOWN
from kvtool.errors import Refused

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM")
ASKED = st.fixed_dictionaries(
    {
        "backend": st.sampled_from(["pytorch", "tensorrt"]),
        "gpu": st.sampled_from([*sorted(GPUS), "h200", "b200", "b200"]),
        "kv_dtype": st.sampled_from(["bfloat16", "bfloat16", "float16", "fp8", "fp8", "int8"]),
        "quantisation": st.sampled_from(["none"] * 6 + ["fp8", "nvfp4", "w4a16_awq", "fp8_block_scales"]),
        "tensor_parallel": st.sampled_from([1, 2, 4, 8, 1, 2, 4, 3]),
        "pipeline_parallel": st.sampled_from([1, 1, 2]),
        "expert_parallel": st.sampled_from([1, 1, 1, 1, 2, 4]),
        "max_batch_size": st.sampled_from([1, 8, 8, 64]),
        "max_num_tokens": st.sampled_from([128, 256, 256, 512, 100]),
        "max_seq_len": st.sampled_from([64, 256, 512, 512, 1024]),
        "block_reuse": st.booleans(),
    }
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    return {family: checkpoint(folder / family, family, **sizes) for family in FAMILIES}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=ASKED,
    family=st.sampled_from(FAMILIES),
    version=st.sampled_from([*KNOWN, "1.1.0", "1.2.0", "1.2.1", "1.2.1"]),
    tokens=st.sampled_from([16, 32, 64, 128, 32, 64, 24]),
)
def test_plans_agree_with_themselves(
    sources: dict[str, Path], wanted: dict[str, Any], family: str, version: str, tokens: int
) -> None:
    changes = [f"{key}={json.dumps(value)}" for key, value in wanted.items()]
    try:
        todo = plan(request(sources[family], *changes, version=version, block_tokens=tokens), Path("/out"))
    except Refused as refusal:
        assert "\n" not in str(refusal) and len(str(refusal)) > 20
        return
    manifest = describe(todo.request, "id", {}, {})
    fields = manifest.tensorrt_llm
    assert fields is not None and fields.world_size == wanted["tensor_parallel"] * wanted["pipeline_parallel"]
    assert manifest.layout.block_tokens == tokens and manifest.layout.block_size > 0
    if wanted["backend"] == "tensorrt":
        built = json.loads(todo.texts[BUILD_FILE])
        assert built["plugin_config"]["tokens_per_block"] == tokens
        assert built["max_num_tokens"] == fields.max_num_tokens
        last = todo.commands[-1]
        assert last.argv[0] == "trtllm-build" and last.ranks == fields.world_size and len(todo.commands) == 2
        converted = todo.commands[0].argv
        assert converted[converted.index("--tp_size") + 1] == str(fields.tensor_parallel)
        quantised = wanted["quantisation"] != "none" or wanted["kv_dtype"] in ("fp8", "int8")
        assert ("quantize.py" in converted[1]) == quantised
        return
    llm, connector = (yaml.safe_load(todo.texts[name]) for name in (LLM_FILE, CONNECTOR_FILE))
    assert llm["kv_cache_config"]["tokens_per_block"] == tokens == connector["kv"]["block_tokens"]
    assert llm["tensor_parallel_size"] == fields.tensor_parallel == connector["tensor_parallel"]
    assert (llm["kv_cache_config"]["dtype"] == "fp8") == (manifest.kv.dtype == "float8_e4m3fn")
    assert (manifest.kv.kv_factor == 1) == (family == "DeepseekV3ForCausalLM")
    assert connector["kv"] == manifest.kv.model_dump() and connector["model_digest"] == manifest.model_digest


def test_both_kinds_of_plan_are_met(sources: dict[str, Path]) -> None:
    """The property above must not hold by refusing everything."""
    assert plan(request(sources["LlamaForCausalLM"], "tensor_parallel=4"), Path("/out")).texts.keys() >= {LLM_FILE}
    assert plan(request(sources["Qwen2ForCausalLM"], "backend=tensorrt", "tensor_parallel=8"), Path("/out")).commands
