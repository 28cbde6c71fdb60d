"""The deployment spec: what it refuses, in which words, and where it says each value came from."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtool.config.check import check
from kvtool.config.load import flat, load_spec
from kvtool.config.spec import Spec, json_schema
from kvtool.errors import SpecRefused
from kvtool.kv.layout import KVLayout


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "spec.yaml"
        path.write_text(text)
        return path

    return write


def test_values_come_from_flag_then_file_then_default_and_say_so(written, tmp_path):
    path = written("engine: build/smol\npool:\n  ranks: 3\n  dram_size: 64MiB\n")
    spec, origins = load_spec(path, {"pool.ranks": "4", "prefill.chunk_tokens": "256"})
    assert (spec.pool.ranks, spec.pool.dram_size, spec.decode.batch_max) == (4, 64 << 20, 16)
    assert spec.engine == tmp_path / "build/smol"
    assert spec.limits.deadline == 600.0
    said = {key: str(origins[key]) for key in ("pool.ranks", "pool.dram_size", "decode.batch_max", "engine")}
    assert said == {
        "pool.ranks": "flag",
        "pool.dram_size": "spec.yaml:4",
        "decode.batch_max": "default",
        "engine": "spec.yaml:1",
    }
    assert origins.keys() == {key for key, _ in flat(spec)}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("engine: e\npool:\n  rank: 3\n", r"spec.yaml:3: pool.rank: unknown key; did you mean 'ranks'\?"),
        ("engine: e\nzzz: 3\n", r"spec.yaml:2: zzz: unknown key; known here are budgets, decode, engine"),
        ("engine: e\npool: {ranks: '3'}\n", r"spec.yaml:2: pool.ranks: input should be a valid integer, found '3'"),
        ("engine: e\npool: {ranks: 0}\n", r"spec.yaml:2: pool.ranks: input should be greater than .* 1, found 0"),
        ("engine: e\npool: {dram_size: 3 parsecs}\n", r"spec.yaml:2: pool.dram_size: wanted a size such as 512MiB"),
        ("engine: e\nbudgets: {put: soon}\n", r"spec.yaml:2: budgets.put: wanted a duration such as 250ms"),
        ("engine: e\npool: [1]\n", r"spec.yaml:2: pool: input should be a valid dictionary"),
        ("engine: e\nengine: f\n", r"spec.yaml:2: engine: given twice, first on line 1"),
        ("pool: {}\n", r"spec.yaml: engine: missing; it has no default"),
        ("", r"spec.yaml: engine: missing"),
        ("- 1\n", r"spec.yaml:1: wanted keys such as `engine: PATH`, found a list"),
        ("engine: e\nversion: 2\n", r"spec.yaml:2: version: wanted version 1, found 2"),
        ("engine: e\n  pool: {\n", r"spec.yaml:2: not YAML"),
        ("engine: e\nname: Prod A\n", r"spec.yaml:2: name: wanted 1 to 32 of a-z"),
        ("engine: e\nfront: {host: 0.0.0.0}\n", r"spec.yaml:2: front.host: wanted a loopback address, found '0.0.0.0'"),
        ("engine: e\nfront: {http_port: 8000, grpc_port: 8000}\n", r"front: http_port, .* must differ, found"),
        ("engine: e\nlimits: {max_tokens_default: 9, max_tokens_max: 3}\n", r"limits: max_tokens_default 9 is above"),
        ("engine: e\n1: 2\n", r"spec.yaml:2: 1: wanted a word as key"),
    ],
)
def test_a_wrong_spec_is_refused_with_file_line_and_key(written, text, sentence):
    with pytest.raises(SpecRefused, match=sentence):
        load_spec(written(text))


def test_every_fault_of_a_spec_is_told_at_once(written):
    with pytest.raises(SpecRefused) as refused:
        load_spec(written("engine: e\npool: {rank: 1}\nlimits: {deadlin: 3s}\n"))
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize("flag", ["pool.rank=1", "pool=1", "pool.ranks=many"])
def test_a_wrong_flag_is_refused_by_its_name(written, flag):
    key, _, value = flag.partition("=")
    with pytest.raises(SpecRefused, match=rf"--set {key}: "):
        load_spec(written("engine: e\n"), {key: value})


def test_a_missing_file_names_the_command_that_writes_one(tmp_path):
    with pytest.raises(SpecRefused, match=r"nope.yaml: no such file; write one with: kvtool config init"):
        load_spec(tmp_path / "nope.yaml")


def test_every_field_is_described_and_in_the_schema():
    schema = json_schema()
    json.dumps(schema)
    for name, model in [("Spec", schema), *schema["$defs"].items()]:
        assert model["additionalProperties"] is False, name
        undescribed = [key for key, field in model["properties"].items() if not field.get("description")]
        assert not undescribed, f"{name}: {undescribed}"


def _engine(**changes):
    facts = {
        "target": "torch",
        "context_tokens_max": 8192,
        "layout": KVLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=32),
    }
    return SimpleNamespace(**{**facts, **changes})


def test_the_defaults_fit_the_engine_that_the_package_carries():
    check(Spec(engine=Path("e")), _engine())


@pytest.mark.parametrize(
    ("spec", "engine", "sentence"),
    [
        ({}, {"target": "tensorrt_llm"}, r"target: the spec says torch, the engine in e was built for tensorrt_llm"),
        ({"prefill": {"kv_blocks": 255}}, {}, r"prefill.kv_blocks: 255 blocks .* set at least 256"),
        ({"decode": {"kv_blocks": 10}}, {}, r"decode.kv_blocks: 10 blocks .* set at least 256"),
        ({"prefill": {"chunk_tokens": 100}}, {}, r"prefill.chunk_tokens: 100 is not a multiple"),
        ({"pool": {"dram_size": "8MiB"}}, {}, r"pool.dram_size: 8.0 MiB hold 11 blocks of 720.0 KiB"),
        ({"pool": {"file_size": "64KiB"}}, {}, r"pool.file_size: 64.0 KiB are less than one block"),
        ({}, {"context_tokens_max": 128}, r"limits.max_tokens_default: 256 leave no room for a prompt"),
    ],
)
def test_a_spec_that_does_not_fit_its_engine_is_refused(spec, engine, sentence):
    with pytest.raises(SpecRefused, match=sentence):
        check(Spec(engine=Path("e"), **spec), _engine(**engine))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "tensorrt_llm: {version: 1.2.1}\n",
            r"spec.yaml:2: tensorrt_llm: found settings for GPUs, but target is torch",
        ),
        ("target: tensorrt_llm\ntensorrt_llm: {handoff: mpi}\n", r"spec.yaml:3: tensorrt_llm.handoff: .*, found 'mpi'"),
        (
            "target: tensorrt_llm\ntensorrt_llm:\n  transceiver: {backend: DEFAULT}\n",
            r"spec.yaml:4: tensorrt_llm.transceiver.backend: input should be 'NIXL' or 'UCX', found 'DEFAULT'",
        ),
        ("target: tensorrt_llm\ntensorrt_llm: {prefil: {}}\n", r"tensorrt_llm.prefil: unknown key; .*'prefill'"),
        ("target: tensorrt_llm\ntensorrt_llm: {decode: {gpus: [0]}}\n", r"spec.yaml:3: tensorrt_llm.decode.gpus"),
    ],
)
def test_settings_for_gpus_are_strict(written, text, sentence):
    with pytest.raises(SpecRefused, match=sentence):
        load_spec(written("engine: e\n" + text))


def test_engines_of_roles_lie_beside_the_spec(written, tmp_path):
    spec, _ = load_spec(written("engine: e\ntarget: tensorrt_llm\ntensorrt_llm: {decode: {engine: d}}\n"))
    assert spec.tensorrt_llm.decode.engine == tmp_path / "d" and spec.tensorrt_llm.prefill.engine is None
