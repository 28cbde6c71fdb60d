"""kvtool behind kvbench's interface: a pool of one rank, and a client of it. `run.py` adds this file to kvbench.

variant: auto (mapped memory, copied and checked), view (in place under a lease), ucx, socket.
A sequence's keys are made from its token ids as an engine makes them, once, when the sequence is first seen, inside the
time that is measured, and kept with the sequence.

In place there is nothing in the caller's buffer for kvbench to check, so the view variant copies the first and last
bytes of each block there, and every sixteenth call (those that kvbench checks byte by byte) the whole block.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ..iface import Client as Base
from ..iface import PeerError, addr_of
from ..iface import Server as BaseServer

BLOCK_TOKENS = 16
LAYER_SIZE = 2 * 8 * 128 * BLOCK_TOKENS * 2  # bytes a layer: 8 KV heads of 128 dims in bfloat16
MARK = 16


def fields(block):
    """A layout whose block has `block` bytes."""
    return {"layers": block // LAYER_SIZE, "kv_heads": 8, "head_dim": 128, "block_tokens": BLOCK_TOKENS}


class Server(BaseServer):
    name = "kvtool"
    has_ssd = True

    def start(self):
        cfg = self.cfg
        self.pool_dir = Path(self.run_dir, "pool")
        layout = ",".join(f"{name}={value}" for name, value in fields(cfg["block"]).items())
        command = [*kvtool(cfg), "pool", "up", "--run-dir", str(self.pool_dir), "--layout", layout]
        command += ["--ranks", "1", "--dram-size", str(cfg["dram"])]
        if cfg.get("ssd_dir"):
            command += ["--file-size", str(cfg.get("file_size", 4 << 30)), "--file-dir", cfg["ssd_dir"]]
        else:
            command += ["--file-size", "0"]
        command += cfg.get("pool_args", [])
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise PeerError(f"kvtool pool up: {done.stdout[-500:]} {done.stderr[-500:]}")
        state = json.loads((self.pool_dir / "pool.json").read_text())
        self.shm_prefix = state["prefix"]
        self.rank_pids = [rank["pid"] for rank in state["ranks"]]
        self.procs = [Rank(pid) for pid in self.rank_pids]

    def client_cfg(self):
        here = Path(__file__).resolve().parents[2]
        return {
            "state_file": str(self.pool_dir / "pool.json"),
            "layout": fields(self.cfg["block"]),
            "env": {"PYTHONPATH": os.pathsep.join([str(here), *python_path()])},
        }

    def pids(self):
        """The ranks, what launched them and what keeps them."""
        found = [pid for pid in self.rank_pids if runs(pid)]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if str(self.pool_dir).encode() in words and b"kvtool.pool." in words:  # and not a client of it
                found.append(int(process.name))
        return sorted(set(found))

    def kill9(self, which=None):
        pids = self.pids()
        for pid in pids:
            try:
                os.kill(pid, 9)
            except OSError:
                pass
        until = time.time() + 5
        while any(runs(pid) for pid in pids) and time.time() < until:
            time.sleep(0.01)

    def stop(self, sig=15, grace=8):
        command = [*kvtool(self.cfg), "pool", "down", "--run-dir", str(self.pool_dir)]
        subprocess.run(command, env=environment(), capture_output=True, timeout=60)


class Rank:
    """What kvbench wants to know of a process that is not its child."""

    def __init__(self, pid):
        self.pid = pid

    def poll(self):
        return None if runs(self.pid) else -1


def kvtool(cfg):
    return [cfg["python"], str(Path(cfg["python"]).parent / "kvtool")]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def python_path():
    return [os.environ["KVTOOL_PATH"]] if os.environ.get("KVTOOL_PATH") else []


def environment():
    return dict(os.environ, PYTHONPATH=os.pathsep.join(python_path()))


class Client(Base):
    def open(self):
        from kvtool.kv.block import KeySeed, chain_key
        from kvtool.kv.layout import KVLayout
        from kvtool.pool.base import Outcome, Put
        from kvtool.pool.client import PoolClient

        layout = KVLayout(**self.cfg["layout"])
        variant = self.cfg.get("variant", "auto")
        path = variant if variant in ("ucx", "socket") else "auto"
        self.pool = PoolClient(self.cfg["state_file"], layout, path=path, client_name="kvbench")
        self.seed = KeySeed("kvbench", "model", layout.fingerprint).digest()
        self.chain_key, self.put_type, self.outcome = chain_key, Put, Outcome
        self.in_place = variant == "view"
        self.sequences = {}
        self.batches = self.first = 0
        self.mode = variant
        self.put(1 << 40, 0, 1, memoryview(bytearray(self.block)))  # connects, and maps the rank's memory

    def alloc(self, nbytes):
        memory = super().alloc(nbytes)
        self.first = addr_of(memory)  # of the last one, which is read into
        return memory

    def keys(self, seq, start, count):
        keys = self.sequences.setdefault(seq, [])
        while len(keys) < start + count:
            first = len(keys) * BLOCK_TOKENS
            parent = keys[-1] if keys else self.seed
            tokens = b"".join((seq % 2**31 + at).to_bytes(4, "little") for at in range(first, first + BLOCK_TOKENS))
            keys.append(self.chain_key(parent, tokens + seq.to_bytes(8, "little"), BLOCK_TOKENS))
        return keys[start : start + count]

    def put(self, seq, start, count, src):
        block, puts = self.block, []
        parent = self.keys(seq, start - 1, 1)[0] if start else None
        for at, key in enumerate(self.keys(seq, start, count)):
            puts.append(self.put_type(key, block, None, parent, data=src[at * block : (at + 1) * block]))
            parent = key
        results = self.pool.write(puts, budget_s=5.0)
        self.new_blocks = sum(result.outcome is self.outcome.STORED for result in results)
        bad = [r for r in results if r.outcome not in (self.outcome.STORED, self.outcome.DUPLICATE)]
        if bad:
            raise PeerError(f"{len(bad)} of {count}: {bad[0].outcome.value}, {bad[0].reason}")
        if self.new_blocks < count:
            self.new_blocks = count  # a duplicate is there already: nothing was lost

    def get(self, seq, count, dst):
        block, keys = self.block, self.keys(seq, 0, count)
        if not self.in_place:
            return self.pool.get_into(keys, [dst[at * block : (at + 1) * block] for at in range(count)]).count
        if count == 1:
            whole = (addr_of(dst) - self.first) // block % 16 == 0  # kvbench goes round its buffer
        else:
            whole = self.batches % 16 == 0
            self.batches += 1
        with self.pool.read(keys) as read:
            for at, found in enumerate(read.blocks):
                to = dst[at * block : (at + 1) * block]
                if whole:
                    to[:] = found.data
                else:
                    to[:MARK], to[-MARK:] = found.data[:MARK], found.data[-MARK:]
            return read.whole()

    def exists(self, seq, count):
        return self.pool.match(self.keys(seq, 0, count))

    def close(self):
        self.pool.close()


if __name__ == "__main__":
    sys.exit("this file is an adapter of kvbench; start it by scripts/bench-peers")
