"""Chaos: a real pool under load, and everything that may happen to it, at random and again and again.

    python tests/pool/chaos.py --minutes 30 --seed 7        (scripts/chaos does this)

Readers and writers check every byte that they get. Meanwhile ranks are killed and stopped, all of them at times; so are
clients, the keeper and mpiexec; bytes of block files and of slots in memory are changed; the disk of the run directory
is filled; ranks are added and drained. At the end all must be well: no wrong byte, no error, no call that took much
longer than its budget, nothing held, nothing left, and nobody grown. The seed is printed; what happens when also
depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from blocks import KEYS, LAYOUT, room_for
from loaded import Load
from watching import held, left_in, until

from kvtool.errors import KvtoolError
from kvtool.pool.config import PoolConfig
from kvtool.pool.filetier import files_of
from kvtool.pool.keeping import attach_keeper, keeper_status, wanted
from kvtool.pool.launch import pool_status, start_pool, stop_pool
from kvtool.pool.memory import SlotMemory
from kvtool.pool.resize import resize
from kvtool.pool.rundir import keeper_processes, rank_processes
from kvtool.pool.state import RankState, read_state, runs
from kvtool.transfer.segment import SHM, Segment

MINE = [b"chao" + key[4:] for key in KEYS[:240]]
SETTINGS = PoolConfig(
    LAYOUT, 3, dram_size=room_for(80), file_size=4 * 2**20, ucx=False, lease_term_s=2, reserve_term_s=2, name="chaos"
)
BUDGET_S = 1.0
RUN_DIR_SIZE = 32 * 2**20
WEIGHTS = {
    "kill_rank": 6, "stop_rank": 4, "kill_all": 1, "kill_keeper": 2, "kill_mpiexec": 1, "kill_client": 3,
    "spoil_file": 3, "spoil_memory": 3, "fill_disk": 1, "grow": 1, "shrink": 1, "rest": 4,
}  # fmt: skip


class Chaos:
    """One run. `events` counts what was done; `problems` must stay empty."""

    def __init__(self, seed: int, directory: Path, threads: int = 2) -> None:
        self.rng, self.directory = Random(seed), directory
        self.events: Counter[str] = Counter()
        self._stopped: dict[int, tuple[int, float]] = {}  # pid -> (start, when it goes on)
        self._full_until_s = 0.0
        self._clients: list[subprocess.Popen[bytes]] = []
        self._sizes: list[tuple[float, int]] = []
        self._files = _files()
        self.handle = start_pool(SETTINGS, directory)
        self.load = Load(self.handle.state_file, MINE, seed, threads, BUDGET_S)

    def run(self, seconds: float) -> dict[str, object]:
        began_s = time.monotonic()
        self.load.start()
        try:
            while time.monotonic() < began_s + seconds:
                self._go_on(time.monotonic())
                (event,) = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
                if getattr(self, f"_{event}")():
                    self.events[event] += 1
                time.sleep(self.rng.uniform(0.1, 1.5))
                self.load.check()
                self._sizes.append((time.monotonic() - began_s, _rss(os.getpid())))
            self._go_on(float("inf"))
            return self._end()
        finally:
            self._go_on(float("inf"))
            self.load.stop()
            for client in self._clients:
                client.kill()
                client.wait(10)

    # What happens; each says whether it did

    def _rest(self) -> bool:
        return True

    def _kill_rank(self) -> bool:
        return self._signal(self._some_rank(), signal.SIGKILL)

    def _kill_all(self) -> bool:
        return sum(self._signal(rank, signal.SIGKILL) for rank in self._ranks()) > 0

    def _stop_rank(self) -> bool:
        rank = self._some_rank()
        if rank is not None and self._signal(rank, signal.SIGSTOP):
            self._stopped[rank.pid] = (rank.started, time.monotonic() + self.rng.choice([0.2, 1.0, 4.0]))
            return True
        return False

    def _kill_keeper(self) -> bool:
        keeper = keeper_status(self.directory)
        if keeper.runs:
            os.kill(keeper.pid, signal.SIGKILL)
        return keeper.runs

    def _kill_mpiexec(self) -> bool:
        launcher = self.handle.pid
        if self.events["kill_mpiexec"]:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher, signal.SIGKILL)
        return True

    def _kill_client(self) -> bool:
        """One that writes and reads in a process of its own; the next one is begun."""
        for client in self._clients:
            assert client.poll() is None, "a client read wrong bytes, or failed"
            client.kill()
            client.wait(10)
        peer = Path(__file__).with_name("peer.py")
        command = [sys.executable, str(peer), "churn", str(self.handle.state_file)]
        self._clients = [subprocess.Popen(command, stdout=subprocess.DEVNULL)]
        return True

    def _spoil_file(self) -> bool:
        files = files_of(self.directory)
        if not files:
            return False
        with self.rng.choice(files).open("r+b") as file:
            file.seek(self.rng.randrange(max(1, file.seek(0, 2) - 64)))
            file.write(self.rng.randbytes(64))
        return True

    def _spoil_memory(self) -> bool:
        """Bytes of a block, not what the rank keeps in its headers."""
        rank = self._some_rank()
        if rank is None:
            return False
        try:
            segment = Segment.attach(rank.segment, writable=True, size=rank.segment_size, prefault=False)
        except KvtoolError:
            return False
        slot = SlotMemory(segment.view, rank.slots, LAYOUT.block_size).slot(
            self.rng.randrange(rank.slots), LAYOUT.block_size
        )
        at = self.rng.randrange(LAYOUT.block_size - 8)
        slot[at : at + 8] = self.rng.randbytes(8)
        slot.release()
        gc.collect()
        segment.close()
        return True

    def _fill_disk(self) -> bool:
        """Of the run directory, if that is on a disk of its own."""
        if not os.path.ismount(self.directory.parent):
            return False
        self._full_until_s = time.monotonic() + 3
        with contextlib.suppress(OSError), (self.directory.parent / "filler").open("wb") as file:
            while file.write(bytes(2**20)):
                file.flush()
        return True

    def _grow(self) -> bool:
        return self._resize(4)

    def _shrink(self) -> bool:
        return self._resize(3)

    # How

    def _resize(self, ranks: int) -> bool:
        if len(wanted(self.directory)) == ranks:
            return False
        try:
            resize(self.directory, ranks, budget_s=5)
        except (KvtoolError, OSError):
            return False  # a rank that was to drain is dead or hung; that is said, and the next try may do
        return True

    def _go_on(self, now_s: float) -> None:
        """Wake who was stopped for long enough, empty the disk, leave a keeper behind."""
        for pid, (started, until_s) in list(self._stopped.items()):
            if now_s >= until_s:
                del self._stopped[pid]
                if runs(pid, started):
                    os.kill(pid, signal.SIGCONT)
        if now_s >= self._full_until_s:
            (self.directory.parent / "filler").unlink(missing_ok=True)
            if now_s == float("inf") or self.rng.random() < 0.5:
                with contextlib.suppress(OSError):
                    attach_keeper(self.directory)

    def _ranks(self) -> list[RankState]:
        ranks = read_state(self.handle.state_file).ranks
        return [rank for rank in ranks if rank.alive and runs(rank.pid, rank.started)]

    def _some_rank(self) -> RankState | None:
        ranks = self._ranks()
        return self.rng.choice(ranks) if ranks else None

    def _signal(self, rank: RankState | None, number: int) -> bool:
        if rank is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, number)
            return True
        return False

    def _end(self) -> dict[str, object]:
        """Everything is left alone from now on: the pool heals, forgets what was held, and nobody has grown."""
        ranks = sorted(wanted(self.directory))
        until(lambda: self._whole(ranks), 60, "every rank that is wanted answers")
        hits = self.load.seen["hit"]
        until(lambda: self.load.seen["hit"] > hits + 100, 10, "reads hit again")
        self.load.stop()
        self.load.check()
        for client in self._clients:
            client.kill()
            client.wait(10)
        settling = lambda: [kind for kind in held(self.directory) if kind[1] != "transient"]  # noqa: E731
        until(lambda: not settling(), 20, f"nothing is held: {settling()}")
        keeper = keeper_status(self.directory)
        return {
            "events": dict(self.events),
            "seen": dict(self.load.seen),
            "slowest_call_s": round(self.load.slowest_s, 3),
            "rank_starts": sum(rank.incarnation for rank in read_state(self.handle.state_file).ranks),
            "rank_rss_mb": [round(_rss(pid) / 2**20) for pid, _ in rank_processes(self.directory)],
            "keeper_rss_mb": round(_rss(keeper.pid) / 2**20),
            "client_rss_growth_mb": round(self._growth() / 2**20, 1),
            "client_files_growth": _files() - self._files,
        }

    def _whole(self, ranks: list[int]) -> bool:
        found = pool_status(self.directory)
        attach_keeper(self.directory)
        answering = sorted(rank.rank for rank in found.ranks if rank.answer is not None)
        return answering == ranks and all(not rank.answer["hung"] for rank in found.ranks if rank.answer)

    def _growth(self) -> int:
        """Of this process's memory, from the first third to the last: what it took to warm up does not count."""
        third = len(self._sizes) // 3
        early, late = self._sizes[third : 2 * third], self._sizes[2 * third :]
        return min(size for _, size in late) - max(size for _, size in early) if early and late else 0


