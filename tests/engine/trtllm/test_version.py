"""Which versions there are, in which order, and what each can do."""

from __future__ import annotations

import itertools
from importlib import metadata

import pytest

from kvtool.engine.trtllm import version as versions
from kvtool.engine.trtllm.release import first_of_series, parse_release
from kvtool.engine.trtllm.version import KNOWN, Adapter, adapter_for, can, engine_builder_here
from kvtool.errors import EngineRefused

ORDER = """
1.1.0rc0 1.1.0 1.2.0.dev1 1.2.0a1 1.2.0b1 1.2.0rc1 1.2.0rc8 1.2.0rc8.post1 1.2.0rc10 1.2.0 1.2.0.post1 1.2.1 1.3.0rc0
1.3.0rc15 1.3.0rc22 1.3.0rc22.post1 1.3.0 1.4.0rc1 1.4.0 1.10.0
""".split()  # noqa: SIM905 - read better than twenty quotes


def test_releases_are_in_order() -> None:
    for earlier, later in itertools.combinations(ORDER, 2):
        assert parse_release(earlier) < parse_release(later), (earlier, later)
    assert parse_release("1.2.1+cu130") == parse_release("v1.2.1") == parse_release(" 1.2.1 ")
    assert parse_release("1.2") == parse_release("1.2.0") != first_of_series("1.2") < parse_release("1.2.0rc0")
    assert sorted(KNOWN, key=parse_release) == list(KNOWN)


@pytest.mark.parametrize("text", ["", "latest", "1", "1.2.x", "1.2.1 or later", "2!1.2.0", "1.2.0rc8foo"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(EngineRefused, match=r"wanted one such as 1\.2\.1"):
        parse_release(text)


@pytest.mark.parametrize(
    ("version", "backend", "adapter"),
    [
        ("1.1.0", "pytorch", Adapter.PYTORCH_1_2),
        ("1.2.1", "pytorch", Adapter.PYTORCH_1_2),
        ("1.2.1", "tensorrt", Adapter.ENGINE_1_2),
        ("1.2.2.post1", "tensorrt", Adapter.ENGINE_1_2),
        ("1.3.0rc0", "pytorch", Adapter.PYTORCH_1_3),
        ("1.4.0rc4", "pytorch", Adapter.PYTORCH_1_3),
    ],
)
def test_adapter_of_a_version(version: str, backend: str, adapter: Adapter) -> None:
    assert adapter_for(version, backend) is adapter and can(version, backend).adapter is adapter
    assert adapter.backend == backend


@pytest.mark.parametrize(
    ("version", "backend", "words"),
    [
        ("1.0.0", "pytorch", "kvtool drives 1.1 to 1.4"),
        ("1.5.0rc0", "pytorch", "signatures of later versions are not recorded"),
        ("1.3.0rc15", "tensorrt", r"removed in 1\.3; build them with 1\.2\.1"),
        ("1.4.0rc1", "tensorrt", "tensorrt-backend-removal"),
        ("1.2.1", "cpp", "wanted one of pytorch, tensorrt, found 'cpp'"),
    ],
)
def test_versions_without_an_adapter_are_refused(version: str, backend: str, words: str) -> None:
    with pytest.raises(EngineRefused, match=words):
        adapter_for(version, backend)


def test_what_a_version_cannot_is_refused_with_the_one_that_can() -> None:
    old, new = can("1.2.1"), can("1.4.0rc1")
    assert not old.layer_groups and new.layer_groups and new.attention_dp_connector
    assert old.connector_module == "tensorrt_llm._torch.pyexecutor.kv_cache_connector"
    assert new.connector_module == "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"
    with pytest.raises(EngineRefused, match=r"\(pytorch-1\.2\): no disk tier; 1\.3\.0rc27 can \(pytorch-1\.3\)"):
        old.need("disk_tier", "disk tier")
    with pytest.raises(EngineRefused, match=r"no engine build; 1\.1\.0 can \(engine-1\.2\)"):
        new.need("engine_build", "engine build")
    with pytest.raises(EngineRefused, match="no version that kvtool knows can"):
        new.need("load_failure_channel", "way to say that a load failed")
    with pytest.raises(EngineRefused, match=r"found 'MOONCAKE', this version takes UCX, NIXL, MPI; 1\.2\.0 can"):
        can("1.1.0").need_value("transceiver_backends", "MOONCAKE", "transceiver backend")
    new.need("disk_tier", "disk tier")
    new.need_value("connector_presets", "mooncake-store", "preset")


def test_a_later_version_of_one_backend_loses_nothing() -> None:
    """But the engine path: what 1.x can, the next one can (the connector's own path aside)."""
    for earlier, later in itertools.pairwise(can(version) for version in KNOWN):
        for feature in ("layer_groups", "attention_dp_connector", "disk_tier", "transceiver_with_connector"):
            assert getattr(earlier, feature) <= getattr(later, feature), (earlier.version, later.version, feature)
        for feature in ("transceiver_backends", "connector_presets", "connector_callbacks"):
            assert set(getattr(earlier, feature)) <= set(getattr(later, feature))


@pytest.mark.parametrize(
    ("version", "requires", "words"),
    [
        (None, [], r"not installed here; .* container of release 1\.2\.1"),
        ("1.2.1", ["torch>=2.9", "tensorrt_llm_extras"], "without tensorrt among its requirements"),
        ("1.3.0rc15", ["tensorrt~=10.15.1"], r"removed in 1\.3"),
        ("1.2.1", ["torch>=2.9", "tensorrt~=10.14.1"], None),
        ("1.2.0", ["tensorrt_cu13 (>=10.14)"], None),
    ],
)
def test_engine_builder_must_depend_on_tensorrt(
    monkeypatch: pytest.MonkeyPatch, version: str | None, requires: list[str], words: str | None
) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", found)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    assert versions.installed() == version
    if words is None:
        assert engine_builder_here() == version
    else:
        with pytest.raises(EngineRefused, match=words):
            engine_builder_here()
