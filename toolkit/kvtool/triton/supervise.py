"""The supervisor: starts pool and servers, notices what died or hangs, and starts it again.

One task for each server: start, wait for ready and a canary inference, then watch. Watching is cheap and looks often:
an exited server, a stub that is dead or stopped (Triton keeps saying ready, and streams of a dead stub stay silent for
ever, so nobody else would notice). The canary, a real inference, looks less often and notices the rest. A server that
failed is killed at once, since only then do the streams of its clients end, and comes back on new ports under a new
epoch; the front keeps its ports. The pool has its own watch (`keeper`); without it the servers go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtool.config.check import check
from kvtool.config.spec import Spec
from kvtool.engine.manifest import read_manifest
from kvtool.engine.trtllm.connector import CONTROL_ENV
from kvtool.engine.trtllm.version import Adapter
from kvtool.errors import KvtoolError, Unavailable
from kvtool.triton import install, process, server, settings
from kvtool.triton.canary import canary
from kvtool.triton.instance import Instance
from kvtool.triton.keeper import PoolKeeper
from kvtool.triton.peers import FILE as PEERS_FILE
from kvtool.triton.peers import Peers, write_whole
from kvtool.triton.ports import Ports, choose
from kvtool.triton.render import render
from kvtool.triton.rpc import Links
from kvtool.triton.state import CONTROL_SUFFIX, FILE, clean, locked, make_run_dir, read_state_or_nothing
from kvtool.triton.target import target_of, world_size

log = logging.getLogger("kvtool.triton.supervise")  # also when run by -m

LOOK_S = 0.25
"""Between two looks at processes."""
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Before the n-th restart in a row; a server that served for HEALTHY_S starts over."""
HEALTHY_S = 60.0
SOCKET_PATH_MAX = 107
"""Bytes; what the kernel takes for a Unix socket."""
_CANCEL_S = 2.0


