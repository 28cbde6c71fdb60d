"""Recorded signatures: which keywords a version takes, and how a wrong one is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvtool.engine.trtllm.annotation import fits, nested_class
from kvtool.engine.trtllm.signatures import api, check_flags, check_keywords, fields, flags, parameters
from kvtool.engine.trtllm.version import KNOWN
from kvtool.errors import EngineRefused

CLASSES = [name for name, entry in api().items() if isinstance(entry.get("fields"), list) and "kind" in entry]


def test_fields_follow_the_version() -> None:
    def has(name: str, field: str) -> str:
        """Y or n for each known version; a dot where the class is not."""
        out = ""
        for version in KNOWN:
            try:
                out += "Y" if field in fields(name, version) else "n"
            except EngineRefused:
                out += "."
        return out

    #                                                              1.1 1.2.0 1.2.1 rc15 rc22 rc27 rc29 1.4
    assert has("KvCacheConfig", "onboard_blocks") == "YYYnnnnn"
    assert has("KvCacheConfig", "disk_cache_size") == "nnnnnYYY"
    assert has("KvCacheConfig", "disk_write_through") == "nnnnnnnY"
    assert has("CacheTransceiverConfig", "transceiver_runtime") == "nnnYYYYY"
    assert has("CacheTransceiverConfig", "kv_transfer_sender_future_timeout_ms") == "nYYYYYYY"
    assert has("KvCacheConnectorConfig", "connector") == "nnnYYYYY"
    assert has("BuildConfig", "auto_parallel_config") == "Ynn....."
    assert has("PluginConfig", "tokens_per_block") == "YYY....."
    assert has("DisaggregatedParams", "schedule_style") == "nnnYYYYY"
    assert has("LLM", "kv_connector_config") == "YYYYYYYY"


def test_defaults_follow_the_version() -> None:
    runtime = {v: fields("CacheTransceiverConfig", v)["transceiver_runtime"].default for v in KNOWN[3:]}
    assert list(runtime.values()) == [None, None, "auto", "auto", "PYTHON"]
    assert fields("CacheTransceiverConfig", "1.2.1")["kv_transfer_timeout_ms"].default is None
    assert fields("CacheTransceiverConfig", "1.3.0rc27")["kv_transfer_timeout_ms"].default == 60000
    assert fields("KvCacheConnectorConfig", "1.2.1")["connector_module"].required
    assert not fields("KvCacheConnectorConfig", "1.3.0rc22")["connector_module"].required
    assert fields("LLM", "1.2.1")["kv_cache_config"].default == "KvCacheConfig()"


@pytest.mark.parametrize(
    ("name", "version", "mapping", "words"),
    [
        ("KvCacheConfig", "1.2.1", {"token_per_block": 32}, r"here: token_per_block: .*mean tokens_per_block"),
        (
            "KvCacheConfig",
            "1.2.1",
            {"disk_cache_size": 1},
            r"keyword; 1\.3\.0rc27, 1\.3\.0rc29, 1\.4\.0rc1 have",
        ),
        ("KvCacheConfig", "1.2.1", {"tokens_per_block": "32"}, "tokens_per_block: wanted int, found '32'"),
        ("KvCacheConfig", "1.2.1", {"tokens_per_block": True}, "wanted int, found True"),
        ("KvCacheConfig", "1.2.1", {"free_gpu_memory_fraction": 1.5}, "wanted 0 to 1, found 1.5"),
        ("KvCacheConfig", "1.2.1", {"max_attention_window": [128, 0]}, "max_attention_window: wanted"),
        ("CacheTransceiverConfig", "1.2.1", {"backend": "nixl"}, "backend: wanted .*NIXL.*found 'nixl'"),
        ("CacheTransceiverConfig", "1.2.1", {"transceiver_runtime": "PYTHON"}, "no such keyword; 1.3.0rc15"),
        ("KvCacheConnectorConfig", "1.2.1", {"connector_module": "m"}, "connector_scheduler_class is missing"),
        ("KvCacheConnectorConfig", "1.4.0rc1", {"connector": "redis"}, "wanted one of lmcache"),
        ("PluginConfig", "1.2.1", {"paged_context_fmha": True}, "did you mean use_paged_context_fmha"),
        ("PluginConfig", "1.3.0rc22", {}, "not in TensorRT-LLM 1.3.0rc22"),
        ("NoSuchConfig", "1.2.1", {}, "no such class is recorded"),
        ("LLM", "1.2.1", {"model": "m", "kv_cache_config": {"dtyp": "fp8"}}, "here: kv_cache_config: dtyp: .*dtype"),
        ("LLM", "1.2.1", {"model": "m", "kv_cache_config": 3}, "kv_cache_config: wanted KvCacheConfig, found 3"),
        ("LLM", "1.2.1", {}, "model is missing"),
        ("KVEventsConfig", "1.4.0rc1", {"a": 1}, "not recorded"),
    ],
)
def test_wrong_keywords_are_refused_by_name(name: str, version: str, mapping: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        check_keywords(name, mapping, version, "here")


@pytest.mark.parametrize("version", KNOWN)
def test_every_default_is_accepted(version: str) -> None:
    """A recorded default must pass the check of its own class, else the check refuses what TensorRT-LLM takes."""
    checked = 0
    for name in CLASSES:
        try:
            known = fields(name, version)
        except EngineRefused:
            continue
        made = {key: "x" for key, field in known.items() if field.required and field.annotation in ("str", None)}
        made |= {
            key: field.default
            for key, field in known.items()
            if not field.required and not str(field.default).endswith("()")
        }
        if all(key in made for key, field in known.items() if field.required):
            check_keywords(name, made, version, name)
            checked += 1
    assert checked >= 4


def test_every_keyword_with_a_letter_dropped_is_refused() -> None:
    for name, version in itertools.product(("KvCacheConfig", "PluginConfig", "BuildConfig"), ("1.2.1",)):
        known = fields(name, version)
        for key in known:
            for at in range(len(key)):
                typo = key[:at] + key[at + 1 :]
                if typo not in known:
                    with pytest.raises(EngineRefused, match=typo):
                        check_keywords(name, {typo: known[key].default}, version, "here")


def test_methods_and_flags() -> None:
    assert "cache_salt" in parameters("LLM", "generate_async", "1.2.1")
    assert list(parameters("KvCacheConnectorWorker", "get_finished", "1.2.1"))
    assert {"--config", "--extra_llm_api_options"} <= flags("trtllm-serve serve", "1.4.0rc1")
    check_flags("trtllm-build", ["--checkpoint_dir", "c", "--workers=2", "-1"], "1.2.1")
    with pytest.raises(EngineRefused, match=r"--check_point_dir is no flag of TensorRT-LLM 1\.2\.1; did you mean --ch"):
        check_flags("trtllm-build", ["--check_point_dir", "c"], "1.2.1")
    with pytest.raises(EngineRefused, match=r"trtllm-build: not in TensorRT-LLM 1\.3\.0rc0"):
        flags("trtllm-build", "1.3.0rc0")


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        ("Optional[int]", [None, 3], ["3", 3.0, True]),
        ("int | None", [None, 3], ["3"]),
        ("float", [1, 1.5], ["1", True, None]),
        ("Union[bool, 'auto']", [True, "auto"], ["on", 1.5]),
        ("Optional[str or List[str]]", [None, "a", ["a"]], [3, [3]]),
        ("Optional[Dict[str, str]]", [None, {"a": "b"}], [{"a": 1}, []]),
        ("Optional[Literal['CPP','PYTHON']]", [None, "CPP"], ["cpp", 1]),
        ("Union[str, Path]", ["x"], [1, None]),
        ("{num_instances, urls}", [{"a": 1}, 3], []),
        ("trt.IHostMemory", ["any"], [None]),
        (None, [object()], []),
    ],
)
def test_values_fit_their_annotation(annotation: str | None, right: list[Any], wrong: list[Any]) -> None:
    assert all(fits(annotation, value) for value in right)
    assert not any(fits(annotation, value) for value in wrong)


def test_class_within_an_annotation() -> None:
    assert nested_class("Optional[KvCacheConfig]") == "KvCacheConfig"
    assert nested_class("Optional[List[int]]") is None and nested_class(None) is None
