"""TensorRT engines' one server under a real mpirun, as `deploy up` starts it, with a stand-in for the C++ backend.

The executors' ranks do nothing here, as they would after loading: they are there to be counted, and ended.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import deployed
import pytest
from deployed import Deployed, kill, until
from overlay import overlay

from kvtool.engine.tokenizer import Tokenizer
from kvtool.pool.launch import find_mpiexec
from kvtool.triton import install

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
SPEC = "target: tensorrt_llm\ntensorrt_llm: {prefill: {gpus: [[0]]}, decode: {gpus: [[1]]}}\n"


@pytest.fixture
def running(tmp_path: Path, tensorrt_engine: Path) -> Iterator[Deployed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployed, "KVTOOL", overlay(tmp_path / "venv"))
        patch.setenv("PATH", f"{os.environ['PATH']}:{Path(find_mpiexec()).parent}")
        command = _tritonserver(tmp_path)
        made = Deployed(tmp_path, tensorrt_engine, f"{SPEC}tritonserver: {command}\n")
        yield made
        made.down()
    assert made.left() == set()


def _tritonserver(folder: Path) -> Path:
    """A server that has the stand-in among its backends, and whose executors only wait."""
    piped = install.find()
    backends = install.backend_dir(piped, folder / "server")
    assert backends is not None
    for link in (backends / "python").iterdir():  # a backend that is a Python file takes no links to the library
        target = link.resolve()
        link.unlink()
        shutil.copy2(target, link)
    (backends / "tensorrtllm").mkdir()
    (backends / "tensorrtllm" / "model.py").write_text((HERE / "cpp_backend.py").read_text())
    libraries = f"{sysconfig.get_config_var('LIBDIR')}:{piped.libraries}"
    command = folder / "tritonserver"
    command.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--load-model=generation*) exec sleep 600 ;; esac\n'
        f'export LD_LIBRARY_PATH={libraries}\nexec {piped.binary} --backend-directory={backends} "$@"\n'
    )
    command.chmod(0o755)
    return command


def _answer(tokens: list[int], count: int) -> list[int]:
    """As the stand-in makes it."""
    state, made = 7, []
    for token in tokens:
        state = (state * 31 + token) % 65_537
    for _ in range(count):
        state = (state * 31 + 11) % 65_537
        made.append(state % 250)
    return made


def test_requests_stream_through_context_and_generation(running: Deployed, tensorrt_engine: Path) -> None:
    prompt = "Why is the sky blue, and the sea not?"
    tokens = Tokenizer(tensorrt_engine).encode(prompt)
    first = running.ask(prompt, 24)
    assert first.finish == "length" and first.tokens == _answer(tokens, 24), first
    assert sum(first.usage["hit_tokens"].values()) == 32
    stream = running.stream(prompt, 400)
    stream.take(2)
    stream.cancel()
    until("the request to be let go", lambda: not running.worker("decode-0")["held"], 15)
    server = running.server("decode-0")
    kill(running.stub("decode-0", "decode_engine"))
    until("another server", lambda: running.server("decode-0")["epoch"] > server["epoch"], 60)
    assert running.ask(prompt, 24).tokens == first.tokens
