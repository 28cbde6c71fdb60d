"""Running requests on an engine in this process, with a pool in this process: no servers, no MPI.

One decode worker does it all: it computes what the pool does not have, puts a prompt's blocks there as soon as they are
made, and decodes many requests together. The answers are those of one request at a time, token for token, since the KV
of a position depends on the tokens before it and on nothing else (see `engine.base`).
"""

from __future__ import annotations

import threading
from pathlib import Path

from kvtool.batch.target import Ended, Published, Ready, Tell
from kvtool.engine.load import load_engine
from kvtool.engine.manifest import read_manifest
from kvtool.engine.sampling import Sampling
from kvtool.engine.tokenizer import Tokenizer
from kvtool.errors import Cancelled
from kvtool.pool.embedded import EmbeddedPool
from kvtool.serve.decode import DecodeWorker
from kvtool.serve.local import event_text
from kvtool.serve.options import DecodeOptions, PoolOptions
from kvtool.serve.request import Event, Finish, Request

_SHARE = 0.8
"""Of the engine's time that prompts may take while a batch decodes: nobody waits for a token, so a full batch first."""
_CHUNK_TOKENS = 256


class EngineTarget:
    """`kv_blocks`: of the engine's own memory. `pool_size` 0: nothing is kept, every prompt is computed.

    Raises:
        EngineRefused: no engine there that this machine can serve.
    """

    def __init__(
        self,
        engine_dir: Path,
        *,
        slots: int,
        threads: int,
        kv_blocks: int,
        pool_size: int,
        file_size: int = 0,
        file_dir: Path | None = None,
    ) -> None:
        self.slots_max = slots
        engine = load_engine(engine_dir, threads=threads, blocks=kv_blocks, prompt_threads=threads)
        self._tokenizer = Tokenizer(engine_dir)
        self.pool = EmbeddedPool(engine.layout, pool_size, file_size, file_dir) if pool_size else None
        blocks = read_manifest(engine_dir).context_tokens_max // engine.layout.block_tokens
        options = DecodeOptions(
            threads=threads,
            kv_blocks=kv_blocks,
            batch_max=slots,
            queue_max=2 * slots,
            chunk_tokens=_CHUNK_TOKENS,
            recompute_share=_SHARE,
            canonicalise=False,
            put_prompts=True,
            staging_blocks_max=blocks,
            pool=PoolOptions(recompute_if_faster=False),
        )
        self._worker = DecodeWorker(engine, self._tokenizer, self.pool, "batch", options, close_pool=True)
        self._lock = threading.Lock()
        self._texts: dict[str, list[str]] = {}

    def start(self, ready: Ready, tell: Tell) -> None:
        line = ready.line
        request = Request(
            ready.name,
            ready.tokens,
            ready.max_tokens,
            Sampling(line.temperature, line.top_k, line.top_p, line.seed),
            line.stop,
            deadline_s=ready.deadline_s,
            ignore_eos=line.ignore_eos,
        )
        with self._lock:
            self._texts[ready.name] = []
        self._worker.submit(
            request,
            lambda event: self._event(ready, event, tell),
            on_prompt_put=lambda: tell(Published(ready.number, ready.name)),
        )

    def cancel(self, name: str) -> None:
        self._worker.cancel(name)

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        self._worker.close()

    def _event(self, ready: Ready, event: Event, tell: Tell) -> None:
        with self._lock:
            texts = self._texts[ready.name]
        texts.append(event_text(self._tokenizer, event))
        if event.finish is None:
            return
        with self._lock:
            del self._texts[ready.name]
        usage = event.usage
        counts = {
            "prompt_tokens": usage.prompt_tokens if usage else len(ready.tokens),
            "completion_tokens": usage.completion_tokens if usage else 0,
            "hit_tokens": dict(usage.hit_tokens) if usage else {},
            "prefill_s": round(usage.seconds.get("prefill", 0.0), 6) if usage else 0.0,
        }
        error = event.error
        if event.finish is Finish.CANCELLED and error is None:
            error = Cancelled(f"{ready.name}: cancelled")
        finish = event.finish.value if error is None else ""
        tell(Ended(ready.number, ready.name, "".join(texts), finish, counts, error))
