"""One tritonserver process: started in a session of its own, ended with everything that it left behind.

Readiness is the server's word only. After a stub's death it goes on saying ready (2.51), so whoever relies on a server
sends it a canary inference (`supervise`).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtool.errors import Unavailable
from kvtool.triton import install, mpi, process
from kvtool.triton.install import Installation, backend_dir, environment
from kvtool.triton.ports import Ports

EXIT_TIMEOUT_S = 3
"""Time that the server gives requests in flight at its end."""
_SHM = Path("/dev/shm")
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Loopback is never asked through a proxy that the environment names."""
_NOISE = ("CudaDriverHelper", "CUDA driver version", "cuda", "pinned memory")


@dataclass
class Server:
    """A started server. `name` is the instance's, such as decode-0; `shm_prefix` names its regions in /dev/shm."""

    name: str
    host: str
    ports: Ports
    log: Path
    deployment: str
    shm_prefix: str
    popen: subprocess.Popen[bytes]
    started_at_s: float = field(default_factory=time.monotonic)

    _server_name = "tritonserver"

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def grpc_address(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    def exited(self) -> bool:
        return self.popen.poll() is not None

    def ready(self, timeout_s: float = 1.0) -> bool:
        """Whether the server says that every model is loaded."""
        url = f"http://{self.host}:{self.ports.http}/v2/health/ready"
        try:
            with _DIRECT.open(url, timeout=timeout_s) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def wait_ready(self, timeout_s: float) -> None:
        """Raises Unavailable: the server ended, or is not ready in time; with the log's last error."""
        until_s = time.monotonic() + timeout_s
        while not self.ready():
            if self.exited():
                raise Unavailable(f"{self.name}: tritonserver ended at start: {self.reason()}; log: {self.log}")
            if time.monotonic() >= until_s:
                raise Unavailable(
                    f"{self.name}: tritonserver is not ready after {timeout_s:g} s: {self.reason()}; log: {self.log}"
                )
            time.sleep(0.05)

    def family(self) -> list[process.Process]:
        """The server and its Python stubs, one for each model instance; what is dead is missing or a zombie."""
        found = [own] if (own := process.look(self.pid)) is not None else []
        for child in process.children(self.pid):
            if child.name == install.STUB[:15]:  # comm is cut
                found.append(child)
            elif child.name == self._server_name:  # a rank under mpirun
                stubs = process.children(child.pid)
                found += [child, *(each for each in stubs if each.name == install.STUB[:15])]
        return found

    def reason(self) -> str:
        """The error in the log that most likely explains a failed start."""
        with contextlib.suppress(OSError):
            return failure(self.log.read_text(errors="replace"))
        return "no log was written"

    def stop(self, grace_s: float = EXIT_TIMEOUT_S + 1) -> None:
        """End server and stubs and free their shared memory. Idempotent; at most `grace_s` and a little."""
        if not self.exited() and grace_s > 0:
            self.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace_s)
        own = [each for each in process.marked(self.deployment) if each.session == self.pid]
        process.kill(own, grace_s=0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(5)
        unlink_shm(self.shm_prefix)


def start(
    installation: Installation,
    repository: Path,
    run_dir: Path,
    *,
    name: str,
    host: str,
    ports: Ports,
    deployment: str,
    env: Mapping[str, str] | None = None,
    world_size: int = 1,
) -> Server:
    """Start a server on `repository`; returns at once, see `Server.wait_ready`. `env` is added to its environment.
    `world_size` above 1: so many ranks under mpirun (`mpi`).

    The server's log goes to RUN_DIR/logs/NAME.log, its predecessor's to NAME.log.1.
    """
    log = run_dir / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    shm_prefix = f"kvt-{deployment}-{name}-"
    full_env = {**environment(installation), process.MARK: deployment, **(env or {})}
    line = [str(installation.binary), *flags(installation, repository, run_dir, host, ports, shm_prefix)]
    if world_size > 1:
        line = mpi.mpirun_line(line, world_size)
        full_env |= mpi.ENVIRONMENT
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        popen = subprocess.Popen(
            line,
            env=full_env,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    return Server(name, host, ports, log, deployment, shm_prefix, popen)


def flags(
    installation: Installation, repository: Path, run_dir: Path, host: str, ports: Ports, shm_prefix: str
) -> list[str]:
    """Complete configs are demanded (auto-complete starts a second stub for each model); only `host` is bound."""
    chosen = [
        f"--model-repository={repository}",
        f"--http-address={host}",
        f"--http-port={ports.http}",
        "--http-thread-count=4",
        f"--grpc-address={host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={host}",
        f"--metrics-port={ports.metrics}",
        "--allow-gpu-metrics=false",
        "--allow-cpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
        "--disable-auto-complete-config",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
    ]
    backends = backend_dir(installation, run_dir)
    return [*chosen, f"--backend-directory={backends}"] if backends else chosen


def unlink_shm(prefix: str) -> list[str]:
    """Remove what a dead server left in /dev/shm; the names that went."""
    gone = []
    for region in sorted(_SHM.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):
            region.unlink()
            gone.append(region.name)
    return gone


def failure(log: str) -> str:
    """The most telling line of a tritonserver log: a model's own error before Triton's talk about it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    own = [
        line for line in lines if re.match(r"(kvtool\.errors\.)?[A-Z]\w*(Error|Refused|Missing|Unavailable): ", line)
    ]
    if own:
        return own[-1]
    spoken = [re.sub(r"^[EF]\d{4} [\d:.]+ \d+ \S+\] ?", "", line) for line in lines if re.match(r"[EF]\d{4} ", line)]
    told = [line.strip('"') for line in spoken if not any(noise in line for noise in _NOISE)]
    if told:
        return told[0]
    return lines[-1] if lines else "the log is empty"
