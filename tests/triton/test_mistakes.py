# ruff: noqa: E501 (one line for each mistake)
"""Mistakes that users of such systems made, each made here in a deployment that is right: refused, with the key named.

The last column is where people met it: TRT-LLM is NVIDIA/TensorRT-LLM, tb its Triton backend, docs the reference of it.
"""

from __future__ import annotations

import pytest
from bundles import sealed
from gpu_specs import SPECS, Case, make_engines

from kvtool.cli.main import main

T = "tensorrt_llm."
X = "cache_transceiver_config"


def spec(key, value):
    return lambda case: case.put(key, value)


def built(engine, key, value):
    return lambda case: case.built(engine, key, value)


def file(engine, name, key, value):
    return lambda case: case.file(engine, name, key, value)


def rendered(role, name, key, value):
    return lambda case: case.rendered_key(role, name, key, value)


def text(model, old, new):
    return lambda case: case.rendered_text(model, lambda before: before.replace(old, new))


def raw(path, words):
    def change(case):
        (case.folder / path).write_text(words)
        sealed((case.folder / path).parent)

    return change


def without(model, word):
    """Take out the lines of a model's configuration that have `word` in them."""
    return lambda case: case.rendered_text(
        model, lambda before: "".join(line for line in before.splitlines(True) if word not in line)
    )


def both(*changes):
    def change(case):
        for each in changes:
            each(case)

    return change


