"""Load on a pool while something happens to it: readers and writers that check every byte and count what they got."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

from blocks import LAYOUT, payload, puts

from kvtool.pool.client import PoolClient

PACE_S = 0.002
"""Between two calls of a thread: a pool that answers misses at once must not keep the machine busy."""


class Load:
    """What `threads` clients saw. `wrong` and `errors` must stay empty; `slowest_s` is that of one call."""

    def __init__(self, state_file: Path, keys: list[bytes], seed: int, threads: int = 2, budget_s: float = 1.0) -> None:
        self.seen: Counter[str] = Counter()
        self.wrong: list[bytes] = []
        self.errors: list[BaseException] = []
        self.slowest_s = 0.0
        self._file, self._keys, self._budget_s = state_file, keys, budget_s
        self._expected = {key: payload(key) for key in keys}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(Random(seed + n),)) for n in range(threads)]

    def _run(self, rng: Random) -> None:
        client = PoolClient(self._file, LAYOUT, client_name="load")
        try:
            while not self._stop.wait(PACE_S):
                start = rng.randrange(len(self._keys))
                keys = self._keys[start : start + rng.randrange(1, 9)]
                began_s = time.monotonic()
                if rng.random() < 0.4:
                    for result in client.write(puts(keys), budget_s=self._budget_s):
                        self.seen[result.outcome.value] += 1
                else:
                    self._read(client, keys)
                self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        except BaseException as error:
            self.errors.append(error)
        finally:
            client.close()

    def _read(self, client: PoolClient, keys: list[bytes]) -> None:
        with client.read(keys, budget_s=self._budget_s) as read:
            copies = [bytes(block.data) for block in read.blocks]
            whole = read.whole()
        self.seen["hit"] += whole
        self.seen["miss"] += len(keys) - whole
        got = zip(keys[:whole], copies[:whole], strict=True)
        self.wrong += [key for key, copy in got if copy != self._expected[key]]

    def check(self) -> None:
        assert not self.errors, repr(self.errors[0])
        assert not self.wrong, f"{len(self.wrong)} blocks with wrong bytes"

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"


@contextlib.contextmanager
def loaded(state_file: Path, keys: list[bytes], seed: int, threads: int = 2, budget_s: float = 1.0):
    load = Load(state_file, keys, seed, threads, budget_s)
    load.start()
    try:
        yield load
    finally:
        load.stop()
    load.check()
