"""Ports, processes and logs of servers: what is in use is named, what is started is found again."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.errors import Missing, Unavailable
from kvtool.triton import install, process
from kvtool.triton.client import operate, stream
from kvtool.triton.ports import choose, holder
from kvtool.triton.server import failure, unlink_shm


def test_a_port_in_use_is_named_with_its_process():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"port {port} on 127.0.0.1 is in use by process {os.getpid()} \("):
            choose("127.0.0.1", http=port)
    assert holder(port) is None


def test_chosen_ports_differ_and_given_ones_stay():
    with socket.create_server(("127.0.0.1", 0)) as free:
        given = free.getsockname()[1]
    ports = choose("127.0.0.1", grpc=given)
    assert ports.grpc == given and len({ports.http, ports.grpc, ports.metrics}) == 3


def test_processes_are_found_by_their_mark_over_generations_and_killed(tmp_path):
    """A child that ignores SIGTERM and its own child, whose parent then dies."""
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if len(sys.argv) == 1: subprocess.Popen([sys.executable, __file__, 'grandchild'])\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "child.py").write_text(script)
    env = {**os.environ, process.MARK: "feedbeef"}
    parent = subprocess.Popen([sys.executable, tmp_path / "child.py"], env=env, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        found = process.marked("feedbeef")
        assert len(found) == 2 and parent.pid in {each.pid for each in found}
        assert [child.pid for child in process.children(parent.pid)] == [
            each.pid for each in found if each.pid != parent.pid
        ]
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        assert process.kill(process.marked("feedbeef"), grace_s=0.1) == []
        assert process.marked("feedbeef") == [] and process.marked("feedbee") == []
    finally:
        process.kill(process.marked("feedbeef"), grace_s=0.0)
        parent.wait(10)
        parent.stdout.close()


def test_a_process_id_used_again_is_not_the_same_process():
    me = process.look(os.getpid())
    assert me is not None and process.same(me.pid, me.started_ticks)
    assert not process.same(me.pid, me.started_ticks - 1)
    assert process.look(2**22 + 1) is None


def test_shared_memory_is_removed_by_prefix_only():
    names = [f"kvt-{os.getpid()}-a-1", f"kvt-{os.getpid()}-b-1"]
    paths = [Path("/dev/shm", name) for name in names]
    try:
        for path in paths:
            path.write_bytes(b"x")
        assert unlink_shm(f"kvt-{os.getpid()}-a-") == names[:1]
        assert [path.exists() for path in paths] == [False, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_the_reason_of_a_failed_start_is_the_models_own_error():
    log = (
        'E1130 17:17:35.211197 1 server.cc:241] "CudaDriverHelper has not been initialized."\n'
        'E1130 17:18:00.000000 1 pb_stub.cc:402] "Failed to initialize Python stub: EngineRefused: e: no engine here"\n'
        "kvtool.errors.EngineRefused: e: no engine here (engine.json is missing); build one with: kvtool build\n"
        'E1130 17:18:00.100000 1 main.cc:1] "creating server: Internal - failed to load all models"\n'
    )
    assert failure(log).startswith("kvtool.errors.EngineRefused: e: no engine here")
    assert failure(log.replace("kvtool.errors.", "#")).startswith("Failed to initialize Python stub")
    assert failure("") == "the log is empty"


def test_a_named_server_that_is_not_there_is_said(tmp_path, monkeypatch):
    with pytest.raises(Missing, match=r"tritonserver: /nowhere/tritonserver is not an executable file"):
        install.find("/nowhere/tritonserver")
    own = tmp_path / "tritonserver"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.find("auto").binary == own and install.find("auto").wheel is None


def test_numpy_2_is_refused_before_it_corrupts_tensors(monkeypatch):
    installation = install.find("auto")
    if installation.wheel is None:
        pytest.skip("a tritonserver on PATH brings its own stub")
    install.preflight(installation)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.1.0")
    with pytest.raises(
        Missing, match=r"numpy 2.1.0 is installed.*silently corrupts tensors.*pip install 'numpy>=1.26,<2'"
    ):
        install.preflight(installation)


def test_an_address_where_nobody_listens_is_said():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"127.0.0.1:{free.getsockname()[1]}"
    for _ in range(5):  # tritonclient tells it in two ways
        with pytest.raises(Unavailable, match=rf"{url}: no Triton server answers there: "):
            list(stream(url, "hello", timeout_s=10))
    with pytest.raises(Unavailable, match=url):
        operate(url, "status")


@pytest.mark.parametrize("colour", [{"colour": "red"}, {"max_token": 3}])
def test_a_misspelt_option_is_refused_by_name(colour):
    with pytest.raises(TypeError, match=rf"unknown options {next(iter(colour))}; known: chat, max_tokens"):
        next(stream("127.0.0.1:1", "hello", **colour))
