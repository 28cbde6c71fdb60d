"""A deployment driven as a person drives it: by the command line, over gRPC, and by killing its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from leftovers import leftovers
from stream import Answer, Stream, ask, tensor

KVTOOL = [sys.executable, "-m", "kvtool.cli.main"]


def kvtool(*words: str, check: bool = True, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*KVTOOL, *words], capture_output=True, text=True, timeout=timeout_s)
    if check:
        assert done.returncode == 0, f"kvtool {' '.join(words)} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def until(said: str, happens: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Poll until `happens` gives something true; fails with what it was waiting for."""
    end_s = time.monotonic() + timeout_s
    while True:
        found = happens()
        if found:
            return found
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {said}"
        time.sleep(0.1)


class Deployed:
    """One running deployment; `folder` holds its spec and its run directory."""

    def __init__(self, folder: Path, engine: Path, more: str = "", **settings: str) -> None:
        """`more`: lines of the spec; `settings` by --set, `a__b` for a.b."""
        self.run_dir = folder / "state"
        self.spec = folder / "spec.yaml"
        self._prefixes: set[str] = set()
        lines = ["version: 1", "name: e2e", f"engine: {engine}", "run_dir: state"]
        self.spec.write_text("\n".join(lines) + "\n" + more)
        overrides = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
        try:
            self.up = kvtool("deploy", "up", str(self.spec), *overrides)
        except BaseException:
            self.down()
            raise
        self._note_names()

    def down(self) -> None:
        self._note_names()
        kvtool("deploy", "down", "--run-dir", str(self.run_dir))

    def left(self) -> set[str]:
        """What is there of it after `down`; must be nothing."""
        return leftovers(self.run_dir, self._prefixes)

    def _note_names(self) -> None:
        """How the shared memory of the deployment and of its pool is called."""
        for file, key, form in (("deploy.json", "deployment", "kvt-{}-"), ("pool/launch.json", "prefix", "{}-")):
            try:
                self._prefixes.add(form.format(json.loads((self.run_dir / file).read_text())[key]))
            except FileNotFoundError:
                pass

    def status(self) -> dict[str, Any]:
        done = kvtool("deploy", "status", "--run-dir", str(self.run_dir), "--json", check=False)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def server(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(each for each in self.status()["servers"] if each["name"] == name)
        return found

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server('front-0')['grpc_port']}"

    def ask(self, prompt: str | bytes, max_tokens: int = 16, **options: Any) -> Answer:
        return ask(self.url, prompt, max_tokens, **options)

    def stream(self, prompt: str, max_tokens: int = 16, **options: Any) -> Stream:
        return Stream(self.url, prompt, max_tokens, **options)

    def stub(self, name: str, model: str) -> int:
        """The process of one model of a server: found as a person would, by its command line."""
        for pid in self.server(name)["stubs"]:
            if f"/{model}/" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
        raise AssertionError(f"{name} has no process of {model}")

    def rank_pids(self) -> list[int]:
        return [rank["pid"] for rank in json.loads((self.run_dir / "pool" / "pool.json").read_text())["ranks"]]

    def worker(self, name: str) -> dict[str, Any]:
        """What a worker says it holds, asked over its own server."""
        model = f"{name.split('-')[0]}_engine"
        client = grpc.InferenceServerClient(f"127.0.0.1:{self.server(name)['grpc_port']}")
        got: list[Any] = []
        try:
            client.start_stream(callback=lambda result, error: got.append((result, error)))
            request = np.array([json.dumps({"op": "status"}).encode()], dtype=object)
            client.async_stream_infer(model, [tensor("REQUEST", request, "BYTES")])
            until(f"{name} to answer status", lambda: got, 10)
        finally:
            client.stop_stream()
            client.close()
        result, error = got[0]
        assert error is None, error
        output = "EVENT" if model == "decode_engine" else "HANDOFF"
        said: dict[str, Any] = json.loads(result.as_numpy(output)[0])
        return said

    def held(self) -> list[str]:
        """Everything that anybody holds for a request, in words; empty when all is quiet."""
        found = [f"front: {each}" for each in self.status()["front"].get("in_flight", [])]
        for name in ("prefill-0", "decode-0"):
            said = self.worker(name)
            found += [f"{name}: {line}" for line in said["held"]]
            if said.get("blocks_free") != said.get("blocks_total"):
                found.append(f"{name}: {said['blocks_free']} of {said['blocks_total']} blocks are free")
        if not (self.run_dir / "pool").exists():
            return found
        done = kvtool("pool", "audit", "--run-dir", str(self.run_dir / "pool"), "--json", check=False)
        for rank in json.loads(done.stdout)["ranks"]:
            found += [f"pool rank {rank['rank']}: {line}" for line in rank["audit"] if line["kind"] != "transient"]
        return found


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