MISTAKES = [
    # base, what is changed, the key that the sentence names, words of the sentence, where it was met
    ("direct", spec(T + "transceiver.buffer_tokens", 256), T + "transceiver.buffer_tokens", "at least the longest", "TRT-LLM PR 9782"),
    ("direct", spec(T + "transceiver.buffer_tokens", 520), T + "transceiver.buffer_tokens", "multiple of tokens_per_block", "dynamo PR 5523"),
    ("direct", spec(T + "transceiver.timeout", "10ms"), T + "transceiver.timeout", "wanted at least", "TRT-LLM PR 15152"),
    ("direct", spec(T + "transceiver.bandwidth", 0), T + "transceiver.bandwidth", "bytes a second", "TRT-LLM PR 15152"),
    ("direct", spec(T + "transceiver.backend", "DEFAULT"), T + "transceiver.backend", "'NIXL' or 'UCX'", "docs: kv-transfer"),
    ("direct", spec(T + "transceiver.backend", "MPI"), T + "transceiver.backend", "'NIXL' or 'UCX'", "docs: kv-transfer"),
    ("direct", spec(T + "transceiver.runtime", "PYTHON"), T + "transceiver.runtime", "1.2.1", "docs: kv-transfer"),
    ("direct", spec(T + "connector", True), T + "connector", "beside a transceiver", "docs: connector with transceiver"),
    ("direct", rendered("decode", "llm.yaml", f"{X}.max_tokens_in_buffer", 1024), f"{X}.max_tokens_in_buffer", "what prefill has, 512", "TRT-LLM PR 9782"),
    ("direct", rendered("decode", "llm.yaml", f"{X}.max_tokens_in_buffer", 128), f"{X}.max_tokens_in_buffer", "found 128", "dynamo PR 5523"),
    ("direct", rendered("prefill", "llm.yaml", f"{X}.kv_transfer_timeout_ms", 10), f"{X}.kv_transfer_timeout_ms", "wanted at least", "TRT-LLM PR 15152"),
    ("direct", rendered("decode", "llm.yaml", f"{X}.backend", "DEFAULT"), f"{X}.backend", "said outright", "docs: kv-transfer"),
    ("direct", rendered("decode", "llm.yaml", f"{X}.backend", "NIXL"), f"{X}.backend", "what prefill has, 'UCX'", "docs: kv-transfer"),
    ("direct", rendered("decode", "llm.yaml", X, None), X, "wanted one with handoff: transceiver", "dynamo 6678"),
    ("direct", rendered("prefill", "llm.yaml", "disable_overlap_scheduler", False), "disable_overlap_scheduler", "wanted true", "docs: disaggregated serving"),
    ("pool", rendered("decode", "llm.yaml", X, {"backend": "UCX", "max_tokens_in_buffer": 512, "kv_transfer_timeout_ms": 60000}), X, "beside a connector", "docs: connector with transceiver"),
    ("pool", rendered("decode", "llm.yaml", "kv_connector_config", None), "kv_connector_config", "wanted kvtool's", "llm-d-router 2274"),
    ("pool", built("decode", "kv.block_tokens", 32), T + "decode.engine", "tokens_per_block: prefill (prefill) has 16", "TRT-LLM 14882"),
    ("pool", rendered("decode", "llm.yaml", "kv_cache_config.tokens_per_block", 64), "kv_cache_config.tokens_per_block", "found 64", "TRT-LLM PR 15522, 15005"),
    ("pool", built("decode", "kv.dtype", "float8_e4m3fn"), T + "decode.engine", "kv dtype", "TRT-LLM 2699"),
    ("pool", rendered("decode", "llm.yaml", "kv_cache_config.dtype", "fp8"), "kv_cache_config.dtype", "found 'fp8'", "TRT-LLM 2699"),
    ("pool", built("decode", "model_digest", "f" * 64), T + "decode.engine", "model_digest", "lmdeploy 4930"),
    ("pool", rendered("decode", "connector.yaml", "model_digest", "f" * 64), "connector.yaml: model_digest", "wanted", "lmdeploy 4930"),
    ("pool", rendered("decode", "connector.yaml", "namespace", "other"), "connector.yaml: namespace", "would never meet", "LMCache 1728"),
    ("pool", rendered("decode", "connector.yaml", "numerics", "pytorch-1.2/sm_80/none/bfloat16"), "connector.yaml: numerics", "sm_90", "TRT-LLM 15503"),
    ("pool", both(built("decode", "tensorrt_llm.tensor_parallel", 3), spec(T + "decode.gpus", [[1, 2, 3]])), T + "decode.engine", "stored_parallel", "TRT-LLM 6507"),
    ("pool", rendered("decode", "connector.yaml", "stored_parallel", 2), "connector.yaml: stored_parallel", "what prefill has, 1", "TRT-LLM 6507"),
    ("pool", built("prefill", "tensorrt_llm.pipeline_parallel", 2), "engine", "pipeline_parallel: wanted 1 with the connector", "docs: connector limits"),
    ("pool", built("decode", "tensorrt_llm.max_beam_width", 4), T + "decode.engine", "max_beam_width", "docs: connector limits"),
    ("pool", built("prefill", "tensorrt_llm.block_reuse", False), T + "prefill.engine", "block_reuse", "TRT-LLM 2462, 2894"),
    ("pool", built("decode", "tensorrt_llm.max_seq_len", 256), T + "decode.engine", "max_seq_len: wanted at least prefill's 512", "TRT-LLM PR 9782"),
    ("pool", built("decode", "tensorrt_llm.max_num_tokens", 500), T + "decode.engine", "multiple of tokens_per_block", "TRT-LLM 1687"),
    ("pool", spec(T + "prefill.memory_fraction", 0.000001), T + "prefill.memory_fraction", "room for one sequence", "TRT-LLM 1687"),
    ("pool", spec(T + "version", "2.0.0"), T + "version", "kvtool drives 1.1 to 1.4", "TRT-LLM 1038"),
    ("pool", spec(T + "version", "1.3.0rc27"), T + "version", "built for TensorRT-LLM 1.2.1", "TRT-LLM 1038"),
    ("pool", spec(T + "launch.gpu", "a100-80gb"), T + "launch.gpu_arch", "built for sm_90, the GPUs are sm_80", "server 8462"),
    ("pool", spec(T + "launch.gpu", "tpu"), T + "launch.gpu", "wanted one of", "server 8462"),
    ("engine", spec(T + "version", "1.2.0"), T + "version", "only in the release that built it", "tb 531"),
    ("engine", spec(T + "version", "1.3.0rc27"), T + "version", "removed in 1.3", "TRT-LLM 15907"),
    ("engine", spec(T + "launch.tensorrt_version", "10.13.0"), T + "launch.tensorrt_version", "bound to the exact TensorRT", "tb 424, 235"),
    ("engine", spec(T + "connector", True), T + "connector", "KV cache connector", "docs: connector"),
    ("engine", raw("engine/config.json", "{not json"), "config.json", "found something else", "tb 61"),
    ("engine", file("engine", "config.json", "build_config", None), "config.json: pretrained_config, build_config", "wanted both", "tb 61"),
    ("engine", file("engine", "config.json", "build_config.plugin_config.use_paged_context_fmha", False), "plugin_config.use_paged_context_fmha", "block reuse needs it", "TRT-LLM 2462, 2894"),
    ("engine", file("engine", "config.json", "build_config.plugin_config.tokens_per_block", 64), "plugin_config.tokens_per_block", "wanted 16", "TRT-LLM 14882"),
    ("engine", file("engine", "config.json", "pretrained_config.mapping.tp_size", 4), "mapping.tp_size", "found 4", "tb 61"),
    ("engine", built("engine", "plugins", ["/opt/scale.py"]), "engine.json: plugins", "crashes the C++ runtime", "TRT-LLM 2265"),
    ("engine", spec(T + "decode.max_batch_size", 64), T + "decode.max_batch_size", "built for (8)", "docs: engine limits"),
    ("pool", built("prefill", "schema_version", 9), "engine", "engine schema 9", "LMCache 2279"),
    ("pool", raw("decode/llm.yaml", "- 1\n"), "llm.yaml", "wanted a table", "tb 61"),
    ("pool", rendered("decode", "llm.yaml", "kv_cache_config.enable_partial_reuse", True), "kv_cache_config.enable_partial_reuse", "wanted false with a connector", "TRT-LLM 8274"),
    ("pool", file("decode", "llm.yaml", "kv_cache_config.tokens_per_blok", 16), "llm.yaml", "tokens_per_blok", "docs: PluginConfig ignores typos"),
    ("pool", file("decode", "llm.yaml", "kv_cache_config.event_buffer_max_size", 1024), "", "", "unchanged"),
    ("pool", both(built("decode", "tensorrt_llm.block_reuse", False), file("decode", "llm.yaml", "kv_cache_config", {"event_buffer_max_size": 8, "enable_block_reuse": False, "tokens_per_block": 16, "dtype": "auto"})), "kv_cache_config.event_buffer_max_size", "events are of blocks", "TRT-LLM 3857"),
    ("pool", spec(T + "decode.gpus", [[0]]), T + "decode.gpus[0]", "GPU 0 of node 0 is also in tensorrt_llm.prefill.gpus[0]", "docs: gpu_device_ids"),
    ("pool", both(spec(T + "decode.gpus", [[0]]), spec(T + "decode.memory_fraction", 0.7), spec(T + "prefill.memory_fraction", 0.6)), T + "decode.memory_fraction", "found 1.30", "TRT-LLM 13693"),
    ("pool", both(spec("decode.instances", 2), spec(T + "decode.gpus", [[1], [1]])), T + "decode.gpus[1]", "instances of one role", "docs: gpu_device_ids"),
    ("pool", spec(T + "decode.gpus", [[8]]), T + "decode.gpus[0]", "ids from 0 to 7", "docs: gpu_device_ids"),
    ("pool", spec(T + "decode.gpus", [[1, 2]]), T + "decode.gpus[0]", "wanted 1 GPUs, the world size", "docs: world size"),
    ("pool", spec("decode.instances", 2), T + "decode.gpus", "wanted GPU ids for each of 2 instances", "docs: num_instances"),
    ("pool", spec(T + "decode.nodes", [3]), T + "decode.nodes", "wanted 0 to 0", "docs: world size"),
    ("pool", both(spec(T + "prefill.urls", ["h:8001", "h:8002"]), spec(T + "decode.urls", ["h:8003"])), T + "prefill.urls", "wanted one for each of 1 instances", "docs: len(urls) and num_instances"),
    ("pool", spec(T + "prefill.urls", ["h:8001"]), T + "decode.urls", "as tensorrt_llm.prefill has them", "docs: urls"),
    ("pool", both(spec(T + "prefill.urls", ["h:8001"]), spec(T + "decode.urls", ["h:8001"])), T + "decode.urls", "already", "Mooncake 180"),
    ("pool", both(spec(T + "prefill.urls", ["http://h:1/x"]), spec(T + "decode.urls", ["h:8001"])), T + "prefill.urls", "HOST:PORT", "docs: urls"),
    ("pool", both(spec(T + "launch.nodes", 2), spec(T + "prefill.urls", ["localhost:8001"]), spec(T + "decode.urls", ["h:8001"])), T + "prefill.urls", "loopback", "dynamo 5884"),
    ("pool", both(spec(T + "launch.nodes", 2), spec(T + "decode.env", {"UCX_NET_DEVICES": "lo"})), T + "decode.env.UCX_NET_DEVICES", "loopback", "dynamo 5884"),
    ("pool", spec(T + "decode.env", {"UCX_TLS": "tcp,sm"}), T + "decode.env.UCX_TLS", "wanted cuda_copy", "LMCache 605"),
    ("pool", spec(T + "decode.env", {"UCX_TLS": "rc,cuda_copy"}), T + "decode.env.UCX_TLS", "wanted tcp", "nixl 149"),
    ("pool", spec(T + "decode.env", {"UCX_TLS": "^cuda_copy"}), T + "decode.env.UCX_TLS", "wanted cuda_copy", "LMCache 605"),
    ("direct", spec(T + "decode.env", {"TRTLLM_NIXL_KVCACHE_BACKEND": "LIBFABRIC"}), T + "decode.env.TRTLLM_NIXL_KVCACHE_BACKEND", "prefill has None", "TRT-LLM 9752"),
    ("pool", spec(T + "decode.env", {"OMPI_COMM_WORLD_RANK": "0"}), T + "decode.env.OMPI_COMM_WORLD_RANK", "and hang", "TRT-LLM 2172, 2286, 2405"),
    ("pool", spec(T + "decode.env", {"CUDA_VISIBLE_DEVICES": "3"}), T + "decode.env.CUDA_VISIBLE_DEVICES", "kvtool sets", "docs: visible devices"),
    ("direct", spec(T + "decode.env", {"TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE": "1GB"}), "TRTLLM_KVCACHE_TRANSFER_BUFFER_SIZE", "kvtool sets", "TRT-LLM PR 9782"),
    ("pool", spec(T + "decode.env", {"HF_TOKEN": "x"}), T + "decode.env.HF_TOKEN", "looks like a secret", "CVE-2025-46570"),
    ("pool", spec(T + "prefill.host_cache_size", "5GiB"), T + "prefill.host_cache_size", "node_memory is 4.0 GiB", "TRT-LLM PR 16106, 13693"),
    ("pool", spec("pool.dram_size", "3GiB"), "pool.dram_size", "node_memory is 4.0 GiB", "LMCache 1454, 4664"),
    ("pool", spec(T + "prefill.host_cache_size", 64), T + "prefill.host_cache_size", "less than one block", "TRT-LLM PR 16106"),
    ("pool", spec("pool.dram_size", "8KiB"), "pool.dram_size", "set at least", "Mooncake 3331"),
    ("pool", both(spec("pool.enabled", False)), "pool.enabled", "wanted true with tensorrt_llm.handoff: pool", "dynamo 11194"),
    ("pool", spec(T + "connector", False), T + "connector", "wanted true with handoff: pool", "dynamo 11194"),
    ("pool", spec("target", "torch"), "tensorrt_llm", "target is torch", "dynamo 13238"),
    ("pool", text("decode/decode_engine", "decoupled: true", "decoupled: false"), "model_transaction_policy.decoupled", "wanted true", "docs: decoupled along the chain"),
    ("pool", text("front/kvtool", "decoupled: true", "decoupled: false"), "model_transaction_policy.decoupled", "wanted true", "docs: decoupled along the chain"),
    ("pool", text("decode/decode_engine", 'string_value: "1"', 'string_value: "${gpus}"'), "config.pbtxt", "was not filled", "docs: safe_substitute"),
    ("pool", text("decode/decode", 'model_name: "decode_engine"', 'model_name: "decode_engin"'), "ensemble_scheduling", "no model of this repository", "docs: templates"),
    ("engine", without("decode/context", "enable_kv_cache_reuse"), "parameters.enable_kv_cache_reuse", "cache metrics are missing", "tb 645"),
    ("engine", text("decode/generation", 'participant_ids" value: { string_value: "2', 'participant_ids" value: { string_value: "0'), "parameters.participant_ids", "rank 0 is the orchestrator", "tb 653"),
    ("engine", text("decode/context", 'participant_ids" value: { string_value: "1', 'participant_ids" value: { string_value: "1,2'), "parameters.participant_ids", "for each of 1 GPUs", "tb 653"),
    ("engine", text("decode/generation", "decoupled: true", "decoupled: false"), "model_transaction_policy.decoupled", "wanted true", "docs: decoupled along the chain"),
    ("pool", text("decode/decode_engine", "backend:", "backend"), "config.pbtxt", "wanted a model configuration", "tb 61"),
]  # fmt: skip


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    return make_engines(tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("base", list(SPECS))
def test_what_is_right_is_not_refused(engines, tmp_path, capsys, base):
    assert Case(engines, tmp_path, base).faults(capsys) == (0, [])


@pytest.mark.parametrize("base", ["pool", "direct"])
def test_rendered_repositories_that_are_right_are_not_refused(engines, tmp_path, capsys, base):
    case = Case(engines, tmp_path, base)
    case.render()
    assert case.faults(capsys) == (0, [])


def test_host_caches_are_held_against_the_memory_of_the_host_that_starts_them(engines, tmp_path, capsys):
    """TRT-LLM PR 16106, 13693: host tiers beyond the control group end in a kill."""
    case = Case(engines, tmp_path, "pool")
    case.put("tensorrt_llm.launch.node_memory", None)
    case.put("tensorrt_llm.decode.host_cache_size", "900TiB")
    assert case.faults(capsys) == (0, []), "on another host it may fit"
    assert main(["deploy", "up", str(case.path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "host caches of all instances, and the pool: wanted 900.0 TiB" in said and "lower tensorrt_llm.*" in said


@pytest.mark.parametrize(("base", "change", "key", "words", "met"), MISTAKES)
def test_a_mistake_is_refused_by_name(engines, tmp_path, capsys, base, change, key, words, met):
    case = Case(engines, tmp_path, base)
    change(case)
    code, faults = case.faults(capsys)
    if met == "unchanged":
        assert (code, faults) == (0, [])
        return
    told = [fault for fault in faults if key in fault["key"] and words in fault["says"]]
    assert code == 1 and told, f"{met}: {faults}"
