"""The chain for TensorRT-LLM behind the real tritonserver: render, deploy, stream, cancel, lose a process.

`tensorrt_llm` is the package that tests/contract generates from the recorded signatures: its answers depend on every
KV byte that it reads, so the same tokens as a direct run mean that the right KV came over. No GPU is involved.
"""

from __future__ import annotations

import ast
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import deployed
import pytest
from bundles import build_bundle, write_checkpoint
from deployed import Deployed, kill, until
from generate import write
from overlay import overlay
from prompts import prose
from stream import ask

from kvtool.engine.tokenizer import Tokenizer
from kvtool.pool.launch import find_mpiexec

pytestmark = pytest.mark.real

PROMPT = prose(40, 3)  # some 250 bytes, so as many tokens
OTHER = prose(38, 5)


def _spec(handoff: str) -> str:
    gpus = "prefill: {gpus: [[0]]}, decode: {gpus: [[1]]}"
    return f"target: tensorrt_llm\ntensorrt_llm: {{handoff: {handoff}, {gpus}}}\n"


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a bundle, and an environment that has a fake TensorRT-LLM; kvtool is run from that."""
    folder = tmp_path_factory.mktemp("trtllm")
    fake = folder / "site"
    fake.mkdir()
    write(fake, request.param)
    build_bundle(folder, write_checkpoint(folder / "checkpoint"), request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployed, "KVTOOL", overlay(folder / "venv", fake))
        patch.setenv("PATH", f"{os.environ['PATH']}:{Path(find_mpiexec()).parent}")
        patch.setenv("OMPI_COMM_WORLD_RANK", "3")  # as under a launcher; nothing of it may reach TensorRT-LLM
        yield folder


def _direct(place: Path, prompt: str, max_tokens: int) -> list[int]:
    """The tokens of one `LLM` with nothing around it."""
    script = (
        "import sys\n"
        "from tensorrt_llm import LLM, SamplingParams\n"
        f"llm = LLM(model={str(place / 'checkpoint')!r}, skip_tokenizer_init=True,\n"
        "    kv_cache_config={'tokens_per_block': 16})\n"
        f"params = SamplingParams(max_tokens={max_tokens}, end_id=256, pad_id=256)\n"
        f"out = llm.generate_async({Tokenizer(place / 'tiny').encode(prompt)!r}, params)\n"
        "print(out.result(60).outputs[0].token_ids)\n"
        "llm.shutdown()\n"
    )
    done = subprocess.run(
        [str(place / "venv/bin/python3"), "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found: list[int] = ast.literal_eval(done.stdout)
    return found


def _quiet(running: Deployed) -> None:
    until("everything to be let go", lambda: not running.held(), 15)


@pytest.mark.parametrize("place", ["1.2.1"], indirect=True)
def test_the_pool_carries_kv_from_prefill_to_decode_and_to_the_next_request(place: Path, tmp_path: Path) -> None:
    running = Deployed(tmp_path, place / "tiny", _spec("pool"), pool__ranks="2", pool__dram_size="32MiB")
    try:
        blocks = len(Tokenizer(place / "tiny").encode(PROMPT)) // 16
        first = running.ask(PROMPT, 12)
        assert first.tokens == _direct(place, PROMPT, 12) and first.usage["hit_tokens"].get("engine", 0) == 0, first
        assert first.usage["pool"]["blocks_put"] == blocks, "prefill answered before the pool had them"
        again = running.ask(PROMPT, 12)
        assert again.tokens == first.tokens and again.usage["hit_tokens"]["engine"] == 16 * blocks, again
        computed = running.worker("prefill-0")["counts"]["computed_tokens"] - first.usage["prompt_tokens"]
        assert computed < 16, "beside the first prompt nothing but canaries"
        kill(running.stub("decode-0", "decode_engine"))
        after = running.ask(PROMPT, 12)
        assert after.tokens == first.tokens and after.finish == "length", "a new server finds the KV in the pool"
        _quiet(running)
    finally:
        running.down()
    assert running.left() == set()


@pytest.mark.parametrize("place", ["1.4.0rc1"], indirect=True)
def test_the_transceiver_carries_kv_from_prefill_to_decode(place: Path, tmp_path: Path) -> None:
    running = Deployed(tmp_path, place / "tiny", _spec("transceiver"), pool__enabled="false")
    try:
        first = running.ask(PROMPT, 12)
        assert first.finish == "length" and first.tokens == _direct(place, PROMPT, 12), first
        assert first.usage["instances"] == {"prefill": "prefill-0", "decode": "decode-0"}
        stream = running.stream(OTHER, 200)
        stream.take(2)
        stream.cancel()
        _quiet(running)
        _lose_decode(running, first.tokens)
    finally:
        running.down()
    assert running.left() == set()


def _lose_decode(running: Deployed, expected: list[int]) -> None:
    """A decode server that hangs with a request is replaced, and prefill hands over once more."""
    url, victim = running.url, running.stub("decode-0", "decode_engine")
    kill(victim, signal.SIGSTOP)
    answer = ask(url, PROMPT, 12)  # at once: the supervisor replaces what is stopped within a second
    assert answer.tokens == expected and answer.usage["retries"] >= 1, answer
