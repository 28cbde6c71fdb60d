"""One real deployment: a pool of two ranks, three tritonservers, SmolLM2; streamed from, cancelled, killed, stopped.

The tests share it, and each leaves it serving. Processes and shared memory are counted at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtool.errors import RequestRefused, Unavailable
from kvtool.triton import process
from kvtool.triton.client import operate, stream, stream_async
from kvtool.triton.peers import FILE as PEERS_FILE
from kvtool.triton.peers import PeersFile
from kvtool.triton.rpc import Links
from kvtool.triton.state import front_url, read_state

pytestmark = pytest.mark.real

PROMPT = "The history of computing begins long before the modern computer, with tools that helped people count. " * 3
SPEC = """
engine: {engine}
run_dir: run
name: kvtool-test
pool: {{ranks: 2, dram_size: 48MiB, file_size: 0}}
prefill: {{threads: 1, kv_blocks: 256}}
decode: {{threads: 1, kv_blocks: 300}}
supervise: {{canary_interval: 1s, start_timeout: 180s}}
"""


def _kvtool(*args: object, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtool.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def _until(what: str, condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
    """The first true answer of `condition`."""
    until_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < until_s, f"not in {timeout_s} s: {what}"
        time.sleep(0.05)
    return answer


class Deployment:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.url = run_dir, front_url(run_dir)

    def state(self) -> dict[str, Any]:
        state = read_state(self.run_dir)
        assert state is not None
        return state

    def server(self, name: str) -> dict[str, Any]:
        return next(server for server in self.state()["servers"] if server["name"] == name)

    def engine_stub(self, name: str) -> int:
        """The process that computes in `name`."""
        command = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.server(name)["stubs"]}
        return next(pid for pid, line in command.items() if b"_engine/" in line)

    def serving(self) -> None:
        """Every server serves and the pool is up, now and, with their canaries, still."""
        _until("all serve", lambda: all(server["state"] == "serving" for server in self.state()["servers"]))
        _until("the pool is up", lambda: self.state()["pool"]["state"] == "up")

    def ask(self, prompt: str = PROMPT, **options: Any) -> tuple[list[int], str, dict[str, Any]]:
        tokens, text, usage = [], "", {}
        for piece in stream(self.url, prompt, timeout_s=120, **{"max_tokens": 8, "ignore_eos": True, **options}):
            tokens += piece.tokens
            text += piece.text
            usage = dict(piece.usage)
        return tokens, text, usage

    def open_http(self, inputs: dict[str, Any]) -> Any:
        port = self.server("front-0")["http_port"]
        url = f"http://127.0.0.1:{port}/v2/models/kvtool/generate_stream"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        return direct.open(url, json.dumps(inputs).encode(), timeout=60)

    def held(self) -> list[Any]:
        """What prefill and decode workers and the front hold now."""

        async def ask() -> list[Any]:
            links = Links()
            peers = PeersFile(self.run_dir / PEERS_FILE).read().instances
            answers = [json.loads(await links.operate(peer, {"op": "status"}, 10)) for peer in peers]
            await links.close()
            return [held for answer in answers for held in answer["held"] if "canary" not in held["owner"]]

        return asyncio.run(ask()) + operate(self.url, "status")["in_flight"]


@pytest.fixture(scope="module")
def deployed(smollm2_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment")
    (folder / "spec.yaml").write_text(SPEC.format(engine=smollm2_engine))
    try:
        up = _kvtool("deploy", "up", folder / "spec.yaml")
        assert up.returncode == 0, up.stderr
        assert "curl -N http://127.0.0.1:" in up.stdout
        yield Deployment(folder / "run")
    finally:
        _kvtool("deploy", "down", "--run-dir", folder / "run")


@pytest.fixture
def deployment(deployed):
    deployed.serving()
    return deployed


def test_a_second_ask_hits_the_pool_and_gives_the_same_answer(deployment):
    cold_tokens, cold_text, cold = deployment.ask()
    assert len(cold_tokens) == 8 and cold_text and cold["finish_reason"] == "length"
    assert cold["instances"] == {"prefill": "prefill-0", "decode": "decode-0"}
    warm_tokens, warm_text, warm = deployment.ask()
    assert (warm_tokens, warm_text) == (cold_tokens, cold_text)
    assert warm["hit_tokens"]["dram"] >= 32
    for usage in (cold, warm):
        assert usage["prompt_tokens"] == sum(usage["hit_tokens"].values()) + usage["computed_tokens"]


def test_the_http_endpoint_streams_the_same_tokens(deployment):
    tokens, text, _ = deployment.ask(max_tokens=4)
    with deployment.open_http({"text_input": PROMPT, "max_tokens": 4, "ignore_eos": True}) as answer:
        events = [json.loads(line[6:]) for line in answer.read().decode().splitlines() if line.startswith("data: ")]
    assert "".join(event["text_output"] for event in events) == text
    assert [event["token_ids"] for event in events if event["token_ids"] != []] == tokens
    assert json.loads(events[-1]["usage"])["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        (PROMPT, {"max_tokens": 0}, "max_tokens must lie in 1 to 4096, found 0"),
        ("word " * 9000, {}, r"the prompt has \d+ tokens; .* context window of 8192"),
        (PROMPT, {"temperature": -1.0}, "temperature"),
        ([{"role": "user"}], {}, r'wanted \[\{"role": "user", "content"'),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence_and_holds_nothing(deployment, prompt, options, sentence):
    with pytest.raises(RequestRefused, match=sentence):
        deployment.ask(prompt, **options)
    _until("nothing is held", lambda: not deployment.held())


def test_text_that_is_no_utf8_is_refused(deployment):
    import tritonclient.grpc as triton

    got: list[Any] = []
    with triton.InferenceServerClient(deployment.url) as client:
        client.start_stream(callback=lambda result, error: got.append(error))
        text = triton.InferInput("text_input", [1], "BYTES")
        text.set_data_from_numpy(np.array([b"caf\xe9"], dtype=object))
        client.async_stream_infer("kvtool", [text])
        _until("an answer", lambda: got, 30)
        client.stop_stream(cancel_requests=True)
    assert "RequestRefused: text_input: wanted UTF-8, found byte 0xe9 at offset 3" in got[0].message()


@pytest.mark.parametrize("way", ["gRPC", "HTTP"])
def test_a_client_that_leaves_frees_everything_on_both_sides(deployment, way):
    if way == "gRPC":
        pieces = stream(deployment.url, PROMPT, max_tokens=2000, ignore_eos=True)
        next(pieces)
        leave = pieces.close
    else:
        answer = deployment.open_http({"text_input": PROMPT, "max_tokens": 2000, "ignore_eos": True})
        assert answer.readline().startswith(b"data: ")
        leave = answer.close
    assert [flight["stage"] for flight in operate(deployment.url, "status")["in_flight"]] == ["decode"]
    leave()
    began_s = time.monotonic()
    _until("nothing is held", lambda: not deployment.held(), 30)
    assert time.monotonic() - began_s < 10


def test_answers_do_not_depend_on_who_shares_the_batch_or_leaves_it(deployment):
    """Twelve at once, every third of which goes away after its first piece."""
    prompts = [f"{number} ducks went out one day. " * 5 for number in range(12)]
    alone = [deployment.ask(prompt, max_tokens=6)[0] for prompt in prompts[:4]]

    async def one(number: int) -> list[int]:
        tokens: list[int] = []
        async with contextlib.aclosing(
            stream_async(deployment.url, prompts[number], max_tokens=6, ignore_eos=True, timeout_s=120)
        ) as pieces:
            async for piece in pieces:
                tokens += piece.tokens
                if number % 3 == 2:
                    break
        return tokens

    async def everyone() -> list[list[int]]:
        return await asyncio.gather(*map(one, range(12)))

    together = asyncio.run(everyone())
    assert [together[number] for number in (0, 1, 3)] == [alone[number] for number in (0, 1, 3)]
    assert all(len(tokens) == 6 for number, tokens in enumerate(together) if number % 3 != 2)
    _until("nothing is held", lambda: not deployment.held(), 30)


def test_an_answer_goes_on_after_its_decode_process_was_killed(deployment):
    _die_midway(deployment, signal.SIGKILL)


def test_an_answer_goes_on_after_its_decode_process_hung(deployment):
    _die_midway(deployment, signal.SIGSTOP)


def _die_midway(deployment, number):
    expected = deployment.ask(max_tokens=24)[:2]
    restarts = deployment.server("decode-0")["restarts"]
    tokens, text, usage = [], "", {}
    for piece in stream(deployment.url, PROMPT, max_tokens=24, ignore_eos=True, timeout_s=120):
        if len(tokens) < 5 <= len(tokens) + len(piece.tokens):
            os.kill(deployment.engine_stub("decode-0"), number)
        tokens += piece.tokens
        text += piece.text
        usage = dict(piece.usage)
    assert (tokens, text) == expected
    assert usage["retries"] >= 1 and deployment.server("decode-0")["restarts"] == restarts + 1


def test_requests_are_answered_while_the_prefill_server_is_dead(deployment):
    expected = deployment.ask()[:2]
    os.kill(deployment.engine_stub("prefill-0"), signal.SIGKILL)
    tokens, text, _ = deployment.ask()
    assert (tokens, text) == expected
    _until("prefill is noticed", lambda: deployment.server("prefill-0")["restarts"] >= 1, 30)
    deployment.serving()
    assert deployment.ask()[2]["instances"].get("prefill") == "prefill-0"


def test_a_dead_front_comes_back_on_its_ports_and_nothing_runs_on_for_it(deployment):
    pieces = stream(deployment.url, PROMPT, max_tokens=2000, ignore_eos=True, timeout_s=60)
    next(pieces)
    os.kill(deployment.server("front-0")["stubs"][0], signal.SIGKILL)
    with pytest.raises(Unavailable):
        for _ in pieces:
            pass
    _until("the front is noticed", lambda: deployment.server("front-0")["restarts"] == 1, 30)
    deployment.serving()
    _until("nothing is held", lambda: not deployment.held(), 30)
    assert len(deployment.ask()[0]) == 8 and front_url(deployment.run_dir) == deployment.url


def test_requests_are_answered_while_the_pool_is_dead_and_it_comes_back(deployment):
    expected = deployment.ask()[:2]
    restarts = deployment.state()["pool"]["restarts"]
    for pid in deployment.state()["pool"]["pids"]:
        os.kill(pid, signal.SIGKILL)
    assert deployment.ask()[:2] == expected
    _until("the pool is started again", lambda: deployment.state()["pool"]["restarts"] > restarts, 30)
    deployment.serving()
    assert deployment.ask()[:2] == expected
    _until("clients find it", lambda: sum(deployment.ask()[2]["hit_tokens"].values()) > 0, 60)


def test_status_says_what_runs(deployment):
    said = _kvtool("deploy", "status", "--run-dir", deployment.run_dir, "--json")
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    assert {server["name"] for server in found["servers"]} == {"front-0", "prefill-0", "decode-0"}
    assert all(server["rss_size"] > 2**20 and server["canary_age_s"] < 60 for server in found["servers"])
    assert found["pool"]["ranks_alive"] == 2 and found["front"]["totals"]["requests"] >= 1
    assert "pool up: 2 of 2 ranks" in _kvtool("deploy", "status", "--run-dir", deployment.run_dir).stdout


def test_a_second_deployment_in_the_same_place_is_refused(deployment):
    up = _kvtool("deploy", "up", deployment.run_dir.parent / "spec.yaml")
    assert up.returncode == 2 and "runs in" in up.stderr and "kvtool deploy down" in up.stderr


def test_a_port_in_use_is_refused_before_anything_starts(deployment, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ("--set", f"front.grpc_port={port}", "--set", f"run_dir={tmp_path / 'run'}")
        up = _kvtool("deploy", "up", deployment.run_dir.parent / "spec.yaml", *settings)
    assert up.returncode == 1 and f"port {port} on 127.0.0.1 is in use by process {os.getpid()}" in up.stderr
    assert read_state(tmp_path / "run") is None


def test_the_command_line_streams_and_says_what_was_used(deployment):
    said = _kvtool("generate", "--run-dir", deployment.run_dir, "--prompt", PROMPT, "--max-tokens", 4, "--ignore-eos")
    assert said.returncode == 0, said.stderr
    assert said.stdout == deployment.ask(max_tokens=4)[1] + "\n"
    assert "4 generated" in said.stderr and "hit" in said.stderr


def test_down_ends_everything_even_when_the_supervisor_was_killed(deployed):
    """Last: it ends the deployment."""
    deployed.serving()
    state = deployed.state()
    deployment = state["deployment"]
    regions = {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"kvt-{deployment}-")}
    assert regions and len(process.marked(deployment)) >= 3 + 6
    segments = _segments(deployed.run_dir)
    os.kill(state["supervisor"]["pid"], signal.SIGKILL)
    down = _kvtool("deploy", "down", "--run-dir", deployed.run_dir)
    assert down.returncode == 0, down.stderr
    assert process.marked(deployment) == []
    left = {path.name for path in Path("/dev/shm").iterdir()}
    assert not left & (regions | segments)
    again = _kvtool("deploy", "down", "--run-dir", deployed.run_dir)
    assert again.returncode == 0 and "nothing runs" in again.stderr


def _segments(run_dir: Path) -> set[str]:
    pool = json.loads((run_dir / "pool" / "pool.json").read_text())
    return {Path(rank["segment"]).name for rank in pool["ranks"]}
