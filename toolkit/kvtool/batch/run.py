"""Working through a job: what runs next, what came of it, when to stop.

One thread. Attempts run elsewhere and tell a queue; their results go to the journal, several to a sync, and count from
then on. Killed between any two instructions, a job that is resumed finds in its journal what is over, and runs the
rest.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

from kvtool.batch.intake import Words, prompt_tokens, read_again
from kvtool.batch.job import CANCEL, write_progress
from kvtool.batch.journal import Journal
from kvtool.batch.order import Gate
from kvtool.batch.rules import PARTS, Limits, Pressure, after_failure, code_of, parts_of
from kvtool.batch.store import Entry, Store
from kvtool.batch.target import Ended, Published, Ready, Target
from kvtool.errors import KvtoolError, Overloaded, Unavailable

LOOKAHEAD = 64
"""Requests that are looked through for one that need not wait for another's prefix."""
_TURN_S, _TELL_S = 0.2, 1.0
_DRAIN_S = 30.0


@dataclass
class Counts:
    """Of a job over all its runs, but for what says otherwise. Tokens are of requests that were answered."""

    requests: int = 0
    done: int = 0
    failed: int = 0
    retries: int = 0
    """In this run."""
    tokens_in: int = 0
    tokens_out: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    prefill_s: float = 0.0
    """That computing prompts took, as far as it was told."""
    seconds: float = 0.0
    """Of work, over all runs."""
    run_done: int = 0
    run_seconds: float = 0.0
    running: int = 0

    @property
    def over(self) -> int:
        return self.done + self.failed

    @classmethod
    def told(cls, progress: dict[str, Any]) -> Counts:
        """From `progress.json`, whatever of it is understood."""
        return cls(**{one.name: progress[one.name] for one in fields(cls) if one.name in progress})

    def add(self, record: dict[str, Any]) -> None:
        if "error" in record:
            self.failed += 1
            return
        self.done += 1
        usage = record["usage"]
        self.tokens_in += usage["prompt_tokens"]
        self.tokens_out += usage["completion_tokens"]
        self.prefill_s += usage.get("prefill_s", 0.0)
        for tier, tokens in usage["hit_tokens"].items():
            self.hit_tokens[tier] = self.hit_tokens.get(tier, 0) + tokens

    @property
    def reused(self) -> int:
        """Prompt tokens that came from the pool, of whatever tier."""
        return sum(self.hit_tokens.values())

    @property
    def saved_s(self) -> float:
        """What computing the reused tokens would have taken, at the rate at which the others were computed."""
        computed = self.tokens_in - self.reused
        return self.reused * self.prefill_s / computed if computed > 0 else 0.0

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens that came from the pool over prompt tokens."""
        return self.reused / self.tokens_in if self.tokens_in else 0.0


@dataclass
class _Attempts:
    """A request that is not over: how much of its attempts its failures used up (see `parts_of`), how often it ran."""

    entry: Entry
    parts: int = 0
    started: int = 0


class Runner:
    """`stop` is asked in each turn, and says why to stop, or "". The journal has what is over already; `worked_s`: how
    long earlier runs took."""

    def __init__(
        self,
        folder: Path,
        source: BinaryIO,
        store: Store,
        journal: Journal,
        words: Words,
        target: Target,
        limits: Limits,
        *,
        max_tokens: int,
        concurrent: int,
        worked_s: float = 0.0,
        stop: Callable[[], str] = lambda: "",
        tell: Callable[[Counts], None] = lambda counts: None,
        now_s: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._names = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.name)[:64]}-{uuid.uuid4().hex[:6]}"
        self._folder, self._source, self._journal, self._words = folder, source, journal, words
        self._target, self._limits, self._max_tokens = target, limits, max_tokens
        self._stop, self._tell, self._now_s, self._rng = stop, tell, now_s, Random(seed)
        self._pressure = Pressure(min(concurrent, target.slots_max))
        self._pressure.allowed = float(self._pressure.most)
        self._gate = Gate()
        self._queue: queue.SimpleQueue[Published | Ended] = queue.SimpleQueue()
        self._coming: Iterator[Entry] = (entry for entry in store.by_place() if entry.number not in journal)
        self._ahead: deque[_Attempts] = deque()
        self._again: list[tuple[float, int, _Attempts]] = []  # a heap: when, in which order, what
        self._order = itertools.count()
        self._running: dict[str, _Attempts] = {}
        self._records: list[tuple[int, dict[str, Any]]] = []
        self._began_s, self._worked_s = now_s(), worked_s
        self._told_s = 0.0
        self.counts = Counts(requests=len(store))
        for record in journal.records():
            self.counts.add(record)

    def run(self) -> str:
        """Until all is over (""), or why it stopped. What was started is ended, and what ended is in the journal.

        Raises:
            Unavailable: the journal cannot be written any more. What was over before stays so.
            Refused: the input was changed meanwhile.
        """
        why = ""
        try:
            while self.counts.over < self.counts.requests and not why:
                self._start_some()
                self._hear(self._idle_s(self._now_s()))
                why = self._why_stop()
        finally:
            self._end_running()
            self._report(self._now_s())
        return "" if self.counts.over == self.counts.requests else why

    # What runs.

    def _start_some(self) -> None:
        now_s = self._now_s()
        while len(self._running) < self._pressure.slots and now_s >= self._pressure.calm_at_s:
            chosen = self._choose(now_s)
            if chosen is None:
                return
            self._start(chosen, now_s)

    def _choose(self, now_s: float) -> _Attempts | None:
        """The next that need not wait. With nothing running nobody is to be waited for."""
        if self._again and self._again[0][0] <= now_s:
            return heapq.heappop(self._again)[2]
        while len(self._ahead) < LOOKAHEAD and (entry := next(self._coming, None)) is not None:
            self._ahead.append(_Attempts(entry))
        for index, attempts in enumerate(self._ahead):
            if not self._running or self._gate.may_start(attempts.entry.path):
                del self._ahead[index]
                return attempts
        return None

    def _idle_s(self, now_s: float) -> float:
        """How long there is nothing to do but to listen."""
        if not self._again or len(self._running) >= self._pressure.slots:
            return _TURN_S
        return min(_TURN_S, max(0.001, max(self._again[0][0], self._pressure.calm_at_s) - now_s))

    def _start(self, attempts: _Attempts, now_s: float) -> None:
        """
        Raises:
            Refused: the input was changed. The job stops, and goes on with the file that it was checked on.
        """
        entry = attempts.entry
        line = read_again(self._source, entry)
        attempts.started += 1
        name = f"{self._names}-{entry.number}-{attempts.started}"
        self._running[name] = attempts
        self._gate.started(entry.number, entry.path)
        try:
            tokens = tuple(prompt_tokens(line, self._words))
        except KvtoolError as error:
            self._queue.put(Ended(entry.number, name, error=error))
            return
        wanted = line.max_tokens if line.max_tokens is not None else self._max_tokens
        left_s = self._left_s(now_s)
        deadline_s = self._limits.request_s if left_s is None else max(0.001, min(self._limits.request_s, left_s))
        ready = Ready(entry.number, name, line, tokens, min(wanted, entry.tokens_out), deadline_s)
        self._target.start(ready, self._queue.put)

    # What came of it.

    def _hear(self, wait_s: float) -> None:
        """Everything that was told, after the first; then one sync for all of it."""
        try:
            event = self._queue.get(timeout=wait_s)
            while True:
                self._take(event, self._now_s())
                event = self._queue.get_nowait()
        except queue.Empty:
            pass
        self._write()
        now_s = self._now_s()
        if now_s - self._told_s >= _TELL_S:
            self._report(now_s)

    def _take(self, event: Published | Ended, now_s: float) -> None:
        if isinstance(event, Published):
            self._gate.published(event.number)
            return
        attempts = self._running.pop(event.name)
        if event.error is None:
            self._gate.published(event.number)
            self._pressure.succeeded()
            self._records.append((event.number, self._answer(attempts, event)))
            return
        self._gate.failed(event.number)
        if isinstance(event.error, Overloaded):
            self._pressure.refused(now_s, event.error.retry_after_s)
        elif isinstance(event.error, Unavailable):
            self._pressure.unserved(now_s, self._limits)
        attempts.parts += parts_of(event.error)
        again = after_failure(event.error, attempts.parts // PARTS, self._limits, now_s, self._rng)
        if again is not None:
            heapq.heappush(self._again, (again.at_s, next(self._order), attempts))
            self.counts.retries += 1
        elif not self._ends_by_us(event.error):
            record = {"custom_id": attempts.entry.custom_id, "attempts": attempts.started}
            record["error"] = {"code": code_of(event.error), "message": str(event.error)}
            self._records.append((event.number, record))

    def _ends_by_us(self, error: KvtoolError) -> bool:
        """Cancelled since the job stops: not over, and run again when it is resumed."""
        return code_of(error) == "cancelled"

    def _answer(self, attempts: _Attempts, event: Ended) -> dict[str, Any]:
        return {
            "custom_id": attempts.entry.custom_id,
            "text": event.text,
            "finish": event.finish,
            "usage": event.usage,
            "attempts": attempts.started,
            "created_s": int(time.time()),
        }

    def _write(self) -> None:
        records, self._records = self._records, []
        if records:
            self._journal.append(records)
            for _, record in records:
                self.counts.add(record)
                self.counts.run_done += 1

    # The end.

    def _why_stop(self) -> str:
        now_s = self._now_s()
        if (self._folder / CANCEL).exists():
            return "cancelled"
        left_s = self._left_s(now_s)
        if left_s is not None and left_s <= 0:
            return f"the job's time of {self._limits.job_s:g} s is up"
        if self._limits.tokens is not None and self.counts.tokens_out >= self._limits.tokens:
            return f"the job's {self._limits.tokens} tokens are used up"
        return self._stop()

    def _left_s(self, now_s: float) -> float | None:
        if self._limits.job_s is None:
            return None
        return self._limits.job_s - self._worked_s - (now_s - self._began_s)

    def _end_running(self) -> None:
        """Cancel what runs, hear its end, and write what was answered all the same."""
        for name in list(self._running):
            self._target.cancel(name)
        until_s = self._now_s() + _DRAIN_S
        while self._running and self._now_s() < until_s:
            self._hear(_TURN_S)

    def _report(self, now_s: float) -> None:
        self._told_s = now_s
        counts = self.counts
        counts.run_seconds = now_s - self._began_s
        counts.seconds = self._worked_s + counts.run_seconds
        counts.running = len(self._running)
        self._tell(counts)
        try:
            write_progress(self._folder, {**vars(counts), "at_s": time.time()})
        except OSError:
            pass  # a full disk: the journal says so where it matters
