"""One process, no servers, no pool: text in, text out.

What `kvtool generate --local` runs, and the plainest answer, which every other way to serve must give token for token.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtool.engine.base import Engine
from kvtool.serve.decode import DecodeWorker
from kvtool.serve.options import DecodeOptions
from kvtool.serve.request import Event, Finish, Request, Sampling, Usage
from kvtool.serve.text import Decoder

_GRACE_S = 60.0
"""Over the request's own deadline, after which a silent worker is a bug and not a slow one."""


@dataclass(frozen=True)
class Piece:
    """What one step added. The last piece has `finish` and `usage`."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish | None = None
    usage: Usage | None = None


def event_text(decoder: Decoder, event: Event) -> str:
    """The text of one event, from its token ids alone; see `Event`."""
    before = len(decoder.decode(event.context)) if event.context else 0
    text = decoder.decode([*event.context, *event.tokens])[before:]
    return text[: len(text) - event.cut_chars]


def pieces(worker: DecodeWorker, decoder: Decoder, request: Request) -> Iterator[Piece]:
    """Run `request` and yield its text as it comes. Leaving the iterator early cancels the request.

    Raises:
        KvtoolError: whatever ended the request.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    worker.submit(request, events.put)
    try:
        while True:
            event = events.get(timeout=request.deadline_s + _GRACE_S)
            if event.error is not None:
                raise event.error
            yield Piece(event_text(decoder, event), event.tokens, event.finish, event.usage)
            if event.finish is not None:
                return
    finally:
        worker.cancel(request.request_id)


def generate(
    engine_dir: Path,
    text: str | Sequence[dict[str, str]],
    *,
    max_tokens: int = 256,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    threads: int = 2,
    deadline_s: float = 600.0,
) -> Iterator[Piece]:
    """Text from the engine in `engine_dir`; `text` is a prompt, or chat messages of role and content.

    Raises:
        EngineRefused: no engine there that this machine can serve.
        RequestRefused: the request is wrong; the sentence has the numbers.
    """
    from kvtool.engine.load import load_engine
    from kvtool.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(engine_dir)
    prompt = tuple(tokenizer.encode(text if isinstance(text, str) else tokenizer.chat(text)))
    request = Request(
        "local", prompt, max_tokens, sampling or Sampling(), tuple(stop), deadline_s=deadline_s, ignore_eos=ignore_eos
    )
    engine: Engine = load_engine(engine_dir, threads=threads, blocks=_blocks(engine_dir, request))
    worker = DecodeWorker(engine, tokenizer, options=DecodeOptions(threads=threads, chunk_tokens=512))
    try:
        yield from pieces(worker, tokenizer, request)
    finally:
        worker.close()


def _blocks(engine_dir: Path, request: Request) -> int:
    """KV memory for this one request."""
    from kvtool.engine.manifest import read_manifest

    manifest = read_manifest(engine_dir)
    tokens = min(len(request.tokens) + max(request.max_tokens, 1), manifest.context_tokens_max)
    return max(1, -(-tokens // manifest.kv.block_tokens))
