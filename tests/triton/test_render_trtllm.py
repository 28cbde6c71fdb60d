"""Repositories for TensorRT-LLM: the committed files, Triton's own reading of them, and what must hold over both sides.

KVTOOL_GOLDEN=write writes the files of tests/triton/golden again; read the difference before committing it.
"""

from __future__ import annotations

import os
import re
from itertools import chain
from pathlib import Path
from random import Random

import pytest
import yaml
from bundles import BLOCK, LONGEST, as_engine, build_bundle, write_checkpoint
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from kvtool.config.spec import Spec
from kvtool.engine.trtllm.signatures import check_keywords
from kvtool.errors import EngineRefused
from kvtool.triton.mpi import mpirun_line
from kvtool.triton.render import render
from kvtool.triton.target import target_of, world_size

GOLDEN = Path(__file__).parent / "golden"
POOL = {"handoff": "pool", "prefill": {"gpus": [[0], [1]]}, "decode": {"gpus": [[2]], "memory_fraction": 0.8}}
DIRECT = {"handoff": "transceiver", "prefill": {"gpus": [[0]]}, "decode": {"gpus": [[1]]}}
CASES = {
    "pytorch-1.2-pool": ("1.2.1", POOL),
    "pytorch-1.2-transceiver": ("1.2.1", {**DIRECT, "transceiver": {"backend": "UCX"}}),
    "pytorch-1.3-pool": ("1.3.0rc27", POOL),
    "pytorch-1.4-transceiver": ("1.4.0rc1", {**DIRECT, "transceiver": {"runtime": "PYTHON", "buffer_tokens": 1024}}),
    "engine-1.2": ("engine", POOL),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Version -> engine directory, made when asked for; "engine" is for the C++ backend."""
    folder = tmp_path_factory.mktemp("engines")
    checkpoint, made = write_checkpoint(folder / "checkpoint"), {}

    def engines(version, *changes):
        key = (version, *changes)
        if key not in made:
            name = f"e{len(made)}"
            if version == "engine":
                made[key] = as_engine(engines("1.2.1"), folder / name, **dict(changes))
            else:
                made[key] = build_bundle(folder / name, checkpoint, version, *changes)
        return made[key]

    engines.checkpoint = checkpoint
    return engines


def _spec(engine, section, prefill=2, **more):
    return Spec(engine=engine, target="tensorrt_llm", tensorrt_llm=section, prefill={"instances": prefill}, **more)


def _instances(section):
    return len(section["prefill"]["gpus"])


def _files(folder):
    return {path.relative_to(folder): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def _configs(folder):
    found = {}
    for path, text in _files(folder).items():
        if path.suffix == ".pbtxt":
            assert "$" not in text, path
            found[str(path.parent)] = text_format.Parse(text, ModelConfig())
    return found


def _beside(folder, role, name):
    """What a served engine model is given in a file beside its model.py."""
    return yaml.safe_load((folder / role / f"{role}_engine" / "1" / name).read_text())


@pytest.mark.parametrize("case", CASES)
def test_every_file_is_as_committed(engines, tmp_path, case):
    version, section = CASES[case]
    engine = engines(version)
    for out in ("a", "b", "a"):
        render(_spec(engine, section, _instances(section)), tmp_path / out)
    found = _files(tmp_path / "a")
    assert found == _files(tmp_path / "b")
    names = {str(engine): "/engines/tiny", str(engines.checkpoint): "/models/tiny"}
    shown = {}
    for path, text in found.items():
        if path.suffix != ".py":
            for real, name in names.items():
                text = text.replace(real, name)
            shown[path] = re.sub(r"(model_digest: )\w+", r"\1DIGEST", text)
    folder = GOLDEN / case
    if os.environ.get("KVTOOL_GOLDEN") == "write":
        for path, text in shown.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    assert shown == _files(folder), "if the change is meant: KVTOOL_GOLDEN=write pytest tests/triton"


@pytest.mark.parametrize("case", CASES)
def test_what_python_models_say_is_what_they_are_given(engines, tmp_path, case):
    """Each parameter that a model.py asks for stands in its config, and Triton's parser reads the file."""
    version, section = CASES[case]
    render(_spec(engines(version), section, _instances(section)), tmp_path)
    for folder, config in _configs(tmp_path).items():
        assert config.name == Path(folder).name
        source = tmp_path / folder / "1" / "model.py"
        assert source.is_file() == (config.backend == "python")
        if source.is_file():
            asked = set(re.findall(r'settings\.(?:text|count)\("(\w+)"\)', source.read_text()))
            if "llm_options" in source.read_text():
                asked |= {"handoff", "queue_max", "start_timeout_s", "match_budget_s", "put_budget_s", "gpus", "engine"}
            assert asked <= set(config.parameters), folder


def _steps(config):
    return config.ensemble_scheduling.step


@pytest.mark.parametrize("case", CASES)
def test_streaming_models_are_decoupled_along_the_whole_chain(engines, tmp_path, case):
    version, section = CASES[case]
    render(_spec(engines(version), section, _instances(section)), tmp_path)
    configs = _configs(tmp_path)
    single = {"preprocessing", "postprocessing"}
    for folder, config in configs.items():
        assert config.model_transaction_policy.decoupled == (config.name not in single), folder
        for step in _steps(config):
            other = configs[str(Path(folder).parent / step.model_name)]
            assert set(step.input_map) <= {each.name for each in other.input}
            assert set(step.output_map) <= {each.name for each in other.output}


def test_the_transceiver_is_the_same_on_both_sides_and_never_left_to_a_default(engines, tmp_path):
    long, short = engines("1.2.1"), engines("1.2.1", "max_seq_len=256")
    section = {"handoff": "transceiver", "prefill": {"engine": short}, "decode": {"engine": long}}
    section["transceiver"] = {"bandwidth": 1000}
    render(_spec(long, section, 1), tmp_path)
    sides = [
        yaml.safe_load((tmp_path / f"{role}/{role}_engine/1/llm.yaml").read_text()) for role in ("prefill", "decode")
    ]
    first, second = (side["cache_transceiver_config"] for side in sides)
    token_size = 2 * 2 * 2 * 16 * 2
    assert (
        first
        == second
        == {
            "backend": "NIXL",
            "max_tokens_in_buffer": LONGEST,
            "kv_transfer_timeout_ms": -(-10 * LONGEST * token_size // 1000) * 1000,
        }
    )
    assert [side["kv_cache_config"]["tokens_per_block"] for side in sides] == [BLOCK, BLOCK]
    assert sides[0]["disable_overlap_scheduler"] is True
    assert not any("kv_connector_config" in side for side in sides), "1.2 is not trusted with both"


def test_with_the_pool_both_sides_store_under_one_width(engines, tmp_path):
    wide, narrow = engines("1.3.0rc27", "tensor_parallel=2"), engines("1.3.0rc27")
    section = {"prefill": {"engine": narrow, "gpus": [[0]]}, "decode": {"engine": wide, "gpus": [[1, 2]]}}
    spec = _spec(wide, section, 1, pool={"namespace": "blue", "path": "shm"})
    render(spec, tmp_path)
    told = [
        yaml.safe_load((tmp_path / f"{role}/{role}_engine/1/connector.yaml").read_text())
        for role in ("prefill", "decode")
    ]
    assert [each["stored_parallel"] for each in told] == [2, 2]
    assert [each["tensor_parallel"] for each in told] == [1, 2]
    assert {(each["namespace"], each["pool_path"]) for each in told} == {("blue", "shm")}
    assert target_of(spec).pool_layout.kv_heads == 1, "each part of a block has one of the two heads"


@pytest.mark.parametrize("seed", range(20))
def test_any_spec_gives_repositories_that_fit_each_other(engines, tmp_path, seed):
    random = Random(seed)
    version = random.choice(["1.1.0", "1.2.1", "1.3.0rc27", "1.4.0rc1"])
    widths = [random.choice([1, 2]) for _ in range(2)]
    counts = [random.randint(1, 3) for _ in range(2)]
    ids, section = iter(range(100)), {"handoff": random.choice(["pool", "transceiver"])}
    for role, width, count in zip(("prefill", "decode"), widths, counts, strict=True):
        section[role] = {
            "engine": engines(version, *([f"tensor_parallel={width}"] if width > 1 else [])),
            "gpus": [[next(ids) for _ in range(width)] for _ in range(count)],
            "memory_fraction": random.choice([None, 0.3, 0.75]),
            "host_cache_size": random.choice([0, 1 << 30]),
            "cuda_graphs": random.random() < 0.5 and version != "1.1.0",
            "max_batch_size": random.choice([None, 4]),
        }
    engine = section["decode"]["engine"]
    spec = _spec(engine, section, counts[0], decode={"instances": counts[1]})
    render(spec, tmp_path)
    _configs(tmp_path)
    for role, width in zip(("prefill", "decode"), widths, strict=True):
        args = _beside(tmp_path, role, "llm.yaml")
        check_keywords("LLM", args, version, role)
        wanted = section[role]
        assert args["tensor_parallel_size"] == width
        assert args["kv_cache_config"].get("host_cache_size", 0) * width == wanted["host_cache_size"]
        connects = target_of(spec).connector
        assert ("kv_connector_config" in args) == connects
        assert (tmp_path / f"{role}/{role}_engine/1/connector.yaml").exists() == connects
        assert ("cache_transceiver_config" in args) == (section["handoff"] == "transceiver")


# TensorRT engines.


@pytest.mark.parametrize("seed", range(10))
def test_ranks_and_gpus_of_both_engine_models_are_counted_through(engines, tmp_path, seed):
    random = Random(seed)
    widths, counts = ([random.choice([1, 2, 4]) for _ in range(2)] for _ in range(2))
    section = {
        role: {"engine": engines("engine", ("tensor_parallel", width))}
        for role, width in zip(("prefill", "decode"), widths, strict=True)
    }
    spec = _spec(section["decode"]["engine"], section, counts[0], decode={"instances": counts[1]})
    render(spec, tmp_path)
    configs = _configs(tmp_path)
    ranks, gpus = [], []
    for model, width, count in zip(("context", "generation"), widths, counts, strict=True):
        config = configs[f"decode/{model}"]
        assert config.backend == "tensorrtllm" and config.instance_group[0].count == count
        told = {key: value.string_value for key, value in config.parameters.items()}
        for key, all_ids in (("participant_ids", ranks), ("gpu_device_ids", gpus)):
            lists = [[int(each) for each in one.split(",")] for one in told[key].split(";")]
            assert [len(one) for one in lists] == [width] * count
            all_ids += chain.from_iterable(lists)
    assert ranks == list(range(1, world_size(target_of(spec)))) and gpus == list(range(len(ranks)))


def test_the_mpirun_line_has_an_orchestrator_and_one_rank_for_each_gpu(engines, tmp_path, monkeypatch):
    (tmp_path / "mpirun").write_text("#!/bin/sh\n")
    (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    size = world_size(target_of(_spec(engines("engine"), POOL)))
    server = ["tritonserver", "--model-repository=/repo"]
    only = ["--model-control-mode=explicit", "--load-model=context", "--load-model=generation"]
    begin = [f"{tmp_path}/mpirun", "--host", "localhost:4", "--bind-to", "none"]
    assert mpirun_line(server, size) == [*begin, "-n", "1", *server, ":", "-n", "3", *server, *only]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert mpirun_line(server, size)[1] == "--allow-run-as-root"


def test_an_engine_for_torch_and_engines_of_two_kinds_are_refused(engines, tmp_path):
    bundle, engine = engines("1.2.1"), engines("engine")
    with pytest.raises(EngineRefused, match=r"is for pytorch-1.2, .* for engine-1.2; build both engines"):
        render(_spec(engine, {"prefill": {"engine": bundle}, "decode": {"engine": engine}}), tmp_path)
    with pytest.raises(EngineRefused, match=r"no such keyword|takes|no "):
        section = {**DIRECT, "transceiver": {"runtime": "PYTHON"}}
        render(_spec(bundle, section, 1), tmp_path)
