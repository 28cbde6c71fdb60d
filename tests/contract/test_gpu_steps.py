"""The steps of `kvtool gpu-check` over a generated tensorrt_llm: the code of a GPU host, run without the GPU."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from generate import VERSIONS, write

from kvtool.engine.trtllm.bundle import Bundle
from kvtool.engine.trtllm.llm_args import llm_args
from kvtool_trtllm.gpucheck import bundle, connector, serving, transceiver
from kvtool_trtllm.gpucheck.account import Wrong


@pytest.fixture(params=["1.2.1", *(pytest.param(one, marks=pytest.mark.slow) for one in VERSIONS if one != "1.2.1")])
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A bundle for a version that processes started from here find installed."""
    package = write(tmp_path / "package", request.param)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(str(package))
    return bundle.make_bundle(bundle.write_tiny(tmp_path / "tiny"), tmp_path / "bundle", "h100-80gb")


@pytest.mark.real
@pytest.mark.slow
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


@pytest.fixture
def trip(made: Bundle, tmp_path: Path, trtllm: Any) -> Any:
    """The step `connector`, but for requests that a GPU's bindings make and pages that lie on a GPU."""
    trtllm(made.fields.version)
    request = importlib.import_module("tensorrt_llm._fake.request")
    step = importlib.import_module("kvtool_trtllm.gpucheck.connector")
    streams = importlib.import_module("kvtool_trtllm.streams")
    args = llm_args(made, role="both", version=made.fields.version, connector=True, cuda_graphs=False)
    settings = importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs(**args)

    def make(request_id: int, tokens: list[int]) -> Any:
        given = request.Given(request_id=request_id, tokens=tokens)
        return request.LlmRequest(request.State(given=given, tokens=list(tokens), prompt_len=len(tokens)))

    def run(spoil: Any = None) -> dict[str, int]:
        if spoil:
            spoil(step)
        with serving.connected_pool(tmp_path, made) as (_, state):
            version, stream = made.fields.version, streams.HostStream()
            return step.round_trip(made, state, version, settings, "cpu", stream, make)

    return run


@pytest.mark.real
def test_blocks_come_back_from_a_real_pool_to_other_pages(trip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trip()
    assert found["blocks"] == connector.BLOCKS
    assert found["found_tokens"] == connector.BLOCKS * bundle.BLOCK_TOKENS


@pytest.mark.real
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("one byte of a page", "page .* was loaded with other bytes"),
        ("a page of nobody's", "page .* was written, and is not the request's"),
    ],
)
def test_a_connector_that_is_wrong_by_a_byte_is_seen(trip: Any, fault: str, sentence: str) -> None:
    def spoil(step: Any) -> None:
        true = step.Pair.load

        def load(self: Any, request: Any, pages: list[int]) -> None:
            true(self, request, pages)
            page = pages[0] if fault.startswith("one") else pages[-1]
            self.memory[page, 0, 0, 0] += 1

        register = step.Pair.register

        def keep(self: Any, memory: Any) -> None:
            self.memory = memory
            register(self, memory)

        step.Pair.load, step.Pair.register = load, keep

    with pytest.raises(Exception, match=sentence):
        trip(spoil)


@pytest.mark.real
@pytest.mark.slow
def test_answers_are_equal_with_and_without_a_pool_and_from_a_pair(made: Bundle, tmp_path: Path) -> None:
    for show in (serving.equality, serving.pair):
        said, evidence = show(tmp_path)
        assert evidence["as_cold"] == serving.PROMPTS, said
        assert evidence["hit_blocks"] >= 3 * serving.PROMPTS


def test_the_package_is_imported_and_takes_what_the_bundle_has(made: Bundle, trtllm: Any, tmp_path: Path) -> None:
    trtllm(made.fields.version)
    versions = importlib.import_module("kvtool_trtllm.gpucheck.versions")
    said, evidence = versions.show_import(None)
    assert (said, evidence["names"]) == (f"TensorRT-LLM {made.fields.version}", 5)
    assert len(bundle.accepted(made)) == 3
    sys.modules["tensorrt_llm"].__version__ = "0.9"
    with pytest.raises(Exception, match=r"the package says 0\.9: two installations are mixed"):
        versions.show_import(None)
