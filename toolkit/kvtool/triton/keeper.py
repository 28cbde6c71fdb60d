"""The pool of a deployment: started with it, watched, started again when no rank is left.

A pool that died takes nothing with it but its blocks: servers compute what they cannot fetch, and the front leaves the
prefill stage out until the pool is back. Dead ranks are the pool's own affair, even all of them: its keeper starts them
again (`kvtool.pool.keeper`). Here the keeper is watched, and the pool started anew if it does not come back so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtool.config.spec import Spec
from kvtool.engine.manifest import read_manifest
from kvtool.errors import KvtoolError
from kvtool.kv.layout import KVLayout
from kvtool.pool.config import PoolConfig
from kvtool.pool.state import FILE, PoolState, read_state, runs

log = logging.getLogger(__name__)

LOOK_S = 0.5
BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
HEAL_S = 20.0
"""How long a pool without ranks is left to its keeper."""


class PoolKeeper:
    """`on_change` is called after each change of state, in the supervisor's loop."""

    def __init__(self, spec: Spec, run_dir: Path, on_change: Callable[[], None]) -> None:
        self._spec, self._on_change = spec, on_change
        self._dir = run_dir / "pool"
        self.state_file = self._dir / FILE
        self.up = False
        self._alive: list[int] = []
        self._restarts, self._failures, self._last_error = 0, 0, ""
        self._down_since_s: float | None = None

    async def start(self) -> None:
        """Raises KvtoolError: the pool does not start."""
        from kvtool.pool.launch import start_pool

        self._dir.mkdir(mode=0o700, exist_ok=True)
        await asyncio.to_thread(start_pool, self._config(), self._dir)
        self._look()

    async def keep(self) -> None:
        """Watch for ever; start the pool again when none of its ranks is left."""
        while True:
            await asyncio.sleep(LOOK_S)
            before = self._alive
            self._look()
            if self._alive != before:
                log.warning("pool ranks changed alive=%d of=%d", len(self._alive), self._spec.pool.ranks)
                self._on_change()
            if self.up:
                self._down_since_s = None
                await self._attach()
            elif self._hopeless(time.monotonic()):
                await self._restart()

    async def stop(self) -> None:
        from kvtool.pool.launch import stop_pool

        await asyncio.to_thread(stop_pool, self._dir)
        self.up, self._alive = False, []

    def state(self) -> dict[str, Any]:
        return {
            "state": "up" if self.up else "down",
            "ranks": self._spec.pool.ranks,
            "ranks_alive": len(self._alive),
            "pids": list(self._alive),
            "restarts": self._restarts + self._ranks_started(),
            "last_error": self._last_error,
            "state_file": str(self.state_file),
        }

    async def _attach(self) -> None:
        """A keeper that was killed took nothing with it; leave another."""
        from kvtool.pool.keeping import attach_keeper, keeper_status

        if not keeper_status(self._dir).runs:
            try:
                if await asyncio.to_thread(attach_keeper, self._dir):
                    log.warning("the pool's keeper had died; it has another")
            except KvtoolError as error:
                self._last_error = str(error)

    def _hopeless(self, now_s: float) -> bool:
        """No rank lives, and the keeper is gone, or has had its time."""
        from kvtool.pool.keeping import keeper_status

        if self._down_since_s is None:
            self._down_since_s = now_s
        return not keeper_status(self._dir).runs or now_s - self._down_since_s >= HEAL_S

    async def _restart(self) -> None:
        self._restarts += 1
        self._down_since_s = None
        await asyncio.sleep(BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)])
        self._failures += 1
        try:
            with contextlib.suppress(KvtoolError):
                await self.stop()  # what is left of it: the launcher, shared memory
            await self.start()
            self._failures, self._last_error = 0, ""
        except KvtoolError as error:
            self._last_error = str(error)
            log.warning("pool does not start error=%s", error)
        self._on_change()

    def _ranks_started(self) -> int:
        """By the pool's own keeper."""
        from kvtool.pool.keeping import keeper_status

        return sum(keeper_status(self._dir).starts.values())

    def _look(self) -> None:
        """Which ranks live, from the state file and /proc: no message, about 50 us."""
        try:
            state: PoolState | None = read_state(self.state_file)
        except KvtoolError as error:
            state, self._last_error = None, str(error)
        ranks = state.ranks if state else []
        self._alive = [rank.pid for rank in ranks if rank.alive and runs(rank.pid, rank.started)]
        self.up = bool(self._alive)

    def _config(self) -> PoolConfig:
        pool = self._spec.pool
        return PoolConfig(
            layout=_layout(self._spec),
            ranks=pool.ranks,
            dram_size=pool.dram_size,
            file_size=pool.file_size,
            file_dir=pool.file_dir,
            remote=pool.remote or "",
            remote_size=pool.remote_size,
            file_key=pool.file_key,
            write=pool.write,
            evict=pool.evict,
            flush_s=pool.flush,
            lease_term_s=pool.lease_term,
            copies=pool.copies,
            metrics=pool.metrics,
            ucx=pool.path != "shm",
            name=self._spec.name,
            start_timeout_s=self._spec.supervise.start_timeout,
        )


def _layout(spec: Spec) -> KVLayout:
    """Of the pool's blocks: the engine's, or one stored shard of it where ranks share a block."""
    if spec.target == "torch":
        return read_manifest(spec.engine).layout
    from kvtool.triton.target import target_of

    return target_of(spec).pool_layout
