"""Running requests on a live deployment, beside its online traffic.

One event loop in a thread of its own, one gRPC channel to each address that the deployment has had. Requests go with
`BATCH_PRIORITY`, the class that servers hold back while online requests run, and the deployment's refusals decide how
many run at once (see `rules.Pressure`).

A deployment that restarts is no request's fault: what fails because nobody answers is told as `Unreachable`, and is
tried again at whatever address the deployment has by then. When nobody has answered for `PATIENCE_S` the job stops,
resumable.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from kvtool.batch.target import Ended, Published, Ready, Tell
from kvtool.engine.manifest import read_manifest
from kvtool.errors import Cancelled, EngineRefused, KvtoolError, Unavailable, Unreachable
from kvtool.serve.turns import BATCH_PRIORITY
from kvtool.triton.client import client_async, stream_async
from kvtool.triton.state import engine_of, front_url

PATIENCE_S = 300.0
_GRACE_S = 5.0
_DEADLINE_MS_MAX = (1 << 31) - 1


class LiveTarget:
    """`url`: the front's gRPC address; else that of the deployment in `run_dir`, which must serve `model_digest`.

    Raises:
        Unavailable: no deployment runs there.
        EngineRefused: it serves another model.
    """

    def __init__(self, url: str | None, run_dir: Path | None, *, slots: int, model_digest: str = "") -> None:
        assert url is not None or run_dir is not None, "a deployment has an address"
        self.slots_max, self._url, self._run_dir, self._model_digest = slots, url, run_dir, model_digest
        self._tag, self._count = f"batch-{uuid.uuid4().hex[:12]}", itertools.count()
        self._clients: dict[str, Any] = {}
        self._answered_at_s, self._trouble, self._why_not = time.monotonic(), "", ""
        if run_dir is not None and url is None:
            front_url(run_dir)
            self._check_model(run_dir)
        self._deadline_ms_max = _deadline_ms_max(run_dir)
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[str, asyncio.Task[Ended]] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtool-batch", daemon=True)
        self._thread.start()

    def start(self, ready: Ready, tell: Tell) -> None:
        self._loop.call_soon_threadsafe(self._spawn, ready, tell)

    def cancel(self, name: str) -> None:
        def stop() -> None:
            if name in self._tasks:
                self._tasks[name].cancel()

        self._loop.call_soon_threadsafe(stop)

    def trouble(self) -> str:
        if self._trouble or not self._why_not:
            return self._trouble
        if time.monotonic() - self._answered_at_s < PATIENCE_S:
            return ""
        return f"the deployment has not answered for {PATIENCE_S:g} s ({self._why_not})"

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(2 * _GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    # In the loop.

    def _spawn(self, ready: Ready, tell: Tell) -> None:
        task = self._loop.create_task(self._ask(ready, tell))
        self._tasks[ready.name] = task
        # A task that is cancelled before its first step never runs, so its end is told from outside.
        task.add_done_callback(lambda task: self._over(ready, task, tell))

    def _over(self, ready: Ready, task: asyncio.Task[Ended], tell: Tell) -> None:
        del self._tasks[ready.name]
        if task.cancelled():
            tell(Ended(ready.number, ready.name, error=Cancelled(f"{ready.name}: cancelled")))
            return
        error = task.exception()
        if error is None:
            tell(task.result())
        elif isinstance(error, KvtoolError):
            if isinstance(error, Unreachable):
                self._why_not = str(error)
            else:
                self._heard()
            tell(Ended(ready.number, ready.name, error=error))
        else:
            failed = KvtoolError(f"{ready.name}: the client failed: {type(error).__name__}: {error}")
            tell(Ended(ready.number, ready.name, error=failed))

    def _heard(self) -> None:
        self._answered_at_s, self._why_not = time.monotonic(), ""

    async def _ask(self, ready: Ready, tell: Tell) -> Ended:
        line = ready.line
        assert not isinstance(line.prompt, tuple), "intake lets no token ids through to a deployment"
        url = self._address()
        options: dict[str, Any] = {
            "max_tokens": ready.max_tokens,
            "temperature": line.temperature,
            "top_k": line.top_k,
            "top_p": line.top_p,
            "seed": line.seed,
            "priority": BATCH_PRIORITY,
            "deadline_ms": max(1, min(int(ready.deadline_s * 1e3), self._deadline_ms_max)),
            "ignore_eos": line.ignore_eos,
        }
        texts: list[str] = []
        pieces = stream_async(
            url,
            line.prompt,
            # Never that of another job or of an earlier run, whose request may still be on its way out there.
            request_id=f"{self._tag}-{ready.number}-{next(self._count)}",
            stop=line.stop,
            timeout_s=ready.deadline_s + _GRACE_S,
            client=self._client(url),
            **options,
        )
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if not texts:  # prefill has put the prompt's blocks before it hands over to decode
                    self._heard()
                    tell(Published(ready.number, ready.name))
                texts.append(piece.text)
                if piece.finish_reason:
                    return Ended(ready.number, ready.name, "".join(texts), piece.finish_reason, _usage(ready, piece))
        raise Unreachable(f"{url}: the stream ended before the answer did")

    def _address(self) -> str:
        """Raises Unreachable: there is none now."""
        if self._url is not None:
            return self._url
        assert self._run_dir is not None
        try:
            url = front_url(self._run_dir)
            if url not in self._clients:
                self._check_model(self._run_dir)
        except EngineRefused as error:
            self._trouble = str(error)
            raise Unreachable(str(error)) from None
        except Unavailable as error:
            raise Unreachable(str(error)) from None
        return url

    def _check_model(self, run_dir: Path) -> None:
        found = read_manifest(engine_of(run_dir)).model_digest if self._model_digest else ""
        if found != self._model_digest:
            raise EngineRefused(
                f"{run_dir}: the job was checked with model {self._model_digest[:12]}, the deployment serves "
                f"{found[:12]}; deploy that engine again, or submit a new job"
            )

    def _client(self, url: str) -> Any:
        if url not in self._clients:
            self._clients[url] = client_async(url)
        return self._clients[url]

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_GRACE_S)
        while self._clients:
            await self._clients.popitem()[1].close()


def _usage(ready: Ready, piece: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": int(piece.usage.get("prompt_tokens", len(ready.tokens))),
        "completion_tokens": int(piece.usage.get("completion_tokens", 0)),
        "hit_tokens": dict(piece.usage.get("hit_tokens") or {}),
        "prefill_s": sum(stage.get("prefill", 0.0) for stage in (piece.usage.get("seconds") or {}).values()),
    }


def _deadline_ms_max(run_dir: Path | None) -> int:
    """A front refuses a deadline above its own; what is shorter there is shorter for the job."""
    try:
        assert run_dir is not None
        spec = json.loads((run_dir / "spec.json").read_text(encoding="utf-8"))
        return min(_DEADLINE_MS_MAX, int(float(spec["limits"]["deadline"]) * 1e3))
    except (AssertionError, OSError, ValueError, KeyError, TypeError):
        return _DEADLINE_MS_MAX
