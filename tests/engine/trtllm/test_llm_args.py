"""What a worker passes to tensorrt_llm.LLM, in each role and version, and what is refused before it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from trtllm_samples import checkpoint, request

from kvtool.engine.trtllm.build import build
from kvtool.engine.trtllm.bundle import Bundle, read_bundle
from kvtool.engine.trtllm.llm_args import Transceiver, llm_args, transfer_timeout_s
from kvtool.engine.trtllm.signatures import check_keywords
from kvtool.engine.trtllm.version import KNOWN
from kvtool.errors import EngineRefused

NIXL = Transceiver("NIXL", buffer_tokens=512, timeout_s=12.5)


def made(tmp_path: Path, *changes: str, version: str = "1.2.1", family: str = "LlamaForCausalLM") -> Bundle:
    return read_bundle(
        build(request(checkpoint(tmp_path / "m", family), *changes, version=version), tmp_path / "o").directory
    )


@pytest.mark.parametrize("version", KNOWN)
def test_every_role_and_hand_off_of_every_version_is_in_its_signature(tmp_path: Path, version: str) -> None:
    """Each answer is plain YAML and passes the check that the worker makes again."""
    bundle, count = made(tmp_path, version=version, family="MixtralForCausalLM"), 0
    for role in ("prefill", "decode", "both"):
        for transceiver, connector in ((None, True), (None, False), (NIXL, False), (NIXL, True)):
            for graphs in (True, False):
                try:
                    args = llm_args(
                        bundle, role=role, transceiver=transceiver, connector=connector, cuda_graphs=graphs,
                        host_cache_size=1 << 30, memory_fraction=0.5, max_batch_size=4,
                    )  # fmt: skip
                except EngineRefused as refusal:
                    why = str(refusal)
                    assert ("CUDA graphs" in why and version < "1.2") or (
                        "beside a connector" in why and version < "1.3"
                    )
                    continue
                count += 1
                assert yaml.safe_load(yaml.safe_dump(args)) == args
                check_keywords("LLM", args, version, "again")
                assert args["kv_cache_config"]["free_gpu_memory_fraction"] == 0.5
                assert args["kv_cache_config"]["host_cache_size"] == 1 << 30 and args["max_batch_size"] == 4
                assert ("kv_connector_config" in args) == connector
                assert ("cache_transceiver_config" in args) == (transceiver is not None)
                assert args.get("disable_overlap_scheduler", False) == (role == "prefill" and transceiver is not None)
                assert (args["cuda_graph_config"] is not None) == (graphs and role != "prefill")
    assert count >= 14


def test_connector_comes_with_what_it_needs(tmp_path: Path) -> None:
    args = llm_args(made(tmp_path), role="both")
    assert args["kv_connector_config"] == {
        "connector_module": "kvtool_trtllm.connector",
        "connector_scheduler_class": "KvtoolConnectorScheduler",
        "connector_worker_class": "KvtoolConnectorWorker",
    }
    assert args["scheduler_config"] == {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"}
    assert args["kv_cache_config"]["enable_partial_reuse"] is False
    assert args["skip_tokenizer_init"] is True and "tokenizer" not in args
    assert llm_args(made(tmp_path), role="both", tokenizer=True)["tokenizer"] == str(tmp_path / "o")
    assert args["kv_cache_config"]["free_gpu_memory_fraction"] == 0.85, "the bundle's own"


def test_arguments_of_one_role_do_not_leak_into_another(tmp_path: Path) -> None:
    bundle = made(tmp_path)
    before = yaml.safe_dump(bundle.llm)
    llm_args(bundle, role="decode", memory_fraction=0.3, host_cache_size=5)
    assert yaml.safe_dump(bundle.llm) == before


def test_transceiver_is_spelled_out(tmp_path: Path) -> None:
    bundle = made(tmp_path, version="1.4.0rc1")
    chosen = Transceiver("UCX", 1024, 0.2, "PYTHON")
    assert llm_args(bundle, role="decode", transceiver=chosen)["cache_transceiver_config"] == {
        "backend": "UCX",
        "max_tokens_in_buffer": 1024,
        "kv_transfer_timeout_ms": 200,
        "transceiver_runtime": "PYTHON",
    }
    assert transfer_timeout_s(bundle, 25e9) == 10.0
    size = 512 * bundle.manifest.layout.token_size
    assert transfer_timeout_s(bundle, size, floor_s=1.0) == 10.0, "ten times one second"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"transceiver": NIXL}, r"no cache transceiver beside a connector .*; 1\.3\.0rc15 can"),
        ({"transceiver": Transceiver("nixl", 512, 1), "connector": False}, "wanted one of NIXL, UCX, found 'nixl'"),
        ({"transceiver": Transceiver("DEFAULT", 512, 1), "connector": False}, "found 'DEFAULT'"),
        (
            {"transceiver": Transceiver("NIXL", 256, 1), "connector": False},
            r"buffer_tokens: wanted a multiple of tokens_per_block \(32\) and at least max_seq_len \(512\), found 256",
        ),
        ({"transceiver": Transceiver("NIXL", 520, 1), "connector": False}, "found 520; 512 fits"),
        ({"transceiver": Transceiver("NIXL", 512, 0), "connector": False}, "timeout: wanted more than 0 s"),
        (
            {"transceiver": Transceiver("NIXL", 512, 1, "PYTHON"), "connector": False},
            r"transceiver\.runtime: found 'PYTHON', this version takes none; 1\.3\.0rc15 can",
        ),
        ({"memory_fraction": 1.0}, "memory_fraction: wanted more than 0 and less than 1, found 1"),
        ({"max_batch_size": 0}, r"max_batch_size: wanted 1 to max_num_tokens \(256\), found 0"),
        ({"version": "1.4.0rc1"}, r"to run on 1\.4\.0rc1 \(pytorch-1\.3\); build it again with --tensorrt-llm-version"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, wanted: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        llm_args(made(tmp_path), role="decode", **wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [("pipeline_parallel=2", "pipeline parallelism 2"), ("context_parallel=2", "context parallelism 2")],
)
def test_connector_is_refused_where_tensorrt_llm_has_none(tmp_path: Path, change: str, words: str) -> None:
    bundle = made(tmp_path, change)
    with pytest.raises(EngineRefused, match=f"{words} with the KV-offload connector"):
        llm_args(bundle, role="both")
    assert llm_args(bundle, role="both", connector=False)


def test_attention_data_parallelism_wants_a_later_version(tmp_path: Path) -> None:
    for version, words in (("1.3.0rc22", "no connector under attention"), ("1.4.0rc1", "exclude each other")):
        bundle = made(tmp_path / version, version=version)
        bundle.llm["enable_attention_dp"] = True
        with pytest.raises(EngineRefused, match=words):
            llm_args(bundle, role="both", host_cache_size=1)
    assert llm_args(bundle, role="both")["enable_attention_dp"]


def test_hand_made_arguments_are_checked_too(tmp_path: Path) -> None:
    bundle = made(tmp_path)
    bundle.llm["kv_cache_config"]["disk_cache_size"] = 1
    with pytest.raises(EngineRefused, match=r"llm\.yaml \(both\): kv_cache_config: disk_cache_size: .* 1\.3\.0rc27"):
        llm_args(bundle, role="both")