class Supervisor:
    """One deployment. `run` returns when it was asked to stop, with everything stopped."""

    def __init__(self, spec: Spec, run_dir: Path, progress: Callable[[dict[str, Any]], None] | None = None) -> None:
        self.spec, self.run_dir = spec, run_dir
        self.deployment = uuid.uuid4().hex[:8]
        self._progress = progress
        self._phase, self._error = "starting", ""
        self._installation = install.find(spec.tritonserver)
        self._world_size, with_pool = 1, spec.pool.enabled
        roles = [("front", 1), ("decode", spec.decode.instances)]
        prefill = with_pool  # else there is nobody to hand a prefill's blocks to
        if spec.target == "tensorrt_llm":
            target = target_of(spec)
            with_pool = target.connector
            prefill = with_pool or target.handoff == "transceiver"
            if target.can.adapter is Adapter.ENGINE_1_2:  # one server has both roles
                self._world_size, prefill, roles = world_size(target), False, [("front", 1), ("decode", 1)]
        names = [*roles[:1], ("prefill", spec.prefill.instances), *roles[1:]] if prefill else roles
        self.instances = [Instance(f"{role}-{i}", role) for role, count in names for i in range(count)]
        self._pool = PoolKeeper(spec, run_dir, self._publish) if with_pool else None
        self._links: Links | None = None
        self._published: Peers | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start everything, then keep it running until SIGTERM or SIGINT.

        Raises:
            KvtoolError: something did not start the first time; all of it is stopped then.
        """
        loop = asyncio.get_running_loop()
        os.environ[process.MARK] = self.deployment  # for every child; this process itself stays unmarked
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        self._links = Links()
        self._publish()
        try:
            await self._until_stopped(self._start())
            if not self._stopping.is_set():
                self._phase = "running"
                self._publish()
                await self._until_stopped(self._keep())
        except KvtoolError as error:
            self._phase, self._error = "failed", str(error)
            raise
        finally:
            await self._stop()

    async def _until_stopped(self, work: Any) -> None:
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for pending in (task, stop):
                pending.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _start(self) -> None:
        check(self.spec, read_manifest(self.spec.engine))
        install.preflight(self._installation)
        render(self.spec, self.run_dir / "repo")
        if self._pool:
            await self._pool.start()
        await _all([self._first_start(instance) for instance in self.instances])

    async def _first_start(self, instance: Instance) -> None:
        try:
            await self._bring_up(instance)
        except Unavailable:
            ports_taken = instance.server is not None and "in use" in instance.server.reason()
            if not ports_taken or self._given_ports(instance):
                raise
            await self._bring_down(instance)
            await self._bring_up(instance)

    async def _keep(self) -> None:
        tasks = [self._mind(instance) for instance in self.instances]
        await _all([*tasks, self._pool.keep()] if self._pool else tasks)

    async def _mind(self, instance: Instance) -> None:
        """Watch one instance for ever, over its restarts."""
        while True:
            began_s = time.monotonic()
            reason = await self._watch(instance)
            if time.monotonic() - began_s > HEALTHY_S:
                instance.failures = 0
            while True:
                instance.last_error, instance.state = reason, "restarting"
                instance.restarts += 1
                log.warning("server failed name=%s restarts=%d reason=%s", instance.name, instance.restarts, reason)
                self._publish()
                await self._bring_down(instance)
                await asyncio.sleep(BACKOFF_S[min(instance.failures, len(BACKOFF_S) - 1)])
                instance.failures += 1
                try:
                    await self._bring_up(instance)
                    break
                except (KvtoolError, OSError) as error:
                    reason = str(error)

    async def _bring_up(self, instance: Instance) -> None:
        """Start, wait for ready, send a canary, publish the address."""
        instance.epoch += 1
        instance.ports = self._ports(instance)
        instance.server = started = server.start(
            self._installation,
            self.run_dir / "repo" / instance.role,
            self.run_dir,
            name=instance.name,
            host=self.spec.front.host,
            ports=instance.ports,
            deployment=self.deployment,
            env=self._env(instance),
            world_size=self._world_size if instance.role == "decode" else 1,
        )
        self._publish()
        await asyncio.to_thread(started.wait_ready, self.spec.supervise.start_timeout)
        instance.watched = await asyncio.to_thread(started.family)
        await self._canary(instance)
        instance.state = "serving"
        log.info("server ready name=%s pid=%d seconds=%.2f", instance.name, started.pid, _age(started))
        self._publish()

    async def _bring_down(self, instance: Instance) -> None:
        """At once: what is wrong with it was established, and its clients wait for their streams to end."""
        if instance.server is not None:
            await asyncio.to_thread(instance.server.stop, 0.0)
        if instance.role == "front":
            await asyncio.gather(*(self._cancel_all(other) for other in self.instances if other.state == "serving"))

    async def _cancel_all(self, instance: Instance) -> None:
        """Nobody waits any more for what the dead front had asked for."""
        assert self._links is not None
        with contextlib.suppress(KvtoolError):
            await self._links.operate(instance.peer, {"op": "cancel_all"}, _CANCEL_S)

    async def _watch(self, instance: Instance) -> str:
        """Returns when the instance must be restarted, with the reason."""
        assert instance.server is not None
        canary = asyncio.ensure_future(self._canaries(instance))
        try:
            stopped = 0
            while True:
                if instance.server.exited():
                    return f"tritonserver ended ({instance.server.popen.returncode}): {instance.server.reason()}"
                states = instance.states()
                if "gone" in states:
                    return "one of its processes died"
                stopped = stopped + 1 if "stopped" in states else 0
                if stopped >= 4:
                    return "one of its processes is stopped"
                if canary.done():
                    return canary.result()
                await asyncio.sleep(LOOK_S)
        finally:
            canary.cancel()
            await asyncio.gather(canary, return_exceptions=True)

    async def _canaries(self, instance: Instance) -> str:
        while True:
            await asyncio.sleep(self.spec.supervise.canary_interval)
            try:
                await self._canary(instance)
            except KvtoolError as error:
                return f"the canary failed: {error}"
            except Exception as bug:  # what nobody foresaw costs this server a restart, not all of them their lives
                log.exception("canary failed name=%s", instance.name)
                return f"the canary failed: {type(bug).__name__}: {bug}"
            self._publish()

    async def _canary(self, instance: Instance) -> None:
        """Raises KvtoolError: it failed, or is late while the engine does nothing else."""
        assert self._links is not None
        instance.canary_took_s = await canary(self._links, instance.peer, self.spec.supervise.canary_timeout)
        instance.canary_at_s = time.time()

    async def _stop(self) -> None:
        if self._phase != "failed":
            self._phase = "stopping"
        self._publish()
        running = [instance.server for instance in self.instances if instance.server is not None]
        await asyncio.gather(*(asyncio.to_thread(each.stop) for each in running), return_exceptions=True)
        if self._links:
            await self._links.close()
        if self._pool:
            with contextlib.suppress(KvtoolError):
                await self._pool.stop()
        for line in clean(self.run_dir, {"deployment": self.deployment}):
            log.info("cleaned: %s", line)
        if self._phase == "failed":
            self._publish()  # so that whoever waits reads why

    # What others read.

    def _publish(self) -> None:
        """Write the address file and the state. A full disk must not end what runs: the next change writes again."""
        state = self.state()
        try:
            self._write_peers()
            write_whole(self.run_dir / FILE, state)
        except OSError as error:
            log.warning("state not written error=%s", error)
        if self._progress:
            self._progress(state)

    def _write_peers(self) -> None:
        serving = tuple(each.peer for each in self.instances if each.state == "serving" and each.role != "front")
        peers = Peers(serving, bool(self._pool and self._pool.up))
        if self._phase in ("starting", "running") and peers != self._published:
            peers.write(self.run_dir / PEERS_FILE)
            self._published = peers

    def state(self) -> dict[str, Any]:
        myself = process.look(os.getpid())
        assert myself is not None
        return {
            "deployment": self.deployment,
            "name": self.spec.name,
            "phase": self._phase,
            "error": self._error,
            "host": self.spec.front.host,
            "supervisor": {"pid": myself.pid, "started_ticks": myself.started_ticks},
            "servers": [instance.fields() for instance in self.instances],
            "pool": self._pool.state() if self._pool else {"state": "off"},
        }

    def _env(self, instance: Instance) -> dict[str, str]:
        env = {settings.INSTANCE: instance.name, settings.PEERS: str(self.run_dir / PEERS_FILE)}
        if self._pool:
            env[settings.POOL] = str(self._pool.state_file)
        if self.spec.target == "tensorrt_llm" and instance.role in ("prefill", "decode"):
            socket = self.run_dir / f"{instance.name}{CONTROL_SUFFIX}"
            if len(os.fsencode(socket)) <= SOCKET_PATH_MAX:  # else the worker makes one of its own
                env[CONTROL_ENV] = str(socket)
            env |= getattr(self.spec.tensorrt_llm, instance.role).env
        return env

    def _ports(self, instance: Instance) -> Ports:
        """The front's stay over its restarts, so that clients find it again; others are new each time."""
        front = self.spec.front
        if instance.role != "front":
            return choose(front.host)
        return instance.ports or choose(front.host, front.http_port, front.grpc_port, front.metrics_port)

    def _given_ports(self, instance: Instance) -> bool:
        front = self.spec.front
        return instance.role == "front" and bool(front.http_port or front.grpc_port or front.metrics_port)


async def _all(work: list[Any]) -> None:
    """Run all; the first that raises ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _age(started: server.Server) -> float:
    return time.monotonic() - started.started_at_s


def main(run_dir: Path, progress: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Supervise the deployment whose spec lies in RUN_DIR/spec.json, in this process, until it is asked to stop."""
    make_run_dir(run_dir)
    with locked(run_dir):
        left = read_state_or_nothing(run_dir)
        if left is not None:
            clean(run_dir, left)
        spec = Spec.model_validate(json.loads((run_dir / "spec.json").read_text(encoding="utf-8")))

        async def supervise() -> None:
            await Supervisor(spec, run_dir, progress).run()

        asyncio.run(supervise())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        main(Path(sys.argv[1]))
    except KvtoolError as refused:
        log.error("%s", refused)
        sys.exit(refused.exit_code)
