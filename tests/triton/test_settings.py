"""What served models over TensorRT-LLM read from their configs, and numpy under Triton's stub."""

import json

import pytest

from kvtool.errors import EngineRefused, Missing
from kvtool.triton.settings import INSTANCE, Settings, check_numpy


def _settings(**parameters):
    declared = {key: {"string_value": value} for key, value in parameters.items()}
    args = {"model_config": json.dumps({"parameters": declared}), "model_repository": "/repo/m", "model_version": "1"}
    return Settings.of(args)


@pytest.mark.parametrize(("name", "gpus"), [("decode-0", (0, 1)), ("decode-1", (4,)), ("alone", (0, 1))])
def test_an_instance_takes_its_own_gpus(monkeypatch, name, gpus):
    monkeypatch.setenv(INSTANCE, name)
    assert _settings(gpus="0,1;4").gpus == gpus


def test_without_named_gpus_the_environment_chooses():
    assert _settings(gpus="").gpus == _settings().gpus == ()


def test_an_instance_without_gpus_is_refused(monkeypatch):
    monkeypatch.setenv(INSTANCE, "decode-2")
    with pytest.raises(EngineRefused, match=r"decode-2: GPUs are named for 2 instances \(0;1\); give KVTOOL_INSTANCE"):
        _ = _settings(gpus="0;1").gpus


PAIRS = [("1.26.4", ""), ("1.26.4", "2.51.0"), ("2.3.1", "2.64.0"), ("2.0.0", "3.0")]


@pytest.mark.parametrize(("numpy", "triton"), PAIRS)
def test_numpy_2_is_for_newer_tritons(numpy, triton):
    check_numpy(numpy, triton)


@pytest.mark.parametrize(
    ("triton", "known"), [("", "unknown version"), ("2.51.0", "Triton 2.51.0"), ("2.40.1", "2.40.1"), ("new", "new")]
)
def test_numpy_2_is_refused_where_it_corrupts_tensors_or_nobody_knows(triton, known):
    with pytest.raises(Missing, match=rf"numpy 2.3.1 in the Python stub of .*{known}.*pip install"):
        check_numpy("2.3.1", triton)
