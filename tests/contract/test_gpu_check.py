"""The steps of `kvtool gpu-check` over a generated tensorrt_llm: the code of a GPU host, run without the GPU."""

import os
import sys
from pathlib import Path

import pytest
from generate import VERSIONS, write

from kvtool.engine.trtllm.bundle import Bundle
from kvtool_trtllm.gpucheck import bundle, serving, transceiver
from kvtool_trtllm.gpucheck.account import Wrong


@pytest.fixture(params=["1.2.1", *(pytest.param(one, marks=pytest.mark.slow) for one in VERSIONS if one != "1.2.1")])
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle for a version that processes started from here find installed."""
    package = write(tmp_path / "package", request.param)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(str(package))
    return bundle.make_bundle(bundle.write_tiny(tmp_path / "tiny"), tmp_path / "bundle", "h100-80gb")


@pytest.mark.real
def test_two_servers_answer_as_one(made: Bundle, tmp_path: Path) -> None:
    asked = serving.prompts(made, 0)[:3]
    plain = serving.answer(tmp_path, "plain", made, asked, rounds=2)
    assert all(len(answer) == serving.TOKENS for answer in plain[0])
    decoded = transceiver.between(tmp_path, made, asked)
    assert serving.compare(plain, decoded, "of the two servers") == 3


@pytest.mark.real
@pytest.mark.slow
def test_a_server_that_fails_is_said_to_have_failed(made: Bundle, tmp_path: Path) -> None:
    too_long = [list(range(2, 900)) * 2]
    with pytest.raises(Wrong, match="the LLM plain ended with exit code 1 without its answers"):
        serving.answer(tmp_path, "plain", made, too_long)
    with pytest.raises(Wrong, match="the context server ended with exit code 1 before it answered"):
        transceiver.between(tmp_path, made, too_long)
