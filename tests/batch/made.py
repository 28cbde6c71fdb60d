"""Jobs for tests: a made input, a model of words without a model, and targets that answer at once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvtool.batch.intake import Checks, take_in
from kvtool.batch.job import INDEX, JOB, JOURNAL, Told, write_whole
from kvtool.batch.journal import Journal
from kvtool.batch.line import TEXT_URL
from kvtool.batch.rules import Limits
from kvtool.batch.store import Store
from kvtool.batch.target import Ended, Published, Ready, Tell
from kvtool.batch.work import Worked, work
from kvtool.errors import Cancelled, KvtoolError

BLOCK, CONTEXT = 4, 64


class Bytes:
    """A tokenizer: one token a byte."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"{message['role'][0]}:{message['content']};" for message in messages)


def write_input(path: Path, prompts: Sequence[str], max_tokens: int = 4) -> Path:
    with path.open("w") as file:
        for number, prompt in enumerate(prompts):
            body = {"prompt": prompt, "max_tokens": max_tokens}
            file.write(json.dumps({"custom_id": f"r{number}", "url": TEXT_URL, "body": body}) + "\n")
    return path


def prompts(count: int, seed: int = 1) -> list[str]:
    rng = Random(seed)
    heads = ["".join(rng.choice("abcdef") for _ in range(12)) for _ in range(5)]
    return [rng.choice(heads) + "".join(rng.choice("uvwxyz") for _ in range(rng.randrange(9))) for _ in range(count)]


def make_job(folder: Path, source: Path, **changes: Any) -> Told:
    """A job directory as `submit.make` lays it, on `Bytes` instead of an engine's tokenizer."""
    folder.mkdir()
    store = Store.make(folder / INDEX)
    taken = take_in(source, folder, store, Bytes(), Checks(CONTEXT, BLOCK, 8), lambda done, total: None)
    store.arrange(BLOCK, 1000)
    store.close()
    Journal.make(folder / JOURNAL)
    fields: dict[str, Any] = {
        "job_id": "job",
        "source": str(source),
        "source_size": source.stat().st_size,
        "source_digest": taken.digest,
        "output": str(folder.parent / "out.jsonl"),
        "kind": "jsonl",
        "where": "engine",
        "engine": "none",
        "model": "bytes",
        "model_digest": "0",
        "block_tokens": BLOCK,
        "max_tokens": 8,
        "requests": taken.requests,
        "rejected": taken.rejected,
        "attempts": 3,
        "request_s": 60.0,
        "job_s": None,
        "tokens": None,
        "ordered": True,
        "pool_size": 1 << 20,
        "file_size": 0,
        "concurrent": 4,
        "threads": 1,
        "created_s": 0.0,
    }
    told = Told(**{**fields, **changes})
    write_whole(folder / JOB, told.model_dump_json().encode())
    return told


def full_work(folder: Path, target: Echo, **options: Any) -> Worked:
    """`work`, with `Bytes` as the tokenizer of the job's engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtool.batch.work.Tokenizer", lambda directory: Bytes())
        return work(folder, target=target, limits=Limits(attempts=3, backoff_s=0.001), **options)


def answer(prompt: str) -> str:
    return prompt[::-1]


class Echo:
    """Answers with the prompt reversed, from a thread of its own. `fails`: request number and attempt -> its error, or
    None to answer; an attempt that is `held` ends only by being cancelled."""

    def __init__(
        self,
        slots: int = 4,
        fails: Callable[[int, int], KvtoolError | None] = lambda number, attempt: None,
        held: Callable[[int], bool] = lambda number: False,
        pause_s: float = 0.0,
    ) -> None:
        self.slots_max, self._fails, self._held, self._pause_s = slots, fails, held, pause_s
        self.started: list[int] = []
        self.running: dict[str, tuple[Ready, Tell]] = {}
        self.most_running = 0
        self.closed = False
        self._lock = threading.Lock()

    def start(self, ready: Ready, tell: Tell) -> None:
        with self._lock:
            self.started.append(ready.number)
            self.running[ready.name] = ready, tell
            self.most_running = max(self.most_running, len(self.running))
        if not self._held(ready.number):
            threading.Thread(target=self._answer, args=(ready.name,), daemon=True).start()

    def cancel(self, name: str) -> None:
        with self._lock:
            found = self.running.pop(name, None)
        if found:
            found[1](Ended(found[0].number, name, error=Cancelled(f"{name}: cancelled")))

    def trouble(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True

    def _answer(self, name: str) -> None:
        if self._pause_s:
            time.sleep(self._pause_s)
        with self._lock:
            found = self.running.pop(name, None)
        if found is None:
            return
        ready, tell = found
        error = self._fails(ready.number, int(name.rpartition("-")[2]))
        if error is not None:
            tell(Ended(ready.number, name, error=error))
            return
        tell(Published(ready.number, name))
        usage = {"prompt_tokens": len(ready.tokens), "completion_tokens": 2, "hit_tokens": {"dram": BLOCK}}
        tell(Ended(ready.number, name, answer(bytes(ready.tokens).decode()), "stop", usage))
