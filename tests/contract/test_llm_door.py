"""kvtool's door to `tensorrt_llm.LLM`, on the generated package: what is done before it, passed to it, and said when it
does not open."""

from __future__ import annotations

import asyncio
import json
import os
import time
from types import SimpleNamespace

import pytest

from kvtool.engine.trtllm import llm as door
from kvtool.engine.trtllm.llm import Llm, clean_environment, read_llm_args
from kvtool.errors import EngineFailed, EngineRefused, Missing

JOB = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "4",
    "OMPI_MCA_orte_ess_num_procs": "4",
    "ORTE_SCHIZO_DETECTION": "ORTE",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI41": "x",
    "PMI_RANK": "1",
}
KEPT = {"OMPI_MCA_btl": "self,tcp", "PMIX_MCA_gds": "hash", "PATH": "/bin", "UCX_TLS": "tcp"}


@pytest.fixture(params=["1.2.1", "1.4.0rc1"])
def version(request, trtllm):
    trtllm(request.param)
    return request.param


@pytest.fixture
def args(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 100, "torch_dtype": "bfloat16"}))
    return {"model": str(tmp_path), "skip_tokenizer_init": True}


@pytest.fixture
def opened(monkeypatch):
    made = []
    for name in door.GPU_VARIABLES:
        monkeypatch.setenv(name, "7")

    def opened(args, gpus=(), start_timeout_s=60.0):
        made.append(Llm(args, gpus, start_timeout_s=start_timeout_s, where="llm.yaml"))
        return made[-1]

    yield opened
    for each in made:
        each.close()


def test_what_a_launcher_left_goes_and_what_configures_mpi_stays():
    environ = {**JOB, **KEPT}
    assert clean_environment(environ) == sorted(JOB) and environ == KEPT
    assert clean_environment(environ) == []


def test_the_environment_is_as_it_must_be_before_the_import(version, args, opened, monkeypatch):
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    seen = {}
    start = door._start
    monkeypatch.setattr(door, "_start", lambda args: seen.update(os.environ) or start(args))
    opened(args, gpus=(2, 3))
    assert not JOB.keys() & seen.keys()
    assert [seen[name] for name in door.GPU_VARIABLES] == ["2,3", "2,3"]


def test_without_named_gpus_the_environments_choice_stays(version, args, opened):
    opened(args)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"


def test_every_rank_is_told_what_the_connector_needs_where_the_version_can(version, args, opened, monkeypatch):
    monkeypatch.setenv("KVTOOL_CONNECTOR", "/bundle/connector.yaml")
    passed = {}
    monkeypatch.setattr(door, "_start", lambda args: passed.update(args) or SimpleNamespace(shutdown=lambda: None))
    Llm(args, (), start_timeout_s=60, where="llm.yaml", tells=("KVTOOL_CONNECTOR", "KVTOOL_POOL"))
    assert passed.get("env_overrides") == {"KVTOOL_CONNECTOR": "/bundle/connector.yaml"}


async def _tokens(llm, **more):
    sampling = {"max_tokens": 5, "end_id": -1, "pad_id": 0}
    output = llm.generate(range(20, 40), sampling, streaming=True, **more)
    async for _ in output:
        pass
    return output.outputs[0].token_ids


def test_a_request_goes_through_and_is_the_same_again(version, args, opened):
    llm = opened(args)
    first = asyncio.run(_tokens(llm))
    assert len(first) == 5 and asyncio.run(_tokens(llm)) == first
    assert llm.own_ids == (version >= "1.3")


@pytest.mark.parametrize(
    ("kind", "keywords", "words"),
    [
        ("sampling", {"max_tokens": 3, "temprature": 0.5}, "sampling: temprature: SamplingParams of TensorRT-LLM"),
        ("sampling", {"max_tokens": "3"}, "sampling: max_tokens: wanted int, found '3'"),
        ("handoff", {"request_type": "generation_only", "colour": 1}, "hand-off: colour: DisaggregatedParams"),
    ],
)
def test_a_keyword_that_the_version_does_not_take_is_refused(version, args, opened, kind, keywords, words):
    llm = opened(args)
    sampling = keywords if kind == "sampling" else {"max_tokens": 3}
    handoff = keywords if kind == "handoff" else None
    with pytest.raises(EngineRefused) as refused:
        llm.generate([1], sampling, streaming=False, handoff=handoff)
    assert words in str(refused.value)


def test_an_argument_that_the_version_does_not_take_is_refused_before_anything_starts(
    version, args, opened, monkeypatch
):
    monkeypatch.setattr(door, "_start", lambda args: pytest.fail("started"))
    with pytest.raises(EngineRefused, match=r"llm.yaml: max_batchsize: LLM of .* did you mean max_batch_size"):
        opened({**args, "max_batchsize": 3})


def test_a_start_that_hangs_is_given_up_with_what_to_look_at(version, args, opened, monkeypatch):
    monkeypatch.setattr(door, "_start", lambda args: time.sleep(3))
    with pytest.raises(EngineFailed, match=r"did not start within 0.05 s; look at the log above for MPI or GPU"):
        opened(args, start_timeout_s=0.05)


@pytest.mark.parametrize(
    ("error", "kind"), [(ValueError("no such model"), EngineRefused), (RuntimeError("CUDA"), EngineFailed)]
)
def test_a_start_that_fails_says_why(version, args, opened, monkeypatch, error, kind):
    def fail(args):
        raise error

    monkeypatch.setattr(door, "_start", fail)
    with pytest.raises(kind, match=rf"llm.yaml: TensorRT-LLM failed at start: {type(error).__name__}: {error}"):
        opened(args)


def test_without_tensorrt_llm_the_sentence_says_where_there_is_one(args):
    with pytest.raises(Missing, match=r"tensorrt_llm is not installed in the Python that Triton's stub runs"):
        Llm(args, (), start_timeout_s=1, where="llm.yaml")


@pytest.mark.parametrize("text", ["", "- a", "dtype: auto", "model: [", "model: 3"])
def test_a_file_without_llm_arguments_is_refused(tmp_path, text):
    (tmp_path / "llm.yaml").write_text(text)
    with pytest.raises(EngineRefused, match=r"llm.yaml: wanted .* build or render it again"):
        read_llm_args(tmp_path / "llm.yaml")
