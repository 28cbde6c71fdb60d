"""Running requests on a live deployment, beside its online traffic.

One event loop in a thread of its own, one gRPC channel. Requests go with `PRIORITY`, the class that servers hold back
while online requests run, and the deployment's refusals decide how many run at once (see `rules.Pressure`). A
deployment that restarts meanwhile may have another address; it is looked up again for every attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

from kvtool.batch.target import Ended, Ready, Tell
from kvtool.errors import Cancelled, KvtoolError
from kvtool.serve.turns import BATCH_PRIORITY
from kvtool.triton.client import stream_async
from kvtool.triton.state import front_url

_GRACE_S = 5.0


class LiveTarget:
    """`url`: the front's gRPC address; else that of the deployment in `run_dir`."""

    def __init__(self, url: str | None, run_dir: Path | None, *, slots: int) -> None:
        assert url is not None or run_dir is not None, "a deployment has an address"
        self.slots_max, self._url, self._run_dir = slots, url, run_dir
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvtool-batch", daemon=True)
        self._thread.start()

    def start(self, ready: Ready, tell: Tell) -> None:
        self._loop.call_soon_threadsafe(self._spawn, ready, tell)

    def cancel(self, name: str) -> None:
        def stop() -> None:
            if name in self._tasks:
                self._tasks[name].cancel()

        self._loop.call_soon_threadsafe(stop)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_GRACE_S + 5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        self._loop.close()

    def _spawn(self, ready: Ready, tell: Tell) -> None:
        self._tasks[ready.name] = self._loop.create_task(self._run(ready, tell))

    async def _run(self, ready: Ready, tell: Tell) -> None:
        ended = Ended(ready.number, ready.name, error=Cancelled(f"{ready.name}: cancelled"))
        try:
            ended = await self._ask(ready)
        except asyncio.CancelledError:
            pass
        except KvtoolError as error:
            ended = Ended(ready.number, ready.name, error=error)
        except Exception as error:
            failed = KvtoolError(f"{ready.name}: the client failed: {type(error).__name__}: {error}")
            ended = Ended(ready.number, ready.name, error=failed)
        finally:
            self._tasks.pop(ready.name, None)
            tell(ended)

    async def _ask(self, ready: Ready) -> Ended:
        line = ready.line
        assert not isinstance(line.prompt, tuple), "intake lets no token ids through to a deployment"
        url = self._url
        if url is None:
            assert self._run_dir is not None
            url = front_url(self._run_dir)
        options: dict[str, Any] = {
            "max_tokens": ready.max_tokens,
            "temperature": line.temperature,
            "top_k": line.top_k,
            "top_p": line.top_p,
            "seed": line.seed,
            "priority": BATCH_PRIORITY,
            "deadline_ms": max(1, int(ready.deadline_s * 1e3)),
            "ignore_eos": line.ignore_eos,
        }
        texts: list[str] = []
        pieces = stream_async(
            url,
            line.prompt,
            request_id=ready.name,
            stop=line.stop,
            timeout_s=ready.deadline_s + _GRACE_S,
            **options,
        )
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                texts.append(piece.text)
                if piece.finish_reason:
                    usage = {
                        "prompt_tokens": int(piece.usage.get("prompt_tokens", len(ready.tokens))),
                        "completion_tokens": int(piece.usage.get("completion_tokens", 0)),
                        "hit_tokens": dict(piece.usage.get("hit_tokens") or {}),
                    }
                    return Ended(ready.number, ready.name, "".join(texts), piece.finish_reason, usage)
        raise KvtoolError(f"{ready.name}: the stream ended before the answer did")

    async def _end(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_GRACE_S)