def _files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _rss(pid: int) -> int:
    """Resident bytes of its own: of the pool's memory, mapped by all, a process has as much as it touched."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * int(text.split("RssAnon:")[1].split()[0])


@contextlib.contextmanager
def small_disk(directory: Path):
    """A disk of its own where that is permitted, so that it can be filled."""
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={RUN_DIR_SIZE},mode=0700", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield directory
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(directory)], check=False)


def wreak(seed: int, seconds: float, directory: Path) -> dict[str, object]:
    """The whole of it, and a look for what is left."""
    print(f"chaos: seed {seed}, {seconds:g} s", flush=True)
    with small_disk(directory) as disk:
        run_dir = disk / "pool"
        run_dir.mkdir(mode=0o700)
        chaos = Chaos(seed, run_dir)
        try:
            found = chaos.run(seconds)
        except BaseException:
            with contextlib.suppress(OSError):
                print((run_dir / "pool.log").read_text()[-20000:], file=sys.stderr)
            raise
        finally:
            stop_pool(run_dir, purge=True)
        assert not rank_processes(run_dir) and not keeper_processes(run_dir), "processes are left"
        assert not list(SHM.glob(f"{chaos.handle.prefix}*")), "memory is left"
        assert left_in(run_dir) == ["pool.log"], f"files are left: {left_in(run_dir)}"
    assert chaos.load.slowest_s < BUDGET_S + 2.0, f"a call took {chaos.load.slowest_s:.1f} s"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Real ranks under load and random faults.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtool-chaos-") as directory:
        found = wreak(given.seed, given.minutes * 60, Path(directory) / "disk")
    print(json.dumps(found, indent=1))
    growth = found["client_rss_growth_mb"]
    assert isinstance(growth, float) and growth < 16, f"clients grew by {growth} MB"


if __name__ == "__main__":
    main()
